"""A budget that is an attacker's advantage: enforced like an epsilon, over runs, resumes and settings."""

from pathlib import Path
from typing import Any

import pytest

from hf_private.accounting.budget import BudgetExceeded
from hf_private.accounting.events import Event
from hf_private.accounting.risk import risk
from hf_private.publishing.verify import verify
from hf_private.spending import limits
from hf_private.spending import spending as module
from hf_private.spending.limits import EpsilonLimit, RiskLimit, limit_of
from hf_private.spending.spending import Spending
from tests.support import training

RATE, DELTA, TARGET = 0.3, 1e-5, 0.1


def spending(folder: Path, **settings: Any) -> Spending:
    return Spending(folder, DELTA, **{"target_risk": TARGET, **settings})


def run(spent: Spending, steps: int, taken: int | None = None, **opening: Any) -> float:
    with spent.open(RATE, steps, lambda s: (s,), **opening) as opened:
        for _ in range(steps if taken is None else taken):
            opened.charge(opened.plan.event)
    return opened.plan.noise_multiplier


def advantage(spent: Spending, records: int = 1) -> float:
    return risk(spent.events, DELTA, records).advantage


def checkpoint(spent: Spending, number: int) -> Path:
    folder = spent.folder / f"checkpoint-{number}"
    spent.save_copy(folder)
    return folder


def test_the_plan_is_limited_and_meets_the_target(tmp_path: Path) -> None:
    spent = spending(tmp_path)
    with spent.open(RATE, 5, lambda s: (s * 2**0.5, s * 2**0.5)) as opened:  # two releases are charged as one
        assert opened.plan.steps == opened.steps_left == 5
        for _ in range(5):
            opened.charge(opened.plan.event)
        with pytest.raises(BudgetExceeded):
            opened.charge(opened.plan.event)
    assert 0.99 * TARGET < advantage(spent) <= TARGET
    assert spent.report().risk.advantage <= TARGET < spent.epsilon() == spent.report().epsilon


def test_a_spent_budget_is_closed_until_it_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", said.append)
    run(spending(tmp_path), 5)
    with pytest.raises(BudgetExceeded, match="advantage of 0.1 of `target_risk` 0.1 .* raise `target_risk`"):
        run(spending(tmp_path), 5)
    assert said == []
    more = spending(tmp_path, target_risk=0.2)
    run(more, 5)
    assert len(said) == 1 and "`target_risk` 0.2" in said[0] and 0.195 < advantage(more) <= 0.2


def test_noise_that_was_given_spends_of_the_budget_too(tmp_path: Path) -> None:
    run(spending(tmp_path, target_risk=None), 5, noise_multiplier=4.0)
    spent = spending(tmp_path)
    assert spent.fits(Event(RATE, (4.0,))) and not spent.fits(Event(1.0, (1.0,)))
    with pytest.raises(BudgetExceeded, match="500 "):
        run(spent, 500, noise_multiplier=4.0)
    run(spent, 5)
    assert 0.99 * TARGET < advantage(spent) <= TARGET


def test_a_resumed_run_keeps_its_noise_unless_steps_were_lost(tmp_path: Path) -> None:
    spent = spending(tmp_path)
    sigma = run(spent, 6, taken=2)
    folder = checkpoint(spent, 2)
    assert run(spent, 4, taken=1, checkpoint=folder) == sigma
    assert run(spent, 4, checkpoint=folder) > sigma, "one of the steps ran after the checkpoint"
    assert sum(event.steps for event in spent.events) == 7 and advantage(spent) <= TARGET


def test_people_with_several_records_are_priced_as_such(tmp_path: Path) -> None:
    spent = spending(tmp_path, records_per_unit=3)
    run(spent, 3)
    assert 0.99 * TARGET < advantage(spent, 3) <= TARGET and advantage(spent) < TARGET / 2


def test_which_limit_the_settings_name() -> None:
    assert limit_of(3.0, None, DELTA, "rdp", 2) == EpsilonLimit(3.0, DELTA, "rdp", 2)
    assert limit_of(None, 0.1, DELTA, "rdp", 2) == RiskLimit(0.1, 2)
    assert limit_of(None, None, DELTA, "rdp", 1) is None
    with pytest.raises(ValueError, match="`target_epsilon` and `target_risk`"):
        limit_of(3.0, 0.1, DELTA, "rdp", 1)


@pytest.mark.parametrize("limit", [EpsilonLimit(1.0, DELTA, "rdp"), RiskLimit(0.1)])
def test_a_long_calibration_shows_progress(
    limit: EpsilonLimit | RiskLimit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(limits, "PATIENCE", 1e6)
    quick = limit.noise(0.5, 10)
    assert "Calibrating" not in capsys.readouterr().err
    monkeypatch.setattr(limits, "PATIENCE", 0.0)
    assert limit.noise(0.5, 10) == quick
    assert "Calibrating the noise" in capsys.readouterr().err


def test_a_trainer_keeps_to_it_and_its_card_verifies(tmp_path: Path) -> None:
    made = training.trainer(tmp_path, dp={"noise_multiplier": None, "target_risk": TARGET}, max_steps=3)
    made.train()
    report = made.privacy_spent()
    assert 0.99 * TARGET < report.risk.advantage <= TARGET
    logged = [entry["epsilon"] for entry in made.state.log_history if "epsilon" in entry]
    assert logged == sorted(logged) and logged[-1] == pytest.approx(report.epsilon)
    made.save_model()
    statement = made.privacy_record()
    assert statement["settings"]["target_risk"] == statement["runs"][-1]["target_risk"] == TARGET
    found = verify(str(tmp_path))
    assert found.code == 0, found
