"""What must be true of a run before its update is trusted: of its optimizer, its gradients, its data on all ranks."""

import hashlib
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .bookkeeping import trainable

SAMPLES = 64  # records that are compared between ranks


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """The optimizer must update the very Parameter objects whose gradients are made private."""
    engine = {id(p): name for name, p in trainable(model).items()}
    held = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if missing := [name for key, name in engine.items() if key not in held]:
        raise ValueError(
            f"`optimizers` must hold every trainable parameter of the model, got one without `{missing[0]}`"
            f" ({len(missing)} in all). Build it from trainer.model.parameters(), or freeze them."
        )
    if strangers := held.keys() - engine.keys():
        raise ValueError(
            f"`optimizers` must hold parameters of the model only, got {len(strangers)} others. It was built for"
            " another copy of the model: build it from trainer.model.parameters()."
        )


def check_gradients(model: nn.Module, noised: bool) -> None:
    """Every trainable parameter must have got a gradient, finite and, if it is `noised`, not zero throughout."""
    for name, p in trainable(model).items():
        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad  # this rank's rows, maybe none
        ok = grad is not None and bool(grad.isfinite().all())
        if not ok or (noised and grad.numel() and not grad.any()):
            got = "none" if grad is None else "zero" if ok else "one that is not finite"
            raise RuntimeError(f"`{name}` must have a finite, non-zero gradient after a private step, got {got}.")


def order_of(dataset: Any) -> tuple[int, str | None] | None:
    """Number of records, and a hash of some, by which ranks see that they hold the same records in the same order.

    A draw is a set of positions, shared out among the ranks: with another order on each, one record could be in it
    twice. The hash is None for datasets that may give another view of a record whenever they are asked.

    >>> order_of(["a", "b"]) == order_of(["b", "a"])
    False
    """
    if dataset is None:
        return None
    size = len(dataset)
    plain = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
    if plain is dataset and not isinstance(dataset, list | tuple):
        return size, None
    some = [plain[index] for index in range(0, size, max(1, size // SAMPLES))]
    return size, hashlib.sha256(repr(some).encode()).hexdigest()
