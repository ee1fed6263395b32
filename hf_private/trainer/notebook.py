"""The table that Jupyter shows while a run trains, with epsilon in it. Imported where Trainer uses such a table."""

from typing import Any

from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy
from transformers.utils.notebook import NotebookProgressCallback

COLUMN = "Epsilon"


class PrivateNotebookProgress(NotebookProgressCallback):
    """Trainer's table adds a line for each training loss, which a private run does not log, and drops the first word
    of a metric's name, which leaves `epsilon` without a heading."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Start the table."""
        super().on_train_begin(args, state, control, **kwargs)
        if args.eval_strategy == IntervalStrategy.NO and self.training_tracker is not None:
            self.training_tracker.inner_table = [[self.first_column, COLUMN]]

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        """Add a line with epsilon; with evaluation, its lines have it."""
        epsilon = (logs or {}).get("epsilon")
        if args.eval_strategy == IntervalStrategy.NO and self.training_tracker is not None and epsilon is not None:
            self.training_tracker.write_line({self.first_column: state.global_step, COLUMN: epsilon})

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Add a line with the metrics and epsilon under its name."""
        shown = {"eval_epsilon" if name == "epsilon" else name: value for name, value in (metrics or {}).items()}
        super().on_evaluate(args, state, control, metrics=shown, **kwargs)
