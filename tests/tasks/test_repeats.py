"""A record that stands in a dataset several times is found, whatever container repeats it; equal content is not."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from hf_private.tasks.repeats import most_repeats
from hf_private.trainer import guards
from tests.support import training


class Rows(Dataset):
    def __init__(self, rows: list) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def table(seed: int = 0) -> datasets.Dataset:
    return datasets.Dataset.from_list(training.text(seed=seed))


def on_disk(folder: Path) -> datasets.Dataset:
    table().save_to_disk(folder)
    return datasets.load_from_disk(folder)


REPEATED: dict[str, tuple[Callable[[], Any], int]] = {
    "list": (lambda: training.text() * 3, 3),
    "some of a list": (lambda: [*(rows := training.text()), *rows[:4], rows[0]], 3),
    "concatenated": (lambda: ConcatDataset([table()] * 10), 10),
    "concatenated own class": (lambda: ConcatDataset([rows := Rows(training.text()), rows]), 2),
    "subset": (lambda: Subset(training.text(), [0, 1, 1, 2]), 2),
    "subset of a subset": (lambda: Subset(ConcatDataset([rows := Subset(table(), range(9)), rows]), range(18)), 2),
    "overlapping subsets": (lambda: ConcatDataset([Subset(rows := table(), range(9)), Subset(rows, range(5, 20))]), 2),
    "select": (lambda: table().select([3, 4, 3, 3]), 3),
    "select twice": (lambda: table().select([3, 4, 5]).select([0, 0, 1, 2]), 2),
    "concatenate_datasets": (lambda: datasets.concatenate_datasets([rows := table(), rows, rows]), 3),
    "a class oversampled": (
        lambda: datasets.concatenate_datasets([rows := table(), *[rows.filter(lambda r: r["labels"])] * 4]),
        5,
    ),
    "interleaved": (
        lambda: datasets.interleave_datasets(
            [table(), table(1).select(range(5))], stopping_strategy="all_exhausted"
        ),
        8,
    ),
    "formatted": (lambda: table().select([0, 0]).with_format("torch"), 2),
    "tensors": (lambda: Subset(TensorDataset(torch.arange(5.0)), [4, 4]), 2),
}  # fmt: skip
SINGLE: dict[str, Callable[[], Any]] = {
    "list": training.text,
    "equal content": lambda: [copy.deepcopy(training.text()[0]) for _ in range(9)],
    "numbers": lambda: [1, 2, 1, 1, None, None],
    "text": lambda: ["yes", "yes", "no"],
    "equal rows": lambda: datasets.Dataset.from_dict({"x": [1, 1, 1]}),
    "two tables": lambda: datasets.concatenate_datasets([table(), table()]),
    "shuffled": lambda: table().shuffle(seed=0),
    "parts": lambda: ConcatDataset([Subset(rows := table(), range(9)), Subset(rows, range(9, 20))]),
    "slices": lambda: datasets.concatenate_datasets(
        [(rows := table()).select(range(9)), rows.select(range(9, 40))]
    ),
    "split": lambda: table().train_test_split(0.5, seed=0)["train"],
    "mapped": lambda: table().map(lambda r: {"n": 1}).filter(lambda r: r["labels"] == 0),
    "nothing": list,
    "no columns": lambda: datasets.Dataset.from_dict({}),
    "nothing in a column": lambda: datasets.Dataset.from_dict({"x": [None, None]}),
    "an array": lambda: np.zeros((4, 2)),
    "own class": lambda: Rows(training.text() * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_records_are_counted(name: str) -> None:
    make, times = REPEATED[name]
    assert most_repeats(make()) == times


@pytest.mark.parametrize("name", SINGLE)
def test_records_that_stand_once_are_not_repeated(name: str) -> None:
    assert most_repeats(SINGLE[name]()) <= 1


def test_records_of_a_file_are_told_apart(tmp_path: Path) -> None:
    stored = on_disk(tmp_path / "data")
    assert most_repeats(stored) == 1 and most_repeats(datasets.concatenate_datasets([stored] * 4)) == 4


def test_a_repeated_record_is_refused_or_charged(tmp_path: Path) -> None:
    """A record that stands three times moves a sum by three clip norms: it is charged as a group of three, or not
    trained on."""
    records = training.text() * 3
    with pytest.raises(
        ValueError, match="`train_dataset` must hold each record once, got one 3 times.*records_per_un"
    ):
        training.trainer(tmp_path / "one", records=records, dp={"check_dataset": False}).train()
    assert not (tmp_path / "one" / "_dp" / "ledger.jsonl").exists()
    with pytest.raises(ValueError, match="`train_dataset`"):
        training.trainer(tmp_path / "two", records=records, dp={"records_per_unit": 2}, max_steps=1).train()
    training.trainer(tmp_path / "three", records=records, dp={"records_per_unit": 3}, max_steps=1).train()
    persons = [{**record, "person": n % 40} for n, record in enumerate(records)]
    units = {"unit_column": "person", "records_per_unit": 3}
    training.trainer(tmp_path / "units", records=persons, dp=units, max_steps=1).train()


@pytest.mark.parametrize("kind", [list, datasets.Dataset.from_list])
def test_copies_in_other_rows_are_warned_about(
    tmp_path: Path, kind: Callable[[list], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a dataset that was repeated and then saved. Different people may have written the same, so it trains."""
    monkeypatch.setattr(logging.getLogger("hf_private"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="hf_private")  # the command line sets the root's
    rows = training.text(records=30)
    for times, told in ((1, False), (3, True)):
        guards.logger.warning_once.cache_clear()
        caplog.clear()
        records = kind([copy.deepcopy(row) for _ in range(times) for row in rows])
        training.trainer(tmp_path / str(times), records=records, max_steps=1).train()
        assert ("100% of the training records" in caplog.text) is told
