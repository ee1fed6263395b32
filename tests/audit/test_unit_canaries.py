"""Canaries that are units: a right run is not accused; clipping or accounting per record is caught."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_private.audit.canaries import COLUMN, CanaryTrainer, audit_run, small_task
from hf_private.config import DPConfig
from hf_private.mechanism.units import UnitBatch
from hf_private.tasks.micro_batches import LogicalCollator
from hf_private.trainer.trainer import DPTrainer

UNITS = {"unit_column": "who", "records_per_unit": 10, "noise_multiplier": 6.0, "target_epsilon": None}
STEPS = 25


def with_people(records: Any) -> list[dict[str, Any]]:
    return [{**record, "who": f"person {max(n, 3)}"} for n, record in enumerate(records)]


def run_of(steps: int, batch: int = 90, **dp: Any) -> Any:
    """The small run with 96 people of one record and one of 4."""

    def make(trainer_class: Any, folder: str) -> DPTrainer:
        def build(model: Any, args: Any, *, train_dataset: Any, **settings: Any) -> DPTrainer:
            return trainer_class(model, args, train_dataset=with_people(train_dataset), **settings)

        made = small_task(build, folder, **{**UNITS, "accountant": "rdp", "expected_batch_size": 90, **dp})
        made.dp_config.expected_batch_size = batch  # of a dataset that now has canaries, too
        made.args.max_steps = steps
        return made

    return make


def with_coins(make: Any, coins: np.ndarray, folder: Path) -> CanaryTrainer:
    return make(lambda *a, **k: CanaryTrainer(*a, coins=coins, **k), str(folder))


@pytest.mark.parametrize("sampling", ["units", "records"])
def test_a_canary_is_a_unit_with_twice_as_many_records_as_count(tmp_path: Path, sampling: str) -> None:
    make = run_of(1, unit_sampling=sampling, records_per_unit=2)
    made = with_coins(make, np.array([True, False] * 5), tmp_path)
    made.check_canaries()
    data = [made.train_dataset[n] for n in range(len(made.train_dataset))]
    assert len(data) == 100 + 10 * 4 and made.num_units == 97 + 10
    sizes = Counter(record["who"] for record in data)
    assert sorted(sizes.values()) == [1] * 96 + [4] * 11
    for who in sizes:
        assert len({record[COLUMN] for record in data if record["who"] == who}) == 1, "all on one axis"
    assert sorted({record[COLUMN] for record in data}) == [-1, 0, 1, 3, 5, 7, 9]


def test_a_right_run_per_unit_is_not_accused(tmp_path: Path) -> None:
    report = audit_run(run_of(STEPS), str(tmp_path), canaries=300)
    assert not report.contradicted and report.claimed > 0


def test_augmented_records_are_audited(tmp_path: Path) -> None:
    without = {"unit_column": None, "records_per_unit": 1, "augmentations": 2}
    report = audit_run(run_of(3, **without), str(tmp_path), canaries=20)
    assert not report.contradicted


def clip_each_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a unit as micro-batches of plain records: the unit then counts k times."""
    collate = LogicalCollator.collate_units

    def each(self: LogicalCollator, units: list) -> Any:
        whole = collate(self, [[row] for rows in units for row in rows])
        assert all(isinstance(part, UnitBatch) and part.rows == 1 for part in whole.micro_batches)
        return whole

    monkeypatch.setattr(LogicalCollator, "collate_units", each)


@pytest.mark.parametrize("bug", ["each record is clipped", "a group is priced as one record"])
def test_a_unit_that_counts_too_often_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """The same settings are not accused, see above; here a unit has ten times the influence that is accounted."""
    changes: dict[str, Any] = {}
    if bug == "each record is clipped":
        clip_each_record(monkeypatch)
    else:
        changes = {"unit_sampling": "records", "batch": 1525}  # a quarter of the records
        monkeypatch.setattr(DPConfig, "group_size", 1)
        monkeypatch.setattr("hf_private.spending.stated_unit.group_size", lambda settings: 1)
    report = audit_run(run_of(STEPS, **changes), str(tmp_path), canaries=300)
    assert report.contradicted, report
