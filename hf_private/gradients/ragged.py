"""A linear layer on rows that are not in the order of their records, as an expert gets them from its router."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from .persample import Dense, Grams, Outer, PerSample, per_record
from .products import widen


class Route:
    """Whose record each of some rows is: `records` (R,) of N."""

    def __init__(self, records: Tensor, number: int) -> None:
        self.records, self.number = records, number

    @cached_property
    def width(self) -> int:
        """Most rows of one record."""
        return int(self._counts.max()) if len(self.records) else 0

    @cached_property
    def _counts(self) -> Tensor:
        return torch.bincount(self.records, minlength=self.number)

    @cached_property
    def _place(self) -> Tensor:
        order = self.records.argsort(stable=True)
        first = self._counts.cumsum(0) - self._counts
        within = torch.empty_like(self.records)
        within[order] = torch.arange(len(order), device=order.device) - first[self.records[order]]
        return self.records * self.width + within

    def padded(self, x: Tensor) -> Tensor:
        """Rows (R, ...) as (N, width, ...), with zeros where a record has fewer."""
        empty = x.new_zeros(self.number * self.width, *x.shape[1:])
        return empty.index_copy(0, self._place, x).unflatten(0, (self.number, self.width))

    def unpadded(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, self._place)

    def picked(self, index: Tensor) -> Route:
        return Route(self.records[index], self.number)

    def present(self) -> tuple[Tensor, Route]:
        """The records that have rows, and the route among them alone."""
        found, records = self.records.unique(return_inverse=True)
        return found, Route(records, len(found))


class Ragged(PerSample):
    """`g_n` is the sum of `left_r^T right_r` over the rows r of record n: `left` (R, rows), `right` (R, columns)."""

    def __init__(self, left: Tensor, right: Tensor, route: Route) -> None:
        self.left, self.right, self.route = left.detach(), right.detach(), route

    def _present(self) -> tuple[Tensor, PerSample]:
        """The records that have rows, and their gradients; padded, because lengths differ."""
        found, route = self.route.present()
        value = Outer(route.padded(self.left), route.padded(self.right))
        return found, Dense(value.dense()) if value.instantiating_is_smaller() else value

    def sq_norm(self, grams: Grams | None = None) -> Tensor:
        found, value = self._present()
        some = value.sq_norm()
        return some.new_zeros(self.route.number).index_copy(0, found, some)

    def weighted_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        return Outer(self.left.unsqueeze(1), self.right.unsqueeze(1)).weighted_sum(c[self.route.records], into)

    def dense(self) -> Tensor:
        found, value = self._present()
        some = value.dense()
        return some.new_zeros(self.route.number, *some.shape[1:]).index_copy(0, found, some)

    def masked(self, keep: Tensor) -> Ragged:
        rows = keep[self.route.records]
        left, right = (x.where(per_record(rows, x).bool(), 0) for x in (self.left, self.right))
        return Ragged(left, right, self.route)

    def transposed(self) -> Ragged:
        return Ragged(self.right, self.left, self.route)

    def __add__(self, other: PerSample) -> PerSample:
        if not isinstance(other, Ragged):
            return super().__add__(other)
        records = torch.cat([self.route.records, other.route.records])
        left, right = torch.cat([self.left, other.left]), torch.cat([self.right, other.right])
        return Ragged(left, right, Route(records, self.route.number))


def summed(x: Tensor, route: Route) -> Tensor:
    """The sums (N, features) of each record's rows (R, features), in float32 or better."""
    x = widen(x)
    return x.new_zeros(route.number, x.shape[1]).index_add(0, route.records, x)
