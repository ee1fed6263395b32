"""The ways in which a model could be trained, side by side: what the doctor compares."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.method import Full, Method
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.methods.carriers.method import Carriers
from hf_private.methods.registry import resolve_method

from . import dryrun

Losses = Callable[[nn.Module], Tensor]  # runs a micro-batch


@dataclass(frozen=True)
class Row:
    """One way of training: numbers that are trained and that get noise, the cost of a micro-batch, and memory in all:
    the weights, AdamW's state, and a micro-batch or, if that is more, the gradients that the optimizer gets."""

    method: str
    trained: int
    noised: int
    peak_bytes: int
    flops: int
    total_bytes: int


def compare(build: Callable[[], nn.Module], losses: Losses, carriers: Mapping[str, Any]) -> list[Row]:
    """Dry-run each method that applies on a model of its own; `carriers` are fields of `CarrierConfig`.

    The first row is plain training of everything that is trainable.
    """
    model = build()
    rows = [_row("plain training", model, None, losses), _row("BK", model, Full(), losses)]
    if isinstance(model, PeftModel):  # an adapter is low-rank already
        return rows
    rank = carriers.get("r", CarrierConfig.r)
    others: dict[str, Callable[[], tuple[nn.Module, Method]]] = {
        f"BK on LoRA r={rank}": lambda: (_lora(build(), rank), Full())
    }
    for sparsity in (0.0, carriers.get("sparsity") or 0.3):
        name = f"LSG r={rank} sparsity={sparsity:g}" if sparsity else f"RGP r={rank}"
        others[name] = lambda sparsity=sparsity: _carried(build(), CarrierConfig(**{**carriers, "sparsity": sparsity}))
    for name, make in others.items():
        try:
            rows.append(_row(name, *make(), losses))
        except ValueError:  # a model without linear layers, for instance
            if carriers:
                raise
    return rows


def _lora(model: nn.Module, rank: int) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))


def _carried(model: nn.Module, config: CarrierConfig) -> tuple[nn.Module, Method]:
    return model, resolve_method(config, model)


def _row(name: str, model: nn.Module, method: Method | None, losses: Losses) -> Row:
    parameters = trainable(model)
    trained = sum(p.numel() for p in parameters.values())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    gradients = sum(p.numel() * p.element_size() for p in parameters.values())
    if method is None:
        cost = dryrun.measure(lambda: dryrun.plain_step(model, lambda: losses(model)))
        return Row(name, trained, 0, cost.peak_bytes, cost.flops, weights + 2 * gradients + cost.peak_bytes)
    method.attach(parameters)
    method.begin_step(0)  # carriers are computed once per logical step, which is not part of a micro-batch
    cost = dryrun.measure(lambda: dryrun.private_step(model, lambda: losses(model), method))
    noised = sum(shape.numel() for shape in method.blocks.values())
    kept = method.start_bytes if isinstance(method, Carriers) else 0  # W_0, where carriers come from the history
    sums = 4 * sum(shape.numel() for block, shape in method.blocks.items() if block not in parameters)
    update = gradients + sums  # a block that is a parameter's own sum becomes its gradient
    total = weights + 2 * gradients + kept + max(cost.peak_bytes, update)
    return Row(name, trained, noised, cost.peak_bytes + kept, cost.flops, total)
