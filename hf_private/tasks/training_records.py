"""Recognises training records by their content.

Metrics on training records are not private, so DPTrainer does not evaluate them. A slice, another format, a list copy
or a Subset of the training set is a new object with the same records; a hash of each record's input shows it.

Short records recur naturally: different people write "yes, please". How often shows within the training set, so an
evaluation set may share as much as that, and 1 % more. In dialogues (SGD), 31 % of the training turns occur more than
once, and 27 % of the turns for evaluation occur in the training set; in film reviews (SST-2) it is 1 % and 0 %.

Of a stream the first records are compared. A generator that can be read only once, and records that a dataset changes
at random each time, are not recognised.

Cost: each training record is read and hashed once, at the first evaluation: 3 to 6 seconds per million short records.
A `datasets.Dataset` is read by column; a dataset that computes its records takes as long as reading all of them once.
"""

import hashlib
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from torch import Tensor

CHUNK = 10_000
STREAMED = 10_000  # records of a stream that are compared
MARGIN = 0.01  # shared beyond what is natural
MOST_NATURAL = 1 / 3  # a training set may repeat its records on purpose, which says nothing about other data


class Overlap(NamedTuple):
    """How much of an evaluation set is in the training set."""

    share: float
    natural: float  # share of the training records that occur more than once in the training set
    records: int  # of the evaluation set

    @property
    def allowed(self) -> float:
        """The largest share that chance explains, up to three standard errors."""
        expected = min(self.natural, MOST_NATURAL) + MARGIN
        error = math.sqrt(expected * (1 - expected) / max(self.records, 1))
        return min(expected + 3 * error, MOST_NATURAL + MARGIN)


class TrainingRecords:
    """The inputs of the training records, as hashes.

    Args:
        dataset: The training set.
        main_input: Name of the model's main input, such as "input_ids". Records without it are hashed as a whole,
            without labels.
        padding: Token id of padding, which is ignored at the end of an input.

    >>> known = TrainingRecords([{"input_ids": [5, 6]}, {"input_ids": [7]}], "input_ids")
    >>> known.overlap([{"input_ids": np.array([7])}, {"input_ids": [8]}])
    Overlap(share=0.5, natural=0.0, records=2)
    """

    def __init__(
        self, dataset: Any, main_input: str, padding: int | None = None, label_names: Sequence[str] = ()
    ) -> None:
        self.dataset = dataset
        self.main_input = main_input
        self.padding = padding
        self.label_names = frozenset(label_names)
        self._known: dict[tuple[str, ...], tuple[np.ndarray, float]] = {}

    def overlap(self, other: Any) -> Overlap:
        """How many of the records of another dataset are training records."""
        if not (hasattr(other, "__len__") and hasattr(other, "__getitem__")):
            other = first_of(other)
        if not len(other) or not len(self.dataset):
            return Overlap(0.0, 0.0, 0)
        fields = self._fields(other[0], self.dataset[0])
        hashes, natural = self._hashes(fields)
        return Overlap(float(np.isin(self._hash(other, fields), hashes).mean()), natural, len(other))

    def recurring(self) -> float:
        """Share of the training records whose content is that of another one.

        >>> TrainingRecords(["yes", "yes", "no", "perhaps"], "input_ids").recurring()
        0.5
        """
        return self._hashes(self._fields(self.dataset[0]))[1] if len(self.dataset) else 0.0

    def _hashes(self, fields: tuple[str, ...]) -> tuple[np.ndarray, float]:
        """The distinct hashes of these fields, and the share of the records that recur."""
        if fields not in self._known:
            hashes, counts = np.unique(self._hash(self.dataset, fields), return_counts=True)
            self._known[fields] = hashes, float(counts[counts > 1].sum() / len(self.dataset))
        return self._known[fields]

    def _fields(self, *records: Any) -> tuple[str, ...]:
        """Names of the fields to compare: the main input, or all fields but labels that both have."""
        if not all(isinstance(record, Mapping) for record in records):
            return ()
        common = [name for name in records[0] if all(name in record for record in records)]
        if self.main_input in common:
            return (self.main_input,)
        return tuple(sorted(set(common) - self.label_names))

    def _hash(self, dataset: Any, fields: tuple[str, ...]) -> np.ndarray:
        """A hash (N,) of each record."""
        if fields and isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
            parts = self._columns(dataset, fields)
        else:
            records = (dataset[row] for row in range(len(dataset)))
            parts = (
                [self._bytes(name, record[name]) for name in fields] if fields else [self._bytes("", record)]
                for record in records
            )
        hashes = (hashlib.blake2b(b"\0".join(part), digest_size=8).digest() for part in parts)
        return np.frombuffer(b"".join(hashes), dtype=np.uint64)

    def _columns(self, dataset: datasets.Dataset, fields: tuple[str, ...]) -> Iterator[list[bytes]]:
        plain: Any = dataset.select_columns(list(fields)).with_format("arrow")
        for table in plain.iter(CHUNK):
            columns = [self._column(name, table.column(name).combine_chunks()) for name in fields]
            yield from map(list, zip(*columns, strict=True))

    def _column(self, name: str, column: Any) -> list[bytes]:
        numbers = isinstance(column, pa.ListArray) and pa.types.is_integer(column.type.value_type)
        if not numbers or column.null_count:
            return [self._bytes(name, value) for value in column.to_pylist()]
        values = column.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
        ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
        return [self._trimmed(name, row).tobytes() for row in np.split(values, ends[:-1])]

    def _trimmed(self, name: str, row: np.ndarray) -> np.ndarray:
        """The row without padding at its end."""
        if name != "input_ids" or self.padding is None or not row.size or row[-1] != self.padding:
            return row
        kept = np.flatnonzero(row != self.padding)
        return row[: kept[-1] + 1] if kept.size else row[:0]

    def _bytes(self, name: str, value: Any) -> bytes:
        """The same bytes for the same content, in a list, an array or a tensor of any precision."""
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, bytes):
            return value
        if isinstance(value, Tensor):
            value = (value.detach().cpu().float() if value.is_floating_point() else value.detach().cpu()).numpy()
        if isinstance(value, Mapping):
            return b"\0".join(key.encode() + b"\0" + self._bytes(key, value[key]) for key in sorted(map(str, value)))
        if hasattr(value, "tobytes") and hasattr(value, "mode"):  # an image of PIL
            return value.tobytes()
        try:
            array = np.asarray(value)
        except ValueError:
            array = np.empty(0, dtype=object)
        if array.dtype.kind in "iub":
            return self._trimmed(name, array.astype(np.int64).ravel()).tobytes()
        if array.dtype.kind == "f":
            return array.astype(np.float32).tobytes()
        if isinstance(value, (list, tuple)):
            return b"\0".join(self._bytes(name, part) for part in value)
        return pickle.dumps(value)


def first_of(stream: Any) -> list[Any]:
    """The first records of a stream; none of a generator, which would be used up."""
    records = iter(stream)
    return [] if records is stream else list(islice(records, STREAMED))
