"""Canaries and single steps: broken trainers are caught, right ones are not accused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_private.audit.canaries import CanaryTrainer, audit_run, small_task
from hf_private.audit.step import audit_step
from hf_private.cli.main import main
from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.tasks.losses import PerSampleLoss
from hf_private.trainer.trainer import DPTrainer
from tests.support import training, zoo

FEW = {"accountant": "rdp", "target_epsilon": 0.5, "expected_batch_size": 60}


def short_run(trainer_class: Any, folder: str) -> DPTrainer:
    made = small_task(trainer_class, folder, **FEW)
    made.args.max_steps = 30
    return made


def test_a_canary_is_clipped_on_its_own_axis_and_a_silent_one_is_nowhere(tmp_path: Path) -> None:
    coins = np.array([True, False] * 5)
    made = short_run(lambda *a, **k: CanaryTrainer(*a, coins=coins, **k), str(tmp_path))
    made.check_canaries()
    records = [made.train_dataset[n] for n in range(100, 104)]  # two of them in, two silent
    batch = made.get_train_dataloader().collate_fn(records).micro_batches[0]
    with BookKeeper(made.model) as book:
        book.backward(PerSampleLoss(made.model)(made.model, batch))
        norms, axes = book.norms(), book.records()["canaries.axes.weight"].dense()[:, :, 0]
    assert norms.tolist() == pytest.approx([10, 0, 10, 0])
    assert [axis.nonzero().tolist() for axis in axes] == [[[1]], [], [[3]], []]
    assert (axes.sum(1)[[0, 2]] > 0).all()
    assert len(made.train_dataset) == 110, "the number of records does not tell the coins"


@pytest.mark.parametrize("carriers", [None, {"r": 2}])
def test_a_run_without_noise_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carriers: dict | None) -> None:
    monkeypatch.setattr(NoiseSource, "add_", lambda self, step, sums, stds, offsets=None: None)
    monkeypatch.setattr("hf_private.trainer.private_mixin.check_gradients", lambda *_: None)
    monkeypatch.setitem(FEW, "carriers", carriers)
    report = audit_run(short_run, str(tmp_path), canaries=300)
    assert report.found.epsilon > 1 and report.claimed <= 0.5 and report.contradicted


def test_the_command_audits_a_function(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script = tmp_path / "my_run.py"
    script.write_text(
        "from hf_private.audit.canaries import small_task\n\n\n"
        "def make(trainer_class, folder):\n"
        f"    made = small_task(trainer_class, folder, **{FEW!r})\n"
        "    made.args.max_steps = 20\n    return made\n"
    )
    assert main(["audit", "canaries", f"{script}:make", "--canaries", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["contradicted"] is False and found["steps"] == 20 and found["claimed_epsilon"] <= 0.5
    with pytest.raises(SystemExit):
        main(["audit", "canaries", f"{script}:other"])
    assert "RUN" in capsys.readouterr().err


def test_a_function_that_ignores_the_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`make_trainer`"):
        audit_run(lambda _, folder: small_task(DPTrainer, folder), str(tmp_path), canaries=20)


@pytest.mark.parametrize("method", [{}, {"carriers": {"r": 2}}, {"clipping": "per-layer"}, {"clipping": "automatic"}])
def test_a_right_step_has_the_sensitivity_that_the_noise_covers(tmp_path: Path, method: dict) -> None:
    made = training.trainer(tmp_path, dp={"clip_norm": 0.01, **method}, per_device_train_batch_size=3)
    report = audit_step(made, records=6)
    assert report.holds, report
    assert report.sensitivity <= 0.01 * (1 + 1e-3)
    if "clipping" not in method:
        assert report.sensitivity > 0.009, "gradients far above the clip norm use it up"


def coupled_loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """A mean over the batch's labelled records in disguise: the right shape, and every record feels the others."""
    losses = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
    return losses * (1 + labels.float().sum())


def test_records_that_meet_in_the_loss_are_named(tmp_path: Path) -> None:
    report = audit_step(training.trainer(tmp_path, per_sample_loss=coupled_loss), records=5)
    removed = {pair[0] for pair in report.coupled}
    assert not report.holds and removed == {1, 3}, "records of label 1 change everybody's loss"


def test_clipping_that_does_not_clip_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clipping, "_factor", lambda self, sq_norm, clip_norm: torch.ones_like(sq_norm))
    report = audit_step(training.trainer(tmp_path, dp={"clip_norm": 0.01}), records=4)
    assert report.sensitivity > 0.02 and not report.holds


def test_uncovered_parameters_and_random_collators_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    class Noisy(training.Padding):
        def __call__(self, records: list) -> dict[str, torch.Tensor]:
            batch = super().__call__(records)
            batch["input_ids"] = torch.where(
                torch.rand(batch["input_ids"].shape) < 0.3, torch.tensor(4), batch["input_ids"]
            )
            return batch

    model = zoo.small("bert")
    model.unused = torch.nn.Linear(3, 3)
    report = audit_step(training.trainer(tmp_path, model=model, data_collator=Noisy()), records=4)
    assert {entry.name for entry in report.uncovered} == {"unused.weight", "unused.bias"}
    assert report.random_collator and not report.coupled and report.sensitivity <= 1.001
    assert main(["audit", "step", "--records", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["audit"], ["ATTACK"]),
        (["audit", "lira"], ["ATTACK", "'mia', 'canaries', 'step'", "lira"]),
        (["audit", "mia", "m", "--members", "a.tsv"], ["--others"]),
        (["audit", "mia", "m", "--members", "nowhere.tsv", "--others", "b.tsv"], ["nowhere.tsv"]),
        (
            ["audit", "mia", "m", "--members", "a", "--others", "b", "--delta", "2"],
            ["--delta", "between 0 and 1", "2"],
        ),
        (["audit", "canaries", "--canaries", "3"], ["--canaries", "a whole number >= 10", "3"]),
        (["audit", "canaries", "nowhere.py:f"], ["RUN", "FILE.py:FUNCTION", "nowhere.py:f"]),
        (["audit", "step", "--records", "1"], ["--records", "a whole number >= 2", "1"]),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert all(word in err for word in words)


def test_a_function_of_other_arguments_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "my_run.py").write_text("def make(folder): ...\n")
    with pytest.raises(SystemExit):
        main(["audit", "step", f"{tmp_path / 'my_run.py'}:make"])
    err = capsys.readouterr().err
    assert "RUN" in err and "make(folder)" in err


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 0.1])
def test_a_broken_trainer_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """No noise, or a tenth of it: the small run at epsilon 1 is accused."""
    add = NoiseSource.add_

    def less(self: NoiseSource, step: int, sums: dict, stds: dict, offsets: dict | None = None) -> None:
        add(self, step, sums, {block: scale * std for block, std in stds.items()}, offsets)

    monkeypatch.setattr(NoiseSource, "add_", less)
    report = audit_run(small_task, str(tmp_path), canaries=1000)
    assert report.contradicted and report.found.epsilon > 2


@pytest.mark.slow
def test_a_right_trainer_is_not_accused_in_twenty_runs(tmp_path: Path) -> None:
    bounds = [audit_run(small_task, str(tmp_path / str(run)), canaries=1000) for run in range(20)]
    accused = sum(report.contradicted for report in bounds)
    assert accused == 0, f"{accused} of 20 accused"  # at 95 % one would be allowed; the bound is not tight
