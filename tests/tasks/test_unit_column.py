"""The column that names units: what counts as an id, and what is refused by the number of its row."""

import datetime
import uuid
from collections.abc import Mapping
from decimal import Decimal

import datasets
import numpy as np
import pandas as pd
import pytest
import torch

from hf_private.tasks.unit_column import UnitColumn

COLUMN = UnitColumn("who")
MONDAY = datetime.date(2024, 1, 1)


def rows(*ids):
    return [{"who": one, "x": 0} for one in ids]


@pytest.mark.parametrize(
    "ids",
    [
        ("a", "b", "a"),
        (1, 2, 1),
        (b"a", b"b", b"a"),
        (MONDAY, datetime.date(2024, 1, 2), MONDAY),
        (("ward", 1), ("ward", 2), ("ward", 1)),
        (np.int64(1), np.int32(2), np.int64(1)),
        (torch.tensor(1), torch.tensor(2), torch.tensor(1)),
        (np.str_("a"), np.str_("b"), "a"),
        (uuid.UUID(int=1), uuid.UUID(int=2), uuid.UUID(int=1)),
    ],
)
def test_equal_ids_are_one_unit(ids):
    assert COLUMN.units(rows(*ids)).unit_of.tolist() == [0, 1, 0]


@pytest.mark.parametrize("kind", ["plain", "torch", "transform", "shuffled"])
def test_a_dataset_is_read_by_column_whatever_its_format(kind):
    data = datasets.Dataset.from_list(rows("a", "b", "a", "c"))
    if kind == "torch":
        data = data.with_format("torch", columns=["x"])
    elif kind == "transform":
        data = data.with_transform(lambda batch: pytest.fail("no record is made"))
    elif kind == "shuffled":
        data = data.select([3, 2, 1, 0])
    assert COLUMN.units(data).unit_of.tolist() == ([0, 1, 2, 1] if kind == "shuffled" else [0, 1, 0, 2])


MISSING = {  # an id of the same type, and what is none
    "None": ("secret", None),
    "NaN": (1.5, float("nan")),
    "numpy's NaN": (np.float32(1.5), np.float32("nan")),
    "NaT": (pd.Timestamp(2024, 1, 1), pd.NaT),
    "numpy's NaT": (np.datetime64("2024-01-01"), np.datetime64("NaT")),
    "numpy's NaT, in ns": (np.datetime64("2024-01-01", "ns"), np.datetime64("NaT", "ns")),
    "NA": ("secret", pd.NA),
    "empty": ("secret", ""),
    "blank": ("secret", " \t"),
    "empty bytes": (b"secret", b""),
    "part of a tuple": (("ward", 1), ("ward", None)),
    "NaN in a tuple": (("ward", 1.5), ("ward", float("nan"))),
    "empty tuple": (("ward", 1), ()),
    "list": ("secret", ["a"]),
    "dict": ("secret", {}),
    "object": ("secret", object()),
    "array": (1, np.array([1, 2])),
}


@pytest.mark.parametrize("name", MISSING)
def test_an_id_that_is_missing_or_not_comparable_is_refused_by_row(name):
    good, missing = MISSING[name]
    with pytest.raises(ValueError, match="`unit_column`.*got none in row 2") as caught:
        COLUMN.units(rows(good, good, missing))
    assert "secret" not in str(caught.value)


def test_a_column_of_a_dataset_with_gaps_is_refused_by_row():
    for values in (["a", None], [1.0, float("nan")], [datetime.datetime(2024, 1, 1), None]):
        with pytest.raises(ValueError, match="`unit_column`.*row 1"):
            COLUMN.units(datasets.Dataset.from_dict({"who": values}))


@pytest.mark.parametrize("other", [1, 1.0, b"1", MONDAY, ("1",), True, Decimal(1)])
def test_ids_of_two_types_are_refused_by_row(other):
    with pytest.raises(ValueError, match="`unit_column`.*row 1"):
        COLUMN.units(rows("1", other))
    if other is not True:
        with pytest.raises(ValueError, match="`unit_column`.*row 2"):
            COLUMN.units(rows(("a", "1"), ("a", "2"), ("a", other)))


FORMS = {
    "blank behind": "a ", "blank in front": " a", "line break": "a\n", "no-break space": "a\u00a0b",
    "two blanks": "a  b",
    "accent of its own": "Zoe\u0301", "invisible": "a\u200b", "byte order mark": "\ufeffa", "soft hyphen": "a\u00adb",
    "wide digit": "\uff17", "ligature": "\ufb01", "nul": "a\0",
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_ids_that_look_like_others_are_refused_by_row(name):
    """One person would have two ids."""
    other = FORMS[name]
    for ids in (("secret", other), (("ward", "secret"), ("ward", other)), (b"secret", b"a ")):
        with pytest.raises(ValueError, match="`unit_column`.*row 1.*`unicodedata.normalize") as caught:
            COLUMN.units(rows(*ids))
        assert "secret" not in str(caught.value)
    assert COLUMN.units(rows("a b", "Zo\u00e9", "a b")).unit_of.tolist() == [0, 1, 0]


@pytest.mark.parametrize("values", [(1, True), (True, 1), (1.0, 1), (1, 1.0), (0.0, False)])
def test_numbers_that_are_equal_but_of_two_types_are_refused(values):
    """Python holds them for the same key, a file or database may not."""
    with pytest.raises(ValueError, match="`unit_column`.*row 2"):
        COLUMN.units(rows(values[0], values[0], values[1]))
    assert COLUMN.units(rows(0.0, 2.0, -0.0)).unit_of.tolist() == [0, 1, 0]


class View(Mapping):
    """A record that is read when it is asked for."""

    def __init__(self, record):
        self._record = record

    def __getitem__(self, name):
        return self._record[name]

    def __iter__(self):
        return iter(self._record)

    def __len__(self):
        return len(self._record)


def test_records_may_be_views():
    data = [View(record) for record in rows("a", "b", "a")]
    assert COLUMN.units(data).unit_of.tolist() == [0, 1, 0]
    seen = []
    COLUMN.hidden_from(lambda records: seen.extend(map(list, records)))(data)
    assert seen == [["x"]] * 3


def test_a_single_unit_is_a_unit():
    assert len(COLUMN.units(rows("a", "a", "a"))) == 1


def test_a_column_is_read_in_parts_not_record_by_record(monkeypatch):
    """Ten million ids take seconds this way, and minutes otherwise."""
    monkeypatch.setattr("hf_private.tasks.unit_column.READ_AT_ONCE", 40)

    class Watched(datasets.Dataset):
        def __getitem__(self, key):
            pytest.fail("a record was read by itself")

    data = datasets.Dataset.from_list(rows(*(f"id {n // 2}" for n in range(100))))
    data.__class__ = Watched
    assert len(COLUMN.units(data)) == len(COLUMN.units(data.shuffle(seed=0))) == 50


def test_a_column_that_is_not_there_or_that_the_model_needs_is_refused():
    with pytest.raises(ValueError, match="`unit_column`.*'who'.*'x'"):
        COLUMN.units([{"x": 1}])
    with pytest.raises(ValueError, match="`unit_column`"):
        COLUMN.units(datasets.Dataset.from_dict({"x": [1]}))
    with pytest.raises(ValueError, match="`unit_column`"):
        COLUMN.units([5])
    with pytest.raises(ValueError, match="`unit_column`.*'labels'"):
        UnitColumn("labels").units([{"labels": 1}])


def test_a_dataset_is_read_once_for_each_name():
    data, column = rows("a", "b"), UnitColumn("who")
    assert column.units(data) is column.units(data)
    column.name = "x"
    assert len(column.units(data)) == 1
    column.name = None
    assert column.units(data) is None and column.fingerprint(data) is None


def test_fingerprints_differ_for_other_units_and_know_no_ids():
    one = COLUMN.fingerprint(rows("a", "b", "a"))
    assert one == COLUMN.fingerprint(rows(1, 2, 1)) and one != COLUMN.fingerprint(rows("a", "b", "b"))
