"""Models, public records and formed gradients that the tests of GEP share."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_private.gradients.bookkeeper import trainable
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from hf_private.methods.gep.config import AnchorConfig
from hf_private.methods.gep.public_data import AnchorBooks
from hf_private.tasks.losses import PerSampleLoss
from tests.support import families as cases

EXACT = 1e-8
RECORDS, ANCHORS = 4, 9


class MLP(nn.Module):
    """Two layers, one of them used twice."""

    def __init__(self, sizes: tuple[int, ...] = (5, 6, 6, 3), bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) if index == 0 else layer(x.tanh())
            if x.shape[-1] == layer.in_features:  # a second use of one weight
                x = layer(x)
        return x


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def numbers(model, records, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype, width = next(model.parameters()).dtype, next(model.parameters()).shape[1]
    classes = list(model.parameters())[-1].shape[0]
    x = torch.randn(records, width, generator=generator, dtype=torch.float64).to(dtype)
    return {"x": x, "y": torch.randint(classes, (records,), generator=generator)}


def mlp():
    torch.manual_seed(0)
    return MLP().double(), cross_entropy, numbers


def family(name):
    model, loss = cases.build(name)
    return model.eval(), loss, lambda model, records, seed=0: cases.make_batch(model, records, seed=seed)


def lora_gpt2():
    model, _, batch = family("gpt2")
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)).double()
    return model.eval(), PerSampleLoss(model), batch


CASES: dict[str, tuple[Callable, dict]] = {
    "MLP": (mlp, {"k": 12}),
    "MLP, stages": (mlp, {"k": 12, "groups": "stage", "power_iterations": 3}),
    "ResNet": (lambda: family("resnet-gn"), {"k": 12, "groups": ["stem|norm", "grouped|dilated|down", "classifier"]}),
    "BERT, head and last layer": (
        lambda: family("bert"),
        {"k": 16, "target_modules": "all-linear", "layers_to_transform": 1},
    ),
    "GPT-2, tied": (lambda: family("gpt2"), {"k": 12, "target_modules": ["c_fc", "lm_head"]}),
    "LoRA on GPT-2": (lora_gpt2, {"k": 14}),
}


def prepare(case, **settings):
    """Model, loss, a private batch and the attached method, its subspace found from other, public records."""
    build, config = CASES[case]
    model, loss, batch = build()
    method = AnchorConfig(**{"num_anchors": ANCHORS, **config, **settings}).build(model)
    method.books = AnchorBooks(model, loss, public(model, batch))
    method.attach(trainable(model))
    method.begin_step(0)
    return model, loss, batch(model, RECORDS), method


def public(model, batch, count=ANCHORS, rows=4):
    """Public records in micro-batches; they do not depend on the step."""

    whole = batch(model, count, seed=7)
    parts = [{name: value[at : at + rows] for name, value in whole.items()} for at in range(0, count, rows)]
    return lambda step: parts


def basis_of(method):
    """The bases as one block-diagonal matrix (k, p), parameters in order."""
    total = sum(group.k for group in method.groups.values())
    blocks, first = [], {}
    for name, (_, k) in method.groups.items():
        first[name] = sum(first[other][1] for other in first), k
    for name, p in method.parameters.items():
        start, k = first[method.group_of[name]]
        block = torch.zeros(total, p.numel(), dtype=torch.float64)
        block[start : start + k] = method.basis[name].flatten(1)
        blocks.append(block)
    return torch.cat(blocks, 1)


def formed(gradients):
    """Oracle gradients as a matrix (N, p)."""
    return torch.stack([torch.cat([g.flatten() for g in one.values()]) for one in gradients])


def released(method, sums):
    """Embedding (k,) and residual (p,) of what a method gives."""
    w = torch.cat([sums[f"@{name}"] for name in method.groups])
    return w, torch.cat([sums[name].flatten() for name in method.parameters]) if method.residual else None


def clip(rows, clip_norm):
    return (rows * (clip_norm / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)


def run(model, loss, method, batches, noise_multiplier=0.0, clip_norm=math.inf, step=0, key=b"0" * 32):
    """The gradient of one step of the mechanism."""
    mechanism = Mechanism(
        model,
        loss,
        method=method,
        clipping=Clipping(clip_norm=clip_norm),
        noise=NoiseSource("fast", key),
        noise_multiplier=noise_multiplier,
        sample_rate=0.1,
        expected_batch_size=1,
        charge=lambda event: None,
    )
    mechanism.steps = step
    mechanism.step(batches)
    return torch.cat([p.grad.flatten() for p in trainable(model).values()])
