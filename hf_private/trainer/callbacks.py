"""PrivacyCallback: shows what has been spent and stops in time. It reads the ledger and never touches a gradient."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler
from transformers.utils import logging

from hf_private.spending.spending import NOT_PRIVATE, Spending

logger = logging.get_logger(__name__)


class PrivacyCallback(TrainerCallback):
    """Puts `epsilon` into every log entry, hence into the progress bar and all reporters, and ends training when no
    further step fits the budget. `DPTrainer` adds one by itself.

    While training runs, `epsilon` follows the schedule of the planned run: the accountant's own value, rounded up
    between a few points. It ends at the value of `trainer.privacy_spent()`. On its own it reads the ledger of any run:

    >>> PrivacyCallback("runs/not_started_yet", target_delta=1e-5).epsilon()
    0.0

    Args:
        spending: The `Spending` of a trainer, or the output folder of a run.
        target_delta: Delta at which a folder's epsilon is reported.
    """

    def __init__(self, spending: Spending | str | Path, target_delta: float = 1e-5) -> None:
        self.spending = spending if isinstance(spending, Spending) else Spending(spending, target_delta)

    def epsilon(self, exact: bool = False) -> float:
        """Epsilon spent so far: by the schedule of the run that is open, or by the accountant, which takes longer."""
        return self.spending.epsilon() if exact else self.spending.live_epsilon()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict | None = None, **_: Any) -> None:
        """Add epsilon to what is being logged, and to its copy in the history."""
        if logs is None or "epsilon" in logs or not self.spending.writes:
            return
        epsilon = self.epsilon()
        public = math.isfinite(epsilon)
        shown: dict[str, Any] = {"epsilon": epsilon} if public else {"epsilon": "inf", "privacy": NOT_PRIVATE}
        for entry in (logs, *state.log_history[-1:]):
            entry.update(shown)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop while the last permitted step is the one just taken; the mechanism would refuse the next."""
        run = self.spending.run
        if run is not None and run.steps_left == 0:
            if state.global_step < state.max_steps:
                state.log_history.append({"privacy_budget_spent": True, "step": state.global_step})
                logger.warning(f"The privacy budget is spent: training stops at step {state.global_step}.")
            control.should_training_stop = True


def show_epsilon_in_notebooks(handler: CallbackHandler) -> None:
    """Replace Trainer's table of metrics in Jupyter, if it is used, by one that has epsilon in it."""
    for index, callback in enumerate(handler.callbacks):
        if type(callback).__name__ == "NotebookProgressCallback":
            from .notebook import PrivateNotebookProgress  # it needs IPython

            handler.callbacks[index] = PrivateNotebookProgress()


class UpdateCallback(TrainerCallback):
    """Calls a function after each update of the optimizer, before other callbacks can change the weights."""

    def __init__(self, after_update: Callable[[], None]) -> None:
        self.after_update = after_update

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """The optimizer has just updated the weights."""
        self.after_update()
