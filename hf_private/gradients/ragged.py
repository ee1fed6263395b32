"""A linear layer on rows that are not in the order of their records, as an expert gets them from its router."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from .persample import Dense, Grams, Outer, PerSample, per_record
from .products import weighted_product, widen


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
        if self.number == 1:
            return x.unsqueeze(0)
        empty = x.new_zeros(self.number * self.width, *x.shape[1:])
        return empty.index_copy(0, self._place, x).unflatten(0, (self.number, self.width))

    def unpadded(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, self._place)

    def picked(self, index: Tensor) -> Route:
        return Route(self.records[index], self.number)

    def by_size(self) -> Iterator[tuple[Tensor, Tensor, Route]]:
        """Groups of records with about as many rows: their numbers, their rows, and the route among them alone."""
        sizes: dict[int, list[int]] = {}
        for record, count in enumerate(self._counts.tolist()):
            if count:
                sizes.setdefault(count.bit_length(), []).append(record)
        for found in sizes.values():
            numbers = torch.tensor(found, device=self.records.device)
            mine = self.records.unsqueeze(1) == numbers  # (rows, records of the group)
            rows, records = mine.nonzero(as_tuple=True)
            yield numbers, rows, Route(records, len(found))


class Ragged(PerSample):
    """`g_n` is the sum of `left_r^T right_r` over the rows r of record n: `left` (R, rows), `right` (R, columns)."""

    def __init__(self, left: Tensor, right: Tensor, route: Route) -> None:
        self.left, self.right, self.route = left.detach(), right.detach(), route

    def _padded(self) -> Iterator[tuple[Tensor, PerSample]]:
        """The gradients of records that have rows, in groups, so that little is padding."""
        for numbers, rows, route in self.route.by_size():
            value = Outer(route.padded(self.left[rows]), route.padded(self.right[rows]))
            yield numbers, Dense(value.dense()) if value.instantiating_is_smaller() else value

    def sq_norm(self, grams: Grams | None = None) -> Tensor:
        total = widen(self.left).new_zeros(self.route.number)
        for numbers, value in self._padded():
            total[numbers] = value.sq_norm()
        return total

    def weighted_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        left, right = self.left.unsqueeze(1), self.right.unsqueeze(1)
        return weighted_product(left, right, c[self.route.records], into)

    def dense(self) -> Tensor:
        g = widen(self.left).new_zeros(self.route.number, self.left.shape[1], self.right.shape[1])
        for numbers, value in self._padded():
            g[numbers] = value.dense()
        return g

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
