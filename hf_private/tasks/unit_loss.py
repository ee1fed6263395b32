"""Losses and made-up batches of units, and of records with several rows.

The self-check exchanges units, too. That rows are independent is checked before: a micro-batch may hold units of one
row each. The check of units adds that the engine's gradient of a whole unit, over all of its rows, is autograd's, and
stays what it is beside other units.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_private.gradients.bookkeeper import rows_per_record
from hf_private.mechanism.units import UnitBatch

from .independence import empty_rows

CHECKED_ROWS = 2  # rows of each unit in the self-check

Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
MakeBatch = Callable[..., dict[str, Tensor]]


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
        flat = self.flat(batch)
        num_rows = len(next(iter(flat.values())))
        return UnitBatch(flat, self.rows, self.rows).losses(self.loss(model, flat), num_rows)

    def flat(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All rows (U * `rows`, ...), those of a unit one after the other."""
        for name, value in batch.items():
            if value.dim() < 2 or value.shape[1] != self.rows:
                raise ValueError(
                    f"`{name}` must have the shape (records, {self.rows}, ...), for {self.rows} rows of each record,"
                    f" got {tuple(value.shape)}. Pad records that have fewer with rows whose mask is 0."
                )
        return {name: value.flatten(0, 1) for name, value in batch.items()}


class RowsLoss(UnitLoss):
    """The loss of each record of a batch (N, `rows`, ...): the mean of its rows without padding rows.

    A padding row has no 1 in its mask, and costs no gradient. A loss that returns (N,) for N * `rows` rows combines
    them itself, and is taken as it is.

    Guarantee: a record's rows are one gradient, which is clipped as one.
    """

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        flat = self.flat(batch)
        losses = self.loss(model, flat)
        empty = empty_rows(flat)
        records = len(next(iter(batch.values())))
        if losses.shape == (records,) or empty is None:
            return UnitBatch(flat, self.rows, self.rows).losses(losses, records * self.rows)
        count = (~empty).unflatten(0, (records, self.rows)).sum(1)
        return losses.unflatten(0, (records, self.rows)).sum(1) / count.clamp(min=1)


def made_up_units(make_batch: MakeBatch, rows: int) -> MakeBatch:
    """A function that makes batches of units (U, `rows`, ...) from one that makes batches of rows."""

    def make(units: int, length: int, generator: torch.Generator | None = None, **options: Any) -> dict[str, Tensor]:
        batch = make_batch(units * rows, length, generator, **options)
        return {name: value.unflatten(0, (units, rows)) for name, value in batch.items()}

    return make
