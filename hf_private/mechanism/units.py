"""The unit of privacy: which records belong to one person, and draws of people instead of records.

A unit (patient, customer, conversation) has one record or many. The accountant's promise is about the unit, so

    unit_sampling="units"      each unit is drawn with probability q, with at most k of its records; the unit's mean
                               gradient is clipped. One unit counts like one record of a dataset of units.
    unit_sampling="records"    each record is drawn with probability q, if it is one of the k records of its unit that
                               are eligible in this step. Each record is clipped. The price is that of a group of k.

The k records are chosen anew in each step, as a function of (key, counter), so that no record is left out for good.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hf_private._validate import integer_at_least, one_of
from hf_private.gradients.persample import Dense, PerSample, weighted_sum
from hf_private.randomness import Key

from .sampling import PoissonSampler

SAMPLINGS = ("units", "records")


class Units:
    """The records of each unit, kept as two arrays. Units are numbered by their first record.

    >>> units = Units(["ann", "bob", "ann", "ann"])
    >>> len(units), units.records(0).tolist(), units.unit_of.tolist()
    (2, [0, 2, 3], [0, 1, 0, 0])
    """

    def __init__(self, ids: Iterable[Hashable]) -> None:
        numbers: dict[Hashable, int] = {}
        self.unit_of = np.fromiter((numbers.setdefault(one, len(numbers)) for one in ids), dtype=np.int64)
        self._order = np.argsort(self.unit_of, kind="stable")
        self._first = np.concatenate([[0], np.cumsum(np.bincount(self.unit_of, minlength=len(numbers)))])

    def __len__(self) -> int:
        return len(self._first) - 1

    @property
    def num_records(self) -> int:
        return len(self._order)

    @property
    def fingerprint(self) -> str:
        """Equal for equal units of equal records; the ids themselves are not in it."""
        return hashlib.sha256(self.unit_of.tobytes()).hexdigest()

    def records(self, unit: int) -> np.ndarray:
        """The records of a unit, in their order."""
        return self._order[self._first[unit] : self._first[unit + 1]]

    def chosen(self, unit: int, at_most: int, key: Key, counter: int) -> np.ndarray:
        """At most so many records of a unit, in their order: a uniform choice, a function of (key, counter, unit).

        Each record has a random word at its own place of the stream, and those with the smallest words are taken.
        """
        records = self.records(unit)
        if len(records) <= at_most:
            return records
        start = int(self._first[unit])
        even = start - start % 2  # the stream is read in blocks of two words
        count = start - even + len(records)
        words = key.stream("records", counter).words(even, count + count % 2).numpy()[start - even : count]
        return records[np.sort(np.argsort(words, kind="stable")[:at_most])]


class UnitSampler(PoissonSampler):
    """Batch sampler whose items are lists of records: all rows of one unit, of which it draws a Poisson sample.

    Args:
        units: The records of each unit. None: every one of `num_records` records is its own unit.
        expected_batch_size: B over all ranks, in units (or in records, if those are drawn).
        records_per_unit: k, at most so many records of one unit in a step.
        sampling: "units", or "records", where each drawn record is a list of its own.
        augmentations: How many times each record is fetched, to pass through the dataset's transform.

    Guarantee: with "units", a unit is in a step with probability q = B / (number of units), with at most k records, in
    one list, on one rank. With "records", the number of records of a unit in a step is Binomial(k, q) at most.

    >>> sampler = UnitSampler(Units("aabab"), expected_batch_size=2, records_per_unit=2)
    >>> [len(rows) for rows in next(iter(sampler))]
    [2, 2]
    """

    def __init__(
        self,
        units: Units | None = None,
        expected_batch_size: int = 1,
        records_per_unit: int = 1,
        sampling: str = "units",
        augmentations: int = 1,
        num_records: int | None = None,
        **options: Any,
    ) -> None:
        one_of(SAMPLINGS, unit_sampling=sampling)
        integer_at_least(1, records_per_unit=records_per_unit, augmentations=augmentations)
        self.units = units
        self.records_per_unit = records_per_unit
        self.sampling = sampling
        self.augmentations = augmentations
        if units is not None:
            num_records = len(units) if sampling == "units" else units.num_records
        assert num_records is not None, "without `units` the number of records is given"
        super().__init__(num_records, expected_batch_size, **options)

    def share(self, counter: int) -> list[Any]:
        drawn = super().share(counter)
        if self.units is not None and self.sampling == "records":
            of_units = [self._chosen(unit, counter) for unit in set(self.units.unit_of[drawn].tolist())]
            eligible = {record for records in of_units for record in records}
            drawn = [record for record in drawn if record in eligible]
        return [self.rows(one, counter) for one in drawn]

    def rows(self, drawn: int, counter: int) -> list[int]:
        """The rows of a unit, or of a record, that is drawn in a step. They are clipped as one."""
        records = self._chosen(drawn, counter) if self.draws_units else [drawn]
        return [record for record in records for _ in range(self.augmentations)]

    @property
    def draws_units(self) -> bool:
        return self.units is not None and self.sampling == "units"

    def _chosen(self, unit: int, counter: int) -> list[int]:
        assert self.units is not None
        return self.units.chosen(unit, self.records_per_unit, self._key, counter).tolist()


class RowsOfUnits(Dataset):
    """A dataset whose items are all rows of one unit, each of them read by itself.

    >>> RowsOfUnits("abc", size=2)[[0, 2]]
    ['a', 'c']
    """

    def __init__(self, records: Any, size: int) -> None:
        self._records = records
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Sequence[int]) -> list[Any]:
        return [self._records[row] for row in index]


def without(record: Any, column: str | None) -> Any:
    """A record without one of its columns."""
    if column is None or not isinstance(record, Mapping) or column not in record:
        return record
    return {name: value for name, value in record.items() if name != column}


# ---- rows of one unit in the step


@dataclass(frozen=True)
class UnitBatch:
    """A micro-batch in which every unit has several rows, unit after unit.

    The same holds for whatever else has several rows and is clipped as one: augmented copies of a record, the two
    sides of a preference pair, the chunks of a document.

    Attributes:
        batch: The collated rows, U * `rows` of them.
        rows: Rows of each unit in this micro-batch.
        total: Rows of each unit in all micro-batches. Above `rows` for the one unit of a batch that does not fit.
        last: Whether its rows end here. The micro-batches of a unit follow each other.
    """

    batch: Any
    rows: int = 1
    total: int = 1
    last: bool = True

    def __post_init__(self) -> None:
        integer_at_least(1, rows=self.rows)
        integer_at_least(self.rows, total=self.total)

    @property
    def whole(self) -> bool:
        """Whether all rows of its units are here."""
        return self.rows == self.total

    def map(self, change: Callable[[Any], Any]) -> "UnitBatch":
        """The same rows after a change, such as a move to another device."""
        return UnitBatch(change(self.batch), self.rows, self.total, self.last)

    def losses(self, losses: Tensor, num_rows: int) -> Tensor:
        """The losses of the units (U,) from those of all `num_rows` rows: their mean, or what is here of it.

        Losses (U,) are those of a loss function that combines the rows itself; it needs all of them.
        """
        if self.whole and losses.shape == (num_rows // self.rows,):
            return losses
        if losses.shape != (num_rows,):
            raise ValueError(
                f"`losses` must have shape ({num_rows},), one loss for each row, got {tuple(losses.shape)} for units"
                f" of {self.total} rows. A mean over the batch couples the records: use reduction='none'."
            )
        return losses.unflatten(0, (-1, self.rows)).sum(1) / self.total


def as_unit_batch(batch: Any) -> UnitBatch:
    """A micro-batch of plain records: one row for each."""
    return batch if isinstance(batch, UnitBatch) else UnitBatch(batch)


class WholeUnits:
    """Joins the gradients of a unit whose rows are in several micro-batches, so that its norm is exact.

    The gradients are added up by block, whatever the method's blocks are, and become one entry of batch size 1. It is
    clipped once, after the last micro-batch. Memory: one more gradient of all blocks while such a unit lasts.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._loss: Tensor | None = None

    def join(
        self, entries: dict[str, PerSample], losses: Tensor, part: UnitBatch
    ) -> tuple[dict[str, PerSample], Tensor] | None:
        """The entries and losses of whole units; None in the middle of a unit, whose entries are kept here."""
        if part.whole:
            assert not self._sums, "the micro-batches of a unit follow each other"
            return entries, losses
        if losses.shape != (1,):
            raise ValueError(f"A unit that does not fit into a micro-batch must be alone in it, got {len(losses)}.")
        one = torch.ones(1, device=losses.device)
        for block in list(entries):
            self._sums[block] = weighted_sum(entries.pop(block), one, self._sums.get(block), removes=False)
        self._loss = losses.detach() if self._loss is None else self._loss + losses.detach()
        if not part.last:
            return None
        joined: dict[str, PerSample] = {block: Dense(total.unsqueeze(0)) for block, total in self._sums.items()}
        loss = self._loss
        self._sums = {}
        self._loss = None
        return joined, loss
