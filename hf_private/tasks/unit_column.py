"""The column that names the unit of each record: who it belongs to.

An id that is wrong costs privacy. NaN differs from itself, so that each record without an id would be a person of its
own; objects that compare by identity have the same effect. So ids must be present, of one plain type. Messages name
rows, never ids.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from datetime import date
from typing import Any
from unicodedata import is_normalized
from uuid import UUID

from hf_private.mechanism.units import Units, without

from .losses import LABEL_NAMES
from .training_records import first_of

PLAIN = (str, bytes, int, float, date, UUID)  # equal values mean the same unit
READ_AT_ONCE = 10_000  # ids of a column


class UnitColumn:
    """Reads which records of a dataset belong to one unit. With the name None, every record is its own unit.

    >>> column = UnitColumn("patient")
    >>> len(column.units([{"patient": "a"}, {"patient": "b"}, {"patient": "a"}]))
    2
    >>> column.units([{"patient": "a"}, {"patient": None}])
    Traceback (most recent call last):
        ...
    ValueError: `unit_column` = 'patient' must name the unit of each record, got none in row 1. Complete it, or ...
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self._last: tuple[Any, str, Units] | None = None  # dataset and name that were read last
        self._disjoint: list[tuple[Any, Any, str]] = []  # datasets and names that were compared

    def units(self, dataset: Any) -> Units | None:
        """The units of a dataset; None if every record is its own."""
        if dataset is None or self.name is None:
            return None
        if self._last is None or self._last[0] is not dataset or self._last[1] != self.name:
            self._last = (dataset, self.name, Units(self.ids(dataset)))
        return self._last[2]

    def fingerprint(self, dataset: Any) -> str | None:
        """Equal where the same records belong to the same units; no ids are in it."""
        units = self.units(dataset)
        return None if units is None else units.fingerprint

    def ids(self, dataset: Any) -> Iterator[Hashable]:
        """The id of each record. A `datasets.Dataset` is read by column, anything else record by record."""
        kind: Any = None
        for row, value in enumerate(self._values(dataset)):
            if type(value) is kind and (kind is int or (kind is str and value and not _has_other_form(value))):
                yield value  # what is below, for most columns and in a fraction of its time
                continue
            one = _plain(value)
            if one is None:
                raise ValueError(
                    f"`unit_column` = {self.name!r} must name the unit of each record, got none in row {row}. Complete"
                    " it, or remove the records whose unit is not known. Ids are strings, whole numbers, dates, or"
                    " tuples of them."
                )
            if _has_other_form(one):
                raise ValueError(
                    f"`unit_column` = {self.name!r} must hold ids without blanks around them and invisible characters,"
                    f" in Unicode's normal form, got others in row {row}: the same unit could have two ids. Apply"
                    " `unicodedata.normalize('NFKC', id)` and `' '.join(id.split())` to the column."
                )
            kind = _kind(one) if kind is None else kind
            if _kind(one) != kind:
                raise ValueError(
                    f"`unit_column` = {self.name!r} must hold ids of one type, got another type in row {row} than in"
                    " row 0: the same unit could have two ids. Convert the column."
                )
            yield one

    def _values(self, dataset: Any) -> Iterator[Any]:
        assert self.name is not None, "there is a column to read"
        if self.name in LABEL_NAMES:
            raise ValueError(f"`unit_column` must not be a column of labels, got {self.name!r}: it is hidden.")
        names = getattr(dataset, "column_names", None)
        if isinstance(names, list) and hasattr(dataset, "with_format"):
            self._check_name(names)
            column = dataset.with_format("arrow").select_columns([self.name])
            for part in column.iter(READ_AT_ONCE):  # record by record would take a hundred times as long
                yield from part[self.name].to_pylist()
            return
        sized = hasattr(dataset, "__len__")
        for record in (dataset[row] for row in range(len(dataset))) if sized else first_of(dataset):
            self._check_name(record if isinstance(record, Mapping) else ())
            yield record[self.name]

    def _check_name(self, names: Any) -> None:
        if self.name not in names:
            raise ValueError(
                f"`unit_column` must be a column of the dataset, got {self.name!r}; there are {sorted(names)}. Keep it"
                " in the dataset when you tokenize: it does not reach the model."
            )

    def check_disjoint(self, evaluation: Any, training: Any) -> None:
        """No unit may be in both datasets: metrics of the evaluation data are published without noise."""
        if self.name is None or training is None:
            return
        for dataset in evaluation.values() if isinstance(evaluation, dict) else (evaluation,):
            if dataset is None or isinstance(dataset, str):  # the name of one that is looked at with the others
                continue
            if any(one is dataset and two is training and name == self.name for one, two, name in self._disjoint):
                continue
            remedy = (
                "Move all records of a unit to one side, or set `disjoint_units=True` if equal ids mean different"
                " people there."
            )
            try:
                known = set(self.ids(training))
                shared = next((row for row, one in enumerate(self.ids(dataset)) if one in known), None)
            except ValueError as error:
                error.add_note(f"`eval_dataset` needs the column, too: no unit may be in both. {remedy}")
                raise
            if shared is not None:
                raise ValueError(
                    f"`eval_dataset` must hold other units than the training set, got a shared one in row {shared}:"
                    f" its metrics would be logged without noise. {remedy}"
                )
            self._disjoint.append((dataset, training, self.name))

    def removed(self, dataset: Any) -> Any:
        """A `datasets.Dataset` without the column."""
        return dataset.remove_columns(self.name) if self.name in dataset.column_names else dataset

    def hidden_from(self, collator: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """A collator that gets records without the column."""
        return collator if self.name is None else _Hidden(collator, self.name)


class _Hidden:
    """A collator whose records have lost a column. A class, because workers of a data loader may pickle it."""

    def __init__(self, collator: Callable[[list[Any]], Any], column: str) -> None:
        self.collator = collator
        self.column = column

    def __call__(self, records: list[Any]) -> Any:
        return self.collator([without(record, self.column) for record in records])


def _plain(value: Any) -> Hashable | None:
    """An id as a plain value; None if it is missing, or of a type whose equality does not mean the same unit.

    >>> import numpy as np
    >>> _plain(np.int64(3)), _plain(("ward", 3)), _plain(float("nan")), _plain(np.datetime64("NaT")), _plain(" ")
    (3, ('ward', 3), None, None, None)
    """
    try:
        if value is None or not bool(value == value):  # NaN and NaT differ from themselves
            return None
    except (TypeError, ValueError, RuntimeError):  # pandas.NA, arrays
        return None
    if hasattr(value, "item"):  # numpy's and torch's scalars
        value = value.item()
    if isinstance(value, tuple):
        parts = tuple(map(_plain, value))
        return parts if parts and None not in parts else None
    if isinstance(value, str | bytes) and not value.strip():
        return None
    return value if isinstance(value, PLAIN) else None


def _has_other_form(value: Any) -> bool:
    """Whether an id, or a part of it if it is a tuple, looks like another one: blanks, invisible characters, accents
    and wide letters that have two codes.

    >>> [_has_other_form(one) for one in ("Zoé 7", "Zoe\u0301 7", "7\u200b", "\uff17", " 7", "a  b")]
    [False, True, True, True, True, True]
    """
    if isinstance(value, tuple):
        return any(map(_has_other_form, value))
    if isinstance(value, bytes):
        return value != value.strip()
    if not isinstance(value, str):
        return False
    blanks = value != value.strip() or "  " in value
    return blanks or not (value.isprintable() and is_normalized("NFKC", value))


def _kind(value: Any) -> Any:
    """The type of an id, of each part of it if it is a tuple."""
    return tuple(map(_kind, value)) if isinstance(value, tuple) else type(value)
