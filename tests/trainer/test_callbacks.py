"""PrivacyCallback: what it shows, and that it stops in time."""

import math
from pathlib import Path

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState

from hf_private.accounting.events import Event
from hf_private.spending.ledger import PrivacyLedger
from hf_private.spending.run import Plan, Run
from hf_private.spending.spending import LEDGER, Spending
from hf_private.trainer.callbacks import PrivacyCallback
from hf_private.trainer.log_filter import LogFilter
from tests.support import training
from tests.support.budget import epsilon_of

EVENT = Event(0.1, (1.0,))


def log(callback: PrivacyCallback, **logs: float) -> tuple[dict, dict]:
    """What one log entry and its copy in the history become."""
    state = TrainerState(log_history=[dict(logs)])
    callback.on_log(None, state, TrainerControl(), logs=logs)
    return logs, state.log_history[-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with PrivacyLedger(tmp_path / LEDGER) as ledger:
        for _ in range(3):
            ledger.charge(EVENT)
    return tmp_path


def test_it_reads_the_ledger_of_any_run(folder: Path) -> None:
    callback = PrivacyCallback(folder, target_delta=1e-6)
    three = [Event(0.1, (1.0,), 3)]
    assert callback.epsilon() == callback.epsilon(exact=True) == pytest.approx(epsilon_of(three, 1e-6, "prv"))
    with PrivacyLedger(folder / LEDGER) as ledger:  # while another run writes
        ledger.charge(EVENT)
        assert callback.epsilon() > epsilon_of(three, 1e-6, "prv")


def test_epsilon_goes_into_logs_and_history(folder: Path) -> None:
    callback = PrivacyCallback(folder)
    for entry in log(callback, learning_rate=0.1):
        assert entry == {"learning_rate": 0.1, "epsilon": callback.epsilon(exact=True)}
    assert log(callback, epsilon=7.0)[0] == {"epsilon": 7.0}


def test_infinity_is_said_in_words(folder: Path) -> None:
    with PrivacyLedger(folder / LEDGER) as ledger:
        ledger.charge(Event(0.1, (0.0,)))
    callback = PrivacyCallback(folder)
    assert callback.epsilon() == math.inf
    for entry in log(callback, learning_rate=0.1):
        assert entry == {"learning_rate": 0.1, "epsilon": "inf", "privacy": "NOT PRIVATE"}


@pytest.mark.parametrize(("left", "stops"), [(None, False), (1, False), (0, True)])
def test_it_stops_when_no_step_is_left(tmp_path: Path, left: int | None, stops: bool) -> None:
    spending = Spending(tmp_path, 1e-5, target_epsilon=4.0)
    spending.run = Run(Plan(EVENT, 1.0, 5, left))
    state = TrainerState(global_step=3, max_steps=10)
    control = TrainerControl()
    PrivacyCallback(spending).on_step_end(None, state, control)
    assert control.should_training_stop is stops
    assert state.log_history == ([{"privacy_budget_spent": True, "step": 3}] if stops else [])


def test_a_trainer_stops_before_its_budget_is_overspent(tmp_path: Path) -> None:
    """Were the loop to run on, the callback ends it after the last permitted step; the mechanism would refuse more."""
    made = training.trainer(tmp_path, dp={"noise_multiplier": None, "target_epsilon": 4.0}, max_steps=3)
    opened = made.spending.open
    made.spending.open = lambda rate, steps, *rest, **settings: opened(rate, 2, *rest, **settings)
    made.train()
    assert made.state.global_step == 2
    assert {"privacy_budget_spent": True, "step": 2} in made.state.log_history
    assert made.privacy_spent().epsilon <= 4.0


def test_the_trainer_has_one_and_reporters_see_epsilon(tmp_path: Path) -> None:
    made = training.trainer(tmp_path)
    assert [type(callback) for callback in made.callback_handler.callbacks[:2]] == [LogFilter, PrivacyCallback]
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args: object, state: object, control: object, logs: dict, **_: object) -> None:
            seen.append(logs["epsilon"])

    made.add_callback(Reporter())
    made.train()
    assert len(seen) == 5 and min(seen) > 0
