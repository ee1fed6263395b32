"""The audit of a step where units are drawn: each is removed with all of its records."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_private.audit.step import audit_step
from hf_private.cli.main import main
from hf_private.mechanism.units import WholeUnits
from hf_private.tasks.micro_batches import LogicalCollator
from tests.support import training
from tests.trainer.test_rows_per_record import Chunks, texts
from tests.trainer.test_units import UNITS, records

CLIP = 0.01  # all gradients are longer


def made(folder: Path, dp: dict[str, Any] | None = None, **settings: Any) -> Any:
    return training.trainer(
        folder, **{"records": records(), "dp": {**UNITS, "clip_norm": CLIP, **(dp or {})}, **settings}
    )


@pytest.mark.parametrize("rows", [2, 16])  # units of 3 records do not fit into the smaller micro-batches
@pytest.mark.parametrize("method", [{}, {"carriers": {"r": 2}}, {"clipping": "per-layer"}])
def test_a_unit_has_the_influence_that_the_noise_covers(tmp_path: Path, method: dict, rows: int) -> None:
    report = audit_step(made(tmp_path, method, per_device_train_batch_size=rows), records=6)
    assert report.holds and report.each == "unit" and report.records == 6, report
    assert report.sensitivity <= CLIP * (1 + 1e-3)
    if "clipping" not in method:
        assert report.sensitivity > 0.9 * CLIP


def test_drawn_records_augmentations_and_rows_per_record_are_audited(tmp_path: Path) -> None:
    for number, (settings, each) in enumerate(
        [
            ({"dp": {"unit_sampling": "records"}}, "record"),
            ({"dp": {"unit_column": None, "records_per_unit": 1, "augmentations": 2}}, "record"),
            ({"records": texts(), "dp": {"unit_column": None, "records_per_unit": 1}, "data_collator": Chunks()},
             "record"),
        ]
    ):  # fmt: skip
        report = audit_step(made(tmp_path / str(number), **settings), records=4)
        assert report.holds and report.each == each and 0.9 * CLIP < report.sensitivity, report


def each_row_alone(self: LogicalCollator, units: list) -> Any:
    """A bug: rows are clipped one by one."""
    unit_parts = LogicalCollator.unit_parts
    flat = [(place, [row]) for place, unit in enumerate(units) for row in unit]
    return [([flat[i][0] for i in places], part) for places, part in unit_parts(self, [row for _, row in flat])]


class Rows(LogicalCollator):
    unit_parts = each_row_alone


def test_a_unit_whose_rows_are_clipped_one_by_one_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = made(tmp_path)
    monkeypatch.setattr("hf_private.trainer.loading.LogicalCollator", Rows)
    monkeypatch.setattr("hf_private.audit.step._norms", lambda *_: {})  # of rows, not of units
    report = audit_step(trainer, records=6)
    assert not report.holds and report.sensitivity > 1.5 * CLIP


def test_a_part_of_a_unit_that_is_clipped_alone_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WholeUnits, "join", lambda self, entries, losses, part: (entries, losses))
    report = audit_step(made(tmp_path, per_device_train_batch_size=1), records=6)
    assert not report.holds and report.sensitivity > 1.5 * CLIP


def coupled(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    losses = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
    return losses * (1 + labels.float().sum())


def test_units_that_meet_in_the_loss_are_named(tmp_path: Path) -> None:
    report = audit_step(made(tmp_path, per_sample_loss=coupled), records=5)
    assert not report.holds and report.coupled


def test_the_command_counts_units(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script = tmp_path / "my_run.py"
    script.write_text(
        "from hf_private.audit.canaries import small_task\n\n\n"
        "def make(trainer_class, folder):\n"
        "    def build(model, args, *, train_dataset, **settings):\n"
        "        people = [{**record, 'who': n // 3} for n, record in enumerate(train_dataset)]\n"
        "        return trainer_class(model, args, train_dataset=people, **settings)\n"
        "    return small_task(build, folder, unit_column='who', records_per_unit=2, expected_batch_size=9)\n"
    )
    assert main(["audit", "step", f"{script}:make", "--records", "3"]) == 0
    assert "one of 3 units" in capsys.readouterr().out
    assert main(["audit", "step", f"{script}:make", "--records", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["of_units"] is True
