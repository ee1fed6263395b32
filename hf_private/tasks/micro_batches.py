"""Splits the records of one draw into micro-batches with one row per record and marked padding.

Clipping bounds the influence of a row. So each row must be exactly one record, and nothing in it may depend on the
other records of the batch, neither on their number nor on their length.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hf_private._validate import integer_at_least
from hf_private.mechanism.units import UnitBatch
from hf_private.randomness import reseed_global

from .losses import LABEL_NAMES


class CollatorError(ValueError):
    """The data collator makes records depend on each other, or does not return one row per record."""


class LogicalBatch:
    """One Poisson draw (this rank's share of it) as a list of collated micro-batches, possibly none.

    It is opaque on purpose. Trainer and Accelerate look for keys, lengths and `.to` in a batch, to count, log or move
    its contents. They find nothing here and pass it on to `training_step`. Its size is private: do not log it.

    >>> "labels" in LogicalBatch([{"labels": [1, 2]}], size=2)
    False
    """

    __slots__ = ("micro_batches", "size")

    def __init__(self, micro_batches: list[Any], size: int) -> None:
        self.micro_batches = micro_batches
        self.size = size  # records (or units) in all micro-batches together

    def __contains__(self, item: object) -> bool:
        return False


class OneByOne:
    """Micro-batches that are prepared when their turn comes, and whose number is known before.

    >>> batches = OneByOne([1, 2], str)
    >>> len(batches), list(batches)
    (2, ['1', '2'])
    """

    def __init__(self, micro_batches: Sequence[Any], prepare: Callable[[Any], Any]) -> None:
        self.micro_batches = micro_batches
        self.prepare = prepare

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[Any]:
        return map(self.prepare, self.micro_batches)


class LogicalCollator:
    """Turns the records of one draw into a `LogicalBatch`, with the user's collator for each micro-batch.

    Args:
        collator: The user's data collator: list of records to one batch. Its method `length_of(record)`, if it has
            one, tells the tokens of a record.
        max_rows: Most records in a micro-batch.
        max_tokens: Most tokens in a micro-batch after padding (rows x longest). A longer record is alone in its own.
        rows_of: Names of tensors that must have one row per record, even in a batch of one record. A record in several
            rows would have several times the influence that clipping allows, and records that share a row cannot be
            separated. If any name is given, all tensors of a batch and its padding are checked.

    >>> collator = LogicalCollator(lambda records: [r["input_ids"] for r in records], max_rows=2)
    >>> collator([{"input_ids": [1]}, {"input_ids": [2, 3, 4]}, {"input_ids": [5, 6]}]).micro_batches
    [[[2, 3, 4], [5, 6]], [[1]]]
    """

    def __init__(
        self,
        collator: Callable[[list[Any]], Any],
        max_rows: int,
        max_tokens: int | None = None,
        rows_of: Sequence[str] = (),
    ) -> None:
        integer_at_least(1, max_rows=max_rows)
        if max_tokens is not None:
            integer_at_least(1, max_tokens=max_tokens)
        self.collator = collator
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.rows_of = tuple(rows_of)
        self._length_of = getattr(collator, "length_of", length_of)

    def __call__(self, features: list[Any]) -> LogicalBatch:
        reseed_global()  # masking collators draw from the global generators
        parts = split([self._length_of(feature) for feature in features], self.max_rows, self.max_tokens)
        return LogicalBatch([self.collate([features[i] for i in part]) for part in parts], size=len(features))

    def collate_units(self, units: list[list[Any]]) -> LogicalBatch:
        """The same for units of several rows each: whole units in a micro-batch, all with as many rows.

        A unit that is too large for one micro-batch has several of its own, one after the other.
        """
        reseed_global()
        return LogicalBatch([part for _, part in self.unit_parts(units)], size=len(units))

    def unit_parts(self, units: list[list[Any]]) -> list[tuple[list[int], UnitBatch]]:
        """The micro-batches of units, each with the positions of its units in the list."""
        found = []
        for rows in sorted({len(unit) for unit in units}, reverse=True):
            alike = [place for place, unit in enumerate(units) if len(unit) == rows]
            longest = [max(map(self._length_of, units[place])) for place in alike]
            for part in split(longest, self.max_rows, self.max_tokens, rows):
                places = [alike[i] for i in part]
                in_part = [row for place in places for row in units[place]]
                # one unit, cut into chunks if it is too large
                most = len(in_part) if len(part) > 1 else most_rows(longest[part[0]], self.max_rows, self.max_tokens)
                for first in range(0, len(in_part), most):
                    chunk = in_part[first : first + most]
                    last = first + most >= len(in_part)
                    found.append((places, UnitBatch(self.collate(chunk), len(chunk) // len(part), rows, last)))
        return found

    def collate(self, records: list[Any]) -> Any:
        """One micro-batch, with one row for each record."""
        batch = self.collator(records)
        if self.rows_of:
            for name, value in batch.items():
                shape = getattr(value, "shape", ())
                if shape and shape[0] != len(records) and (name in self.rows_of or len(records) > 1):
                    raise CollatorError(
                        f"`data_collator` must return one row for each record, got {shape[0]} rows of `{name}` for"
                        f" {len(records)} records. Do not pack or split records in it: cut the dataset into records"
                        " that fit, and set `records_per_unit` to the largest number that one person then has. Records"
                        " with different numbers of images need `per_device_train_batch_size=1`."
                    )
            refuse_unmarked_padding(records, batch)
        return batch


def refuse_unmarked_padding(records: Sequence[Any], batch: Mapping[str, Any]) -> None:
    """Refuse padding that no mask marks: the model treats it as content, and the longest neighbour decides how much
    of it there is.

    A collator may add tokens (an end of text), but no more to any record than to the longest one. For inputs that are
    not tokens, the larger of two records must have the larger mask.
    """
    if not all(isinstance(record, Mapping) and "input_ids" in record for record in records):
        _refuse_unknown_lengths(records, batch)
    if not all(isinstance(record, Mapping) for record in records):
        return
    sizes = {name: [_tokens(record.get(name)) for record in records] for name in records[0] if name in batch}
    lengths = sizes.get("input_ids", [])
    aligned = ("input_ids", *LABEL_NAMES, *(name for name in sizes if sizes[name] == lengths))
    for name, values in sizes.items():
        if len(set(values)) > 1 and name not in aligned and not name.startswith("decoder_"):
            masks = [batch[other] for other in batch if other.endswith("mask") and other not in aligned]
            if not any(_grows(_marks(mask, len(records)), values) for mask in masks):
                raise CollatorError(
                    f"`data_collator` must return a mask beside `{name}`, whose size is not the same in all records,"
                    " got none that grows with it: padding would count as content. Use a collator that masks what it"
                    " pads, bring the records to one size beforehand, or set `per_device_train_batch_size=1`."
                )
    if len(set(lengths)) <= 1:
        return
    if (mask := batch.get("attention_mask")) is None:
        raise CollatorError(
            "`data_collator` must return an `attention_mask` for records of different lengths, got none: padding would"
            " count as text. Use a collator that pads and masks, such as DataCollatorWithPadding."
        )
    added = [marked - length for marked, length in zip(_marks(mask, len(records)), lengths, strict=True)]
    most = max(0, added[lengths.index(max(lengths))])
    if max(added) > most:
        raise CollatorError(
            f"`attention_mask` must be 0 at padding, got a record of {lengths[added.index(max(added))]} tokens with"
            f" {max(added)} more in its mask: they would count as text. Let the collator mask what it pads."
        )


def _refuse_unknown_lengths(records: Sequence[Any], batch: Mapping[str, Any]) -> None:
    """Records without tokens: the collator makes them, so only a mask shows their number."""
    if len(records) == 1 or "input_ids" not in batch or any(name.endswith("mask") for name in batch):
        return
    shapes = {getattr(record, "shape", None) for record in records}
    if len(shapes) == 1 and None not in shapes:  # tensors of one shape
        return
    raise CollatorError(
        "`data_collator` must return an `attention_mask` beside `input_ids`, got none: the records may have different"
        " lengths, and padding would count as text. Return the tokenizer's `attention_mask`, and labels of -100 where"
        " it is 0."
    )


def _marks(mask: Any, records: int) -> list[int]:
    """How many positions of each record a mask marks."""
    return np.asarray(mask).reshape(records, -1).astype(bool).sum(1).tolist()


def _grows(marks: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a larger record always has more marks."""
    most: dict[int, int] = {}
    for size, marked in sorted(zip(sizes, marks, strict=True)):
        most[size] = marked
    ordered = [most[size] for size in sorted(most)]
    return all(less < more for less, more in itertools.pairwise(ordered))


def most_rows(longest: int, max_rows: int, max_tokens: int | None) -> int:
    """How many rows of this length fit into a micro-batch: one at least."""
    return max_rows if max_tokens is None else min(max_rows, max(1, max_tokens // max(1, longest)))


def split(lengths: Sequence[int], max_rows: int, max_tokens: int | None = None, rows_each: int = 1) -> list[list[int]]:
    """Positions of the records by micro-batch, longest first: if memory runs out, it does so in the first one.

    The same for units of `rows_each` rows, of which `lengths` are the longest: at least one unit in each micro-batch.

    >>> split([3, 9, 4, 2], max_rows=3, max_tokens=8)
    [[1], [2, 0], [3]]
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    parts, first = [], 0
    while first < len(order):
        count = max(1, most_rows(lengths[order[first]], max_rows, max_tokens) // rows_each)
        parts.append(order[first : first + count])
        first += count
    return parts


def length_of(feature: Any) -> int:
    """Number of tokens of one record: its input or its labels, whichever is longer; 1 if it has no tokens."""
    if not isinstance(feature, Mapping) or "input_ids" not in feature:
        return 1
    return max(1, _tokens(feature["input_ids"]), _tokens(feature.get("labels")))


def _tokens(ids: Any) -> int:
    """Number of elements of a sequence, or of a padded list of sequences (multiple choice)."""
    shape = getattr(ids, "shape", None)
    if shape is not None:
        return math.prod(shape)
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        return 0
    return len(ids) * max(map(_tokens, ids), default=0) if ids and isinstance(ids[0], Sequence) else len(ids)
