"""Filters log entries: during training, only metrics that are known to be public pass.

A subclass, or another trainer that DPTrainer is combined with, may add metrics to a log entry after DPTrainer has seen
it (`SFTTrainer.log` adds the accuracy on training tokens). All entries go through the callbacks first, so the
filter is the first callback.
"""

from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.utils import logging

from hf_private.config import DPConfig

logger = logging.get_logger(__name__)

# Trainer's own metrics of training records: dropped without a warning, also outside of training.
NONPRIVATE_METRICS = frozenset({"loss", "train_loss", "grad_norm", "num_input_tokens_seen"})
# None of these depends on a record: settings, time, expected batch sizes, what was spent.
PUBLIC_METRICS = frozenset(
    "epoch step learning_rate total_flos train_runtime train_samples_per_second train_steps_per_second epsilon privacy"
    " privacy_budget_spent".split()
)


class LogFilter(TrainerCallback):
    """Removes non-private metrics from log entries, or renames them to `nonprivate_...` if `log_nonprivate` is set.

    Guarantee: while a run trains, no reporter, no later callback and no trainer_state.json sees a metric that is not
    in `PUBLIC_METRICS`, except those of an evaluation, which DPTrainer does not run on training records.
    """

    def __init__(self, config: DPConfig) -> None:
        self.config = config
        self._training = False
        self._told: set[str] = set()

    def keep_first(self, handler: CallbackHandler) -> None:
        """Keep the filter first among the callbacks, even if it was removed."""
        if not handler.callbacks or handler.callbacks[0] is not self:
            handler.callbacks[:] = [self, *(callback for callback in handler.callbacks if callback is not self)]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """From here on, only listed metrics pass."""
        self._training = True

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """From here on, the user's own entries pass."""
        self._training = False

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict | None = None, **_: Any) -> None:
        """Filter an entry and its copy in the history."""
        for entry in (logs, *state.log_history[-1:]):
            if entry is not None:
                self._filter(entry)

    def _filter(self, entry: dict[str, Any]) -> None:
        evaluations = tuple(name.removesuffix("runtime") for name in entry if name.endswith("_runtime"))
        evaluations = tuple(prefix for prefix in evaluations if prefix != "train_")
        for name in list(entry):
            asked_for = name.startswith("nonprivate_") and self.config.log_nonprivate
            listed = asked_for or name in PUBLIC_METRICS or name.startswith(evaluations)
            if name in NONPRIVATE_METRICS or (self._training and not listed):
                value = entry.pop(name)
                if self.config.log_nonprivate:
                    entry[f"nonprivate_{name}"] = value
                elif name not in NONPRIVATE_METRICS | self._told:
                    self._told.add(name)
                    logger.warning(
                        f"`{name}` is not logged: in training it may depend on the records, without noise. Set"
                        " `log_nonprivate=True` to log it, which makes the run NOT PRIVATE."
                    )
