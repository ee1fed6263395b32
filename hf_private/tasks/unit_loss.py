"""Losses and made-up batches of units, with which the self-check exchanges units, too.

That rows keep apart is checked before: a micro-batch may hold units of one row each. The check of units adds that the
engine's gradient of a whole unit, over all of its rows, is autograd's, and stays what it is beside other units.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_private.gradients.bookkeeper import rows_per_record
from hf_private.mechanism.units import UnitBatch

CHECKED_ROWS = 2  # rows of each unit in the self-check

Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
MakeBatch = Callable[..., Mapping[str, Tensor]]


class UnitLoss:
    """The loss of each unit of a batch (U, `rows`, ...): the mean of its rows, as in a step.

    >>> loss = UnitLoss(lambda model, batch: model(batch["x"]).sum(1), rows=2)
    >>> loss(torch.nn.Identity(), {"x": torch.tensor([[[1.0], [3.0]], [[5.0], [5.0]]])})
    tensor([2., 5.])
    """

    def __init__(self, loss: Loss, rows: int) -> None:
        self.loss = loss
        self.rows = rows
        self.rows_per_record = rows * rows_per_record(loss)  # that the model is called with for each unit

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        flat = {name: value.flatten(0, 1) for name, value in batch.items()}
        losses = self.loss(model, flat)
        num_rows = len(next(iter(flat.values())))
        return UnitBatch(flat, self.rows, self.rows).losses(losses, num_rows)


def made_up_units(make_batch: MakeBatch, rows: int) -> MakeBatch:
    """A function that makes batches of units (U, `rows`, ...) from one that makes batches of rows."""

    def make(units: int, length: int, generator: torch.Generator | None = None, **options: Any) -> dict[str, Tensor]:
        batch = make_batch(units * rows, length, generator, **options)
        return {name: value.unflatten(0, (units, rows)) for name, value in batch.items()}

    return make
