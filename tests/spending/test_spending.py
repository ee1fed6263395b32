"""Spending and checkpoints: what is charged, what is refused, and which of two histories holds."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_private.accounting.budget import BudgetExceeded
from hf_private.accounting.events import Event
from hf_private.spending import spending as module
from hf_private.spending.costs import Past
from hf_private.spending.ledger import LedgerError, PrivacyLedger
from hf_private.spending.spending import LEDGER, Spending
from hf_private.trainer.resume import check_checkpoint, is_complete, last_checkpoint
from tests.support.budget import epsilon_of

RATE, DELTA = 0.1, 1e-5


def spending(folder: Path, **settings: Any) -> Spending:
    return Spending(folder, DELTA, **{"accountant": "rdp", **settings})


def run(spent: Spending, steps: int, noise: float | None = 1.0, taken: int | None = None, **opening: Any) -> float:
    """One `train()` without a model: plan `steps`, take `taken` of them."""
    with spent.open(RATE, steps, lambda s: (s,), noise, **opening) as opened:
        for _ in range(steps if taken is None else taken):
            opened.charge(opened.plan.event)
    return opened.plan.noise_multiplier


def checkpoint(spent: Spending, number: int) -> Path:
    folder = spent.folder / f"checkpoint-{number}"
    spent.save_copy(folder)
    (folder / "trainer_state.json").write_text("{}")
    return folder


def total(spent: Spending) -> int:
    return sum(event.steps for event in spent.events)


# ---- the budget


def test_nothing_is_spent_before_the_first_run(tmp_path: Path) -> None:
    spent = spending(tmp_path)
    assert spent.events == () and spent.report().epsilon == spent.live_epsilon() == 0.0
    assert not (tmp_path / "_dp").exists()


def test_a_step_is_on_disk_when_charge_returns(tmp_path: Path) -> None:
    spent = spending(tmp_path)
    with spent.open(RATE, 3, lambda s: (s,), 1.0) as opened:
        for count in range(1, 4):
            opened.charge(Event(RATE, (1.0,)))
            assert sum(event.steps for event in PrivacyLedger.read(tmp_path / LEDGER).events) == count


def test_no_step_beyond_the_plan_and_no_other_step(tmp_path: Path) -> None:
    spent = spending(tmp_path, target_epsilon=4.0)
    with spent.open(RATE, 2, lambda s: (s,)) as opened:
        sigma = opened.plan.noise_multiplier
        with pytest.raises(RuntimeError, match="`event`"):
            opened.charge(Event(RATE, (sigma / 2,)))
        with pytest.raises(RuntimeError, match="`event`"):
            opened.charge(Event(RATE, (sigma,), steps=2))
        opened.charge(Event(RATE, (sigma,)))
        opened.charge(Event(RATE, (sigma,)))
        with pytest.raises(BudgetExceeded):
            opened.charge(Event(RATE, (sigma,)))
    assert total(spent) == 2
    assert 3.9 < spent.epsilon() <= 4.0


def test_the_plan_is_calibrated_with_several_releases(tmp_path: Path) -> None:
    spent = spending(tmp_path, target_epsilon=4.0)
    with spent.open(RATE, 5, lambda s: (s * 2**0.5, s * 2**0.5)) as opened:
        sigma = opened.plan.noise_multiplier
        assert epsilon_of([Event(RATE, (sigma,), 5)], DELTA, "rdp") == pytest.approx(4.0, abs=0.01)
        opened.charge(Event(RATE, (sigma * 2**0.5, sigma * 2**0.5)))


def test_a_spent_budget_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", said.append)
    spent = spending(tmp_path, target_epsilon=4.0)
    run(spent, 5, None)
    with pytest.raises(BudgetExceeded, match="epsilon 4 of `target_epsilon` 4"):
        run(spent, 5, None)
    assert total(spent) == 5 and said == []
    more = spending(tmp_path, target_epsilon=6.0)
    run(more, 5, None)
    assert len(said) == 1 and "Epsilon 4 of `target_epsilon` 6 is spent" in said[0] and "new output_dir" in said[0]
    assert 4.0 < more.epsilon() <= 6.0


def test_epsilon_never_falls(tmp_path: Path) -> None:
    spent, seen = spending(tmp_path), [0.0]
    for noise in (1.0, 5.0, 0.8):
        run(spent, 2, noise)
        seen.append(spent.epsilon())
        assert spent.live_epsilon() >= spent.epsilon()
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("accountant", ["prv", "pld", "rdp"])
def test_live_epsilon_climbs_to_the_final_one(tmp_path: Path, accountant: str) -> None:
    """Never below the accountant at any step, close to it in the middle, and equal to it at the end."""
    spent, seen, exact = spending(tmp_path, target_epsilon=4.0, accountant=accountant), [], []
    with spent.open(RATE, 20, lambda s: (s,)) as opened:
        noise = opened.plan.noise_multiplier
        for _ in range(20):
            opened.charge(Event(RATE, (noise,)))
            seen.append(spent.live_epsilon())
            exact.append(spent.epsilon())
    assert seen == sorted(seen) and seen[-1] == exact[-1] == spent.epsilon() <= 4.0
    assert all(live >= value for live, value in zip(seen, exact, strict=True))
    assert seen[9] < 1.05 * exact[9]
    lower = spending(tmp_path, target_epsilon=1.0)
    with lower.open(RATE, 0, lambda s: (s,), noise):
        assert lower.live_epsilon() == lower.epsilon() > 3.9


def test_people_with_several_records(tmp_path: Path) -> None:
    run(spending(tmp_path), 2)
    one, three = spending(tmp_path), spending(tmp_path, records_per_unit=3)
    assert three.report().epsilon > 2 * one.report().epsilon
    assert three.live_epsilon() >= three.report().epsilon
    assert "3 records" in three.report().note


def test_a_fixed_key_is_not_private_whatever_comes_later(tmp_path: Path) -> None:
    spent = spending(tmp_path)
    run(spent, 1, settings={"reproducible": True})
    run(spent, 1)
    assert spent.report().epsilon == spent.live_epsilon() == spent.epsilon() == math.inf
    assert spent.report().note.startswith("NOT PRIVATE")


# ---- resuming


def test_noise_stays_on_resume_if_the_rest_fits(tmp_path: Path) -> None:
    spent = spending(tmp_path, target_epsilon=4.0)
    sigma = run(spent, 6, None, taken=2)
    folder = checkpoint(spent, 2)
    assert run(spent, 4, None, checkpoint=folder) == sigma
    assert total(spent) == 6 and len(spent.events) == 1


def test_lost_steps_are_charged_and_the_rest_gets_more_noise(tmp_path: Path) -> None:
    spent = spending(tmp_path, target_epsilon=4.0)
    with spent.open(RATE, 6, lambda s: (s,)) as opened:
        sigma = opened.plan.noise_multiplier
        for step in range(4):
            opened.charge(Event(RATE, (sigma,)))
            if step == 1:
                folder = checkpoint(spent, 2)
    more = run(spent, 4, None, checkpoint=folder)
    assert more > sigma
    assert total(spent) == 8 and spent.epsilon() <= 4.0


def test_the_longer_history_holds(tmp_path: Path) -> None:
    spent = spending(tmp_path)
    run(spent, 2)
    shutil.copytree(tmp_path / "_dp", tmp_path / "backup")
    run(spent, 3)
    folder = checkpoint(spent, 5)
    shutil.rmtree(tmp_path / "_dp")
    (tmp_path / "backup").rename(tmp_path / "_dp")  # an old backup was put back
    run(spent, 1, checkpoint=folder)
    assert total(spent) == 6


def test_diverged_histories_are_refused(tmp_path: Path) -> None:
    spent = spending(tmp_path)
    run(spent, 2)
    folder = checkpoint(spent, 2)
    shutil.copytree(tmp_path, tmp_path / "fork")
    other = spending(tmp_path / "fork")
    run(other, 1)
    late = checkpoint(other, 3)
    run(spent, 1)
    run(spent, 1, checkpoint=folder)
    with pytest.raises(LedgerError, match=r"ledger\.jsonl"):
        run(spent, 1, checkpoint=late)
    assert total(spent) == 4


@pytest.mark.parametrize("missing", ["own", "copy", "state"])
def test_missing_parts_are_refused_with_the_way_out(tmp_path: Path, missing: str) -> None:
    spent = spending(tmp_path)
    run(spent, 2)
    folder = checkpoint(spent, 2)
    gone, error, way_out = {
        "own": (tmp_path / LEDGER, LedgerError, f"{LEDGER}.*checkpoint-2"),
        "copy": (folder / LEDGER, LedgerError, "load its weights with from_pretrained"),
        "state": (folder / "trainer_state.json", ValueError, "`resume_from_checkpoint`"),
    }[missing]
    gone.unlink()
    with pytest.raises(error, match=way_out):
        check_checkpoint(folder, tmp_path)


def test_two_runs_cannot_write_to_one_ledger(tmp_path: Path) -> None:
    with spending(tmp_path).open(RATE, 1, lambda s: (s,), 1.0):
        with pytest.raises(LedgerError, match=r"ledger\.jsonl"):
            run(spending(tmp_path), 1)
    run(spending(tmp_path), 1)


def test_half_written_checkpoints_are_passed_over(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`resume_from_checkpoint`"):
        last_checkpoint(tmp_path)
    for number, state in ((2, "{}"), (10, "{}"), (12, '{"global_step": 1'), (14, None)):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-best").mkdir()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert not is_complete(tmp_path / "checkpoint-12") and not is_complete(tmp_path / "checkpoint-14")


# ---- base models


def published(spent: Spending, **changes: Any) -> dict[str, Any]:
    return {**spent.statement(), "private": True, **changes}


def inherit(spent: Spending, *statements: dict[str, Any], **past: Any) -> None:
    """A run without steps that continues some statements."""
    run(spent, 0, past=Past(statements, **past))


def test_the_base_models_spending_is_taken_over_once(tmp_path: Path) -> None:
    base, spent = spending(tmp_path / "base"), spending(tmp_path / "new")
    run(base, 3)
    for _ in range(2):
        inherit(spent, published(base))
        assert total(spent) == 3
    inherit(base, published(base))  # its own past is in its ledger already
    assert total(base) == 3


def test_a_base_model_that_was_not_private_costs_infinity(tmp_path: Path) -> None:
    base, spent = spending(tmp_path / "base"), spending(tmp_path / "new")
    run(base, 3)
    inherit(spent, published(base, private=False))
    assert spent.report().epsilon == math.inf


def test_a_base_model_that_was_saved_before_its_first_step_costs_nothing(tmp_path: Path) -> None:
    inherit(spent := spending(tmp_path / "new"), published(spending(tmp_path / "base"), private=False))
    assert spent.report().epsilon == 0.0


def test_what_a_base_models_card_admits_is_handed_on(tmp_path: Path) -> None:
    """To its grandchildren, too: their cards are made from their own ledgers."""
    base, child, grandchild = (spending(tmp_path / name) for name in ("base", "child", "grandchild"))
    run(base, 1)
    record = published(base)
    record["runs"][0] |= {"noise": "fast", "disjoint_data": True}
    inherit(child, record)
    inherit(grandchild, published(child))
    for spent in (child, grandchild):
        (source,) = spent.statement()["ledger"]["continues"]
        assert (source["noise"], source["disjoint_data"]) == ("fast", True)
    assert total(grandchild) == 1


def test_a_past_that_could_not_be_looked_up_is_written_down(tmp_path: Path) -> None:
    for unchecked in (False, True):
        spent = spending(tmp_path / str(unchecked))
        inherit(spent, unchecked=("base_model_unchecked",) if unchecked else ())
        assert spent.last_run.get("base_model_unchecked", False) is unchecked
