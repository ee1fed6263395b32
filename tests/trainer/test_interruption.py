"""Ctrl-C and SIGTERM: what was charged is in a checkpoint, and the handlers are those of before."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_private.trainer.interruption import HANDLED
from tests.support import training


class Signals(TrainerCallback):
    """Sends a signal to this process, some times, at some event of some step."""

    def __init__(self, number: int, step: int = 1, times: int = 1, event: str = "on_step_begin") -> None:
        self.number = number
        self.step = step
        self.times = times
        setattr(self, event, self.send)

    def send(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            times, self.times = self.times, 0
            for _ in range(times):
                os.kill(os.getpid(), self.number)


@pytest.fixture(autouse=True)
def default_handlers() -> Any:
    """pytest's own are put back."""
    before = {number: signal.signal(number, handler) for number, handler in HANDLED.items()}
    yield
    after = {number: signal.getsignal(number) for number in HANDLED}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == HANDLED, "the handlers were not restored"


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["int", "term"]
)
def test_a_signal_leaves_a_checkpoint_behind(tmp_path: Path, number: int, raised: type[BaseException]) -> None:
    made = training.trainer(tmp_path, callbacks=[Signals(number)], save_strategy="no")
    with pytest.raises(raised) as caught:
        made.train()
    if raised is SystemExit:
        assert caught.value.code == 128 + signal.SIGTERM
    assert training.steps(tmp_path) == 2, "the step was finished, and no other was begun"
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = training.trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert training.steps(tmp_path) == 4 and resumed.state.global_step == 4, "nothing was charged twice"


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    made = training.trainer(tmp_path, callbacks=[Signals(signal.SIGINT, times=2)])
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert training.steps(tmp_path) == 1 and not list(tmp_path.glob("checkpoint-*"))


def test_a_signal_during_an_evaluation_is_answered_after_it(tmp_path: Path) -> None:
    settings = {"eval_dataset": training.text(seed=1), "eval_strategy": "steps", "eval_steps": 2}
    made = training.trainer(tmp_path, callbacks=[Signals(signal.SIGINT, 2, event="on_prediction_step")], **settings)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert training.steps(tmp_path) == 2 and (tmp_path / "checkpoint-2").is_dir()


def test_before_the_first_step_a_signal_stops_at_once(tmp_path: Path) -> None:
    made = training.trainer(tmp_path)
    attach = made._attach

    def interrupted(*args: Any) -> None:
        attach(*args)
        signal.raise_signal(signal.SIGINT)

    made._attach = interrupted
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert training.steps(tmp_path) == 0


def test_handlers_of_the_user_and_other_threads_are_left_alone(tmp_path: Path) -> None:
    got: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        training.trainer(tmp_path / "own", callbacks=[Signals(signal.SIGTERM)]).train()
        assert got == [signal.SIGTERM] and training.steps(tmp_path / "own") == 4
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    thread = threading.Thread(target=lambda: training.trainer(tmp_path / "thread").train())
    thread.start()
    thread.join()
    assert training.steps(tmp_path / "thread") == 4


def test_a_run_that_fails_restores_the_handlers(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        training.trainer(tmp_path, callbacks=[Fails()]).train()


@pytest.mark.parametrize("where", ["evaluation", "step"])
def test_an_error_leaves_a_checkpoint_behind(tmp_path: Path, where: str) -> None:
    """What was charged is not lost: the run goes on from there."""

    def metrics(_: Any) -> dict[str, float]:
        raise RuntimeError("no such label")

    class Fails(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("no such label")

    attack: dict[str, Any] = {"callbacks": [Fails()]}
    if where == "evaluation":
        attack = {"eval_dataset": training.text(seed=1), "eval_strategy": "steps", "eval_steps": 3}
        attack["compute_metrics"] = metrics
    made = training.trainer(tmp_path, **attack)
    with pytest.raises(RuntimeError, match="no such label"):
        made.train()
    assert (tmp_path / "checkpoint-3" / "model.safetensors").exists() and training.steps(tmp_path) == 3
    training.trainer(tmp_path).train(resume_from_checkpoint=True)
    assert training.steps(tmp_path) == 4


def test_an_error_before_the_first_step_leaves_nothing(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("at once")

    with pytest.raises(RuntimeError, match="at once"):
        training.trainer(tmp_path, callbacks=[Fails()]).train()
    assert not list(tmp_path.glob("checkpoint-*"))
