"""Run by tests/devices in a process of its own: each method for two steps on the CPU and on the emulated device."""

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.method import Full, Method
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.methods.carriers.method import Carriers
from hf_private.methods.gep.config import AnchorConfig
from hf_private.methods.gep.method import Anchors
from hf_private.methods.gep.public_data import AnchorBooks
from hf_private.tasks.losses import CheckedBatch, PerSampleLoss
from tests.support import zoo
from tests.support.devices import emulated

KEY = bytes(range(32))
MICRO_BATCHES = 3

CASES: dict[str, tuple[str, str]] = {  # model of the zoo, method
    "BK": ("bert", "full"),
    "BK, a record without a finite gradient": ("bert", "broken"),
    "BK, convolutions": ("resnet-gn", "full"),
    "LoRA": ("bert", "lora"),
    "RGP": ("bert", "rgp"),
    "LSG": ("bert", "lsg"),
    "RGP, history": ("bert", "history"),
    "RGP, momentum": ("bert", "momentum"),
    "RGP, public": ("bert", "public"),
    "LSG, elements": ("bert", "elements"),
    "GEP": ("bert", "gep"),
    "B-GEP": ("bert", "b-gep"),
}
CARRIERS: dict[str, dict[str, Any]] = {
    "rgp": {"source": "weight"},
    "lsg": {"sparsity": 0.3},
    "history": {"source": "history", "warmup_steps": 1},
    "momentum": {"source": "momentum"},
    "public": {"source": "public"},
    "elements": {"sparsity": 0.3, "r": None, "mask": "elements"},
}

NOISES = {case: ("secure", "fast") if case == "BK" else ("secure",) for case in CASES}


def prepared(case: str, device: str) -> tuple[nn.Module, Any, Method, list[dict[str, Tensor]]]:
    """Model on a device, loss, method and micro-batches."""
    name, kind = CASES[case]
    # torch's fused attention takes another kernel on the CPU than on other devices, and sums in another order.
    model, _ = zoo.build(name, torch.float32, **({} if name in zoo.PLAIN else {"attn_implementation": "eager"}))
    parts = [zoo.make_batch(model, 4, seed=seed) for seed in range(MICRO_BATCHES)]
    public = zoo.make_batch(model, 6, seed=9)
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))
    model.eval().to(device)
    loss = zoo.loss_of(model)
    method: Method = Full()
    if kind in CARRIERS:
        method = CarrierConfig(**{"r": 2, "refresh": 1} | CARRIERS[kind]).build(model)
    elif kind in ("gep", "b-gep"):
        anchors = AnchorConfig(k=8, num_anchors=6, target_modules="all-linear", layers_to_transform=1)
        method = replace(anchors, residual=kind == "gep").build(model)
    if isinstance(method, Anchors | Carriers):
        there = CheckedBatch({key: x.to(device) for key, x in public.items()})
        method.books = AnchorBooks(model, loss, lambda step: [there])
    if isinstance(loss, PerSampleLoss):
        parts = [loss.checked(model, part) for part in parts]
    if kind == "broken":
        loss = partial(broken, loss, torch.tensor([1.0, torch.nan, 1.0, 1.0]).to(device))
    return model, loss, method, [type(part)({key: x.to(device) for key, x in part.items()}) for part in parts]


def broken(loss: Any, weights: Tensor, model: nn.Module, batch: Any) -> Tensor:
    """The losses of the records times weights, which may be NaN."""
    return loss(model, batch) * weights


def gradients(case: str, device: str, noise: str = "secure") -> tuple[list[Tensor], list[emulated.Counts]]:
    """What two steps leave in `.grad`, and what each of them counted: the second knows every layout already."""
    model, loss, method, parts = prepared(case, device)
    mechanism = Mechanism(
        model,
        loss,
        method=method,
        clipping=Clipping(clip_norm=0.5),
        noise=NoiseSource(noise, KEY),
        noise_multiplier=1.0,
        sample_rate=0.1,
        expected_batch_size=8.0,
        charge=lambda event: None,
    )
    found, counts = [], []
    for _ in range(2):
        with emulated.counted() as counted:
            mechanism.step(parts)
        found.append(torch.cat([p.grad.flatten().to("cpu") for p in trainable(model).values()]))
        counts.append(counted)
        with torch.no_grad():
            for p in trainable(model).values():
                p.add_(p.grad, alpha=-0.01)
    return found, counts


def forward_counts(case: str) -> emulated.Counts:
    """What the model alone counts in the forward and backward passes of a step."""
    model, loss, _, parts = prepared(case, "emu")
    for part in parts:
        loss(model, part).sum().backward()
    with emulated.counted() as counted:
        for part in parts:
            loss(model, part).sum().backward()
    return counted


def main(path: str) -> None:
    """Write what each case gives on both devices."""
    library = emulated.register()
    found = {}
    for case in CASES:
        for noise in NOISES[case]:
            there, counts = gradients(case, "emu", noise)
            found[case, noise] = {
                "cpu": gradients(case, "cpu", noise)[0],
                "emu": there,
                "mixed": sum(counts[1].mixed.values()),
                "syncs": dict(counts[1].syncs),
                "own_syncs": forward_counts(case).syncs,
                "copied_to_host": dict(counts[1].copied_to_host),
                "copied_to_device": dict(counts[1].copied_to_device),
                "largest": dict(counts[1].largest),
            }
    torch.save(found, path)
    del library
    emulated.leave()


if __name__ == "__main__":
    main(sys.argv[1])
