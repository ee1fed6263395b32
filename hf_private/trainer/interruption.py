"""Ctrl-C, SIGTERM and errors leave a checkpoint behind: what was charged is not lost.

A checkpoint holds noised weights, so it costs nothing more. After an error (in an evaluation, say) `save_after_error`
saves it at once. The first signal lets the current step finish, saves a checkpoint through Trainer's own control flow
and ends the run; then `train()` raises KeyboardInterrupt, or SystemExit for SIGTERM. A second signal ends the process
at once.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from hf_private.distributed.ranks import Ranks

logger = logging.get_logger(__name__)

# Signals, and the handlers that are replaced. One of the user's own, or an ignored signal, is left alone.
HANDLED = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class GracefulStop(TrainerCallback):
    """Turns the first Ctrl-C or SIGTERM of a run into a checkpoint and a regular end, on all ranks.

    >>> before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    >>> stop = GracefulStop(Ranks())
    >>> with stop.listening():
    ...     stop.on_train_begin()
    ...     signal.raise_signal(signal.SIGINT)
    >>> stop.received == signal.SIGINT
    True
    >>> signal.signal(signal.SIGINT, before) is signal.default_int_handler  # put back after the run
    True
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.received: int | None = None
        self._listens = False
        self._stopping = False
        self._saved = False
        self._previous: dict[int, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """One run. Signals are handled from its first step on: before it, there is nothing to save."""
        self.received = None
        self._stopping = False
        self._saved = False
        self._listens = threading.current_thread() is threading.main_thread()  # others cannot set handlers
        try:
            yield
        finally:
            self._listens = False
            self._restore()

    def raise_if_stopped(self) -> None:
        """After the run: what the signal would have done without this callback."""
        if self.received is None and not self._stopping:
            return
        if self.received == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt

    def _receive(self, number: int, frame: Any) -> None:
        self.received = number
        self._restore()  # the next one is not for us
        name = signal.Signals(number).name
        logger.warning(f"{name}: finishing the step and saving a checkpoint. Send it again to stop at once.")

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start to listen."""
        if self._listens:
            for number, replaced in HANDLED.items():
                if signal.getsignal(number) == replaced:
                    self._previous[number] = signal.signal(number, self._receive)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Ask Trainer for a checkpoint and the end of training, if any rank got a signal."""
        self._stopping = self._stopping or self.ranks.any(self.received is not None)
        if self._stopping:
            control.should_evaluate = False
            control.should_save = not self._saved
            control.should_training_stop = True

    on_evaluate = on_step_end  # a signal during a long evaluation
    on_epoch_end = on_step_end

    def on_save(self, *_: Any, **__: Any) -> None:
        """One checkpoint is enough."""
        self._saved = self._stopping

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop listening."""
        self._restore()


def save_after_error(trainer: Trainer, first_step: int) -> None:
    """Save a checkpoint of the steps since `first_step`, if there is none. Only for a process that trains alone: other
    ranks may not have failed, and would not save with it."""
    state = trainer.state
    folder = Path(str(trainer.args.output_dir), f"checkpoint-{state.global_step}")
    if state.global_step <= first_step or folder.exists() or trainer.args.world_size > 1:
        return
    assert trainer.model is not None, "it has trained"
    try:
        trainer._save_checkpoint(trainer.model, trial=None)
    except Exception as error:  # the one that ended the run says more
        logger.warning(f"No checkpoint could be saved ({type(error).__name__}).")
    else:
        logger.warning(f"The run failed. What it has trained so far is in {folder}.")
