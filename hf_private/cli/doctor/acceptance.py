"""Acceptance of a device in about five minutes: is a private step exact there, does it wait, what does it cost?

Everything is made up, so the report holds nothing private and can be attached to an issue.
"""

import math
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from hf_private.gradients.bookkeeper import BookKeeper, trainable
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NOISE_KINDS, NoiseSource
from hf_private.mechanism.step import Mechanism
from hf_private.tasks.losses import PerSampleLoss

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXACT = 1e-4  # relative difference from autograd in float32
NUMBERS = 1 << 20
DEVIATIONS = 5  # of the mean and of the variance of the noise: exceeded once in a million runs
ROUNDS = 10


@dataclass
class Check:
    """One line of the report; `passed` is None for a figure without a limit."""

    name: str
    found: str
    passed: bool | None = None


def accept(device: torch.device) -> list[Check]:
    """All checks, in the order of the report."""
    return [
        _exact(device),
        *(_noise(device, kind) for kind in NOISE_KINDS),
        _waits(device),
        _cost(device),
        _products(device),
    ]


def environment(device: torch.device) -> str:
    """The device and the versions, in one line."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}; torch {torch.__version__}, transformers {hf.__version__}, Python {platform.python_version()}"


def _model(device: torch.device, size: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model: Any = hf.BertForSequenceClassification(hf.BertConfig(**size | NO_DROPOUT))
    return model.to(device)


def _batch(model: nn.Module, loss: PerSampleLoss, records: int, tokens: int, device: torch.device) -> dict:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, tokens + 1, (records, 1), generator=generator)
    batch = {
        "input_ids": torch.randint(1, 30000, (records, tokens), generator=generator),
        "attention_mask": (torch.arange(tokens) < lengths).long(),
        "labels": torch.arange(records) % 2,
    }
    checked = loss.checked(model, batch)
    return type(checked)({name: x.to(device) for name, x in checked.items()})


def _exact(device: torch.device) -> Check:
    """Norms and a clipped sum against a loop of plain autograd over the records, on the device."""
    model = _model(device, SMALL)
    loss = PerSampleLoss(model)
    batch = _batch(model, loss, 4, 16, device)
    with BookKeeper(model) as book:
        book.backward(loss(model, batch))
        norms = book.norms()
        factors = (0.5 / norms).clamp(max=1)
        sums = book.weighted_sum(factors)
    found = torch.cat([sums[name].flatten() for name in trainable(model)])
    expected, lengths = torch.zeros_like(found), []
    for n in range(4):
        one = type(batch)({name: x[n : n + 1] for name, x in batch.items()})
        gradients = torch.autograd.grad(loss(model, one).sum(), list(trainable(model).values()))
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        lengths.append(flat.norm())
        expected += factors[n] * flat
    off = float((norms - torch.stack(lengths)).abs().max() / norms.max())
    far = float((found - expected).norm() / expected.norm())
    return Check("exactness against a loop", f"norms {off:.1e}, clipped sum {far:.1e}", max(off, far) < EXACT)


def _noise(device: torch.device, kind: str) -> Check:
    """Mean and variance of noise on the device; secure noise is also that of the CPU, to the last bit."""
    drawn = torch.zeros(NUMBERS, device=device)
    NoiseSource(kind).add_(0, {"w": drawn}, {"w": 1.0})
    mean, variance = float(drawn.mean()), float(drawn.double().var())
    passed = abs(mean) < DEVIATIONS / math.sqrt(NUMBERS)
    passed = passed and abs(variance - 1) < DEVIATIONS * math.sqrt(2 / NUMBERS)
    text = f"mean {mean:+.1e}, variance 1 {variance - 1:+.1e}"
    if kind == "secure":
        there, here = torch.zeros(NUMBERS, device=device), torch.zeros(NUMBERS)
        for total in (there, here):
            NoiseSource(kind, bytes(32)).add_(0, {"w": total}, {"w": 1.0})
        same = torch.equal(there.to("cpu"), here)
        passed, text = passed and same, f"{text}, that of the CPU: {'yes' if same else 'no'}"
    return Check(f"{kind} noise", text, passed)


def _steps(model: nn.Module, loss: PerSampleLoss, batch: dict) -> tuple[Callable[[], None], Callable[[], None]]:
    """A plain step and a private one, each of two micro-batches."""
    mechanism = Mechanism(
        model,
        loss,
        clipping=Clipping(),
        noise=NoiseSource(),
        noise_multiplier=1.0,
        sample_rate=0.01,
        expected_batch_size=16.0,
        charge=lambda event: None,
    )

    def plain() -> None:
        model.zero_grad()
        for _ in range(2):
            loss(model, batch).mean().backward()

    return plain, lambda: mechanism.step([batch, batch])


def waits_in(step: Callable[[], None], device: torch.device) -> int | None:
    """How often the host waits for the device in a step; None if that cannot be counted there."""
    if device.type != "cuda":
        return None
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return sum("synchroniz" in str(warning.message) for warning in caught)


def _waits(device: torch.device) -> Check:
    model = _model(device, SMALL)
    loss = PerSampleLoss(model)
    plain, private = _steps(model, loss, _batch(model, loss, 4, 16, device))
    for step in (plain, private):  # the first one learns the layouts
        step()
    of_plain, of_private = waits_in(plain, device), waits_in(private, device)
    if of_plain is None or of_private is None:
        return Check("waits for the device in a step", "not counted on this device")
    text = f"plain {of_plain}, private {of_private}"
    return Check("waits for the device in a step", text, of_private <= of_plain)


def _cost(device: torch.device) -> Check:
    """Time and memory of a private step, by those of plain forward and backward passes of the same model."""
    model = _model(device, {} if device.type == "cuda" else SMALL)
    loss = PerSampleLoss(model)
    batch = _batch(model, loss, 8, 128, device)
    seconds: list[float] = []
    peaks: list[int] = []
    for step in _steps(model, loss, batch):
        step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            step()
            _finish(model)
            times.append(time.perf_counter() - began)
        seconds.append(min(times))
        if device.type == "cuda":
            peaks.append(torch.cuda.max_memory_allocated(device))
    text = f"private step with noise: speed {seconds[0] / seconds[1]:.2f}"
    if peaks:
        text += f", memory {peaks[1] / peaks[0]:.2f}"
    return Check("cost relative to plain passes", text)


def _finish(model: nn.Module) -> None:
    """Wait until the device has computed the gradients."""
    grad: Tensor | None = next(model.parameters()).grad
    assert grad is not None, "a step leaves gradients"
    grad.flatten()[0].item()


def _products(device: torch.device) -> Check:
    """Whether products of bf16 operands into float32 are those of widened operands there."""
    name = "bf16 products into float32"
    a = torch.randn(256, 512, device=device).to(torch.bfloat16)
    exact = a.float() @ a.float().t()
    try:
        found = torch.mm(a, a.t(), out_dtype=torch.float32)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        return Check(name, f"not offered ({type(error).__name__}); operands are widened")
    far = float((found - exact).abs().max() / exact.abs().max())
    return Check(name, f"differ by {far:.1e} from widened operands, which are used")
