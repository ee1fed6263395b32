"""The training methods that `hf-private doctor` compares."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_private.gradients.bookkeeper import rows_per_record, trainable
from hf_private.gradients.method import Full, Method
from hf_private.gradients.persample import Dense, Outer, PerSample
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.methods.carriers.method import Carriers
from hf_private.methods.presets import PRESETS
from hf_private.methods.registry import resolve_method

from . import dryrun, quantised

Losses = Callable[[nn.Module], Tensor]  # runs a micro-batch


@dataclass(frozen=True)
class Row:
    """One method: how many parameters are trained and get noise, the cost of a micro-batch, and the total memory.

    The total is the weights, the state of AdamW, and the larger of a micro-batch and the gradients of an update.
    `layerwise` counts decisions of BK: of so many linear weights, the per-sample gradients of so many are formed, and
    of how many the rule of its paper would form them.
    """

    method: str
    trained: int
    noised: int
    peak_bytes: int
    flops: int
    total_bytes: int
    layerwise: dict[str, int] | None = None


class Layerwise(Full):
    """BK, which notes for each linear weight whether its per-sample gradients are formed."""

    def __init__(self) -> None:
        self.formed: dict[str, bool] = {}
        self.by_paper: dict[str, bool] = {}

    def observe(self, name: str, value: PerSample) -> dict[str, PerSample]:
        entries = super().observe(name, value)
        if isinstance(value, Outer):
            positions, rows, columns = *value.left.shape[1:], value.right.shape[2]
            self.formed[name] = isinstance(entries[name], Dense)
            self.by_paper[name] = 2 * positions**2 >= rows * columns
        return entries


def compare(
    build: Callable[[], nn.Module], losses: Losses, carriers: Mapping[str, Any], bits: int | None = None
) -> list[Row]:
    """Dry-run each applicable method on a fresh model.

    The first row is plain training of all trainable parameters.

    Args:
        carriers: Fields of `CarrierConfig`.
        bits: Also run LoRA on a base of so many bits.
    """
    model = build()
    rows = [_row("plain training", model, None, losses), _row("BK", model, Layerwise(), losses)]
    if isinstance(model, PeftModel):  # an adapter is low-rank already
        return rows
    rank = carriers.get("r", CarrierConfig.r)
    sparsity = carriers.get("sparsity") or 0.3
    others: dict[str, Callable[[nn.Module], tuple[nn.Module, Method]]] = {
        **{f"BK, train_only={preset}": partial(_preset, preset) for preset in PRESETS if preset != "lora-B"},
        f"BK on LoRA r={rank}": lambda model: (_lora(model, rank), Full()),
        f"BK on LoRA r={rank}, train_only=lora-B": lambda model: _preset("lora-B", _lora(model, rank)),
        f"RGP r={rank}": lambda model: _with_carriers(model, {**carriers, "sparsity": 0.0}),
        f"LSG r={rank} sparsity={sparsity:g}": lambda model: _with_carriers(model, {**carriers, "sparsity": sparsity}),
    }
    for name, prepare in others.items():
        try:
            rows.append(_row(name, *prepare(build()), losses))
        except ValueError:  # for example, a model without linear layers, or that a preset does not fit
            if carriers and "train_only" not in name:
                raise
    if bits is not None:
        rows.append(_quantised_row(build(), rank, bits, losses))
    return rows


def _quantised_row(model: nn.Module, rank: int, bits: int, losses: Losses) -> Row:
    assert isinstance(model, PreTrainedModel), "doctor builds models of transformers"
    weights, largest = quantised.prepare(model, bits)
    adapter = _lora(model, rank)
    row = _row(f"BK on LoRA r={rank}, {bits} bits", adapter, Full(), losses)
    built = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    peak = row.peak_bytes + largest  # a weight that is dequantised
    return replace(row, peak_bytes=peak, total_bytes=row.total_bytes - built + weights + largest)


def _lora(model: nn.Module, rank: int) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))


def _preset(preset: str, model: nn.Module) -> tuple[nn.Module, Method]:
    return model, resolve_method(None, model, train_only=preset)


def _with_carriers(model: nn.Module, settings: dict[str, Any]) -> tuple[nn.Module, Method]:
    return model, resolve_method(CarrierConfig(**settings), model)


def _row(name: str, model: nn.Module, method: Method | None, losses: Losses) -> Row:
    parameters = trainable(model)
    trained = sum(p.numel() for p in parameters.values())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    gradients = sum(p.numel() * p.element_size() for p in parameters.values())
    if method is None:
        cost = dryrun.measure(lambda: dryrun.plain_step(model, lambda: losses(model)))
        return Row(name, trained, 0, cost.peak_bytes, cost.flops, weights + 2 * gradients + cost.peak_bytes)
    method.attach(parameters)
    method.begin_step(0)  # carriers are computed once per logical step, not per micro-batch
    rows = rows_per_record(losses)
    cost = dryrun.measure(lambda: dryrun.private_step(model, lambda: losses(model), method, rows))
    noised = sum(shape.numel() for shape in method.blocks.values())
    kept = method.start_bytes if isinstance(method, Carriers) else 0  # W_0, if the carriers come from the history
    sums = 4 * sum(shape.numel() for block, shape in method.blocks.items() if block not in parameters)
    update = gradients + sums  # a block that is the sum of a parameter becomes its gradient
    total = weights + 2 * gradients + kept + max(cost.peak_bytes, update)
    layerwise = None
    if isinstance(method, Layerwise):
        counts = (len(method.formed), sum(method.formed.values()), sum(method.by_paper.values()))
        layerwise = dict(zip(("weights", "formed", "formed_by_paper"), counts, strict=True))
    return Row(name, trained, noised, cost.peak_bytes + kept, cost.flops, total, layerwise)
