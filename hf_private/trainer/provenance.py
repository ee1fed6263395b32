"""Carries earlier spending into a run, and binds a trainer's card to the weights that its runs have left.

A run takes over what the weights have cost before (`spending.lineage`). A save is refused if the weights have cost
more than the ledger records, or if they changed outside of a run (`spending.fingerprints`).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

from hf_private.spending.admissions import POST_PROCESSING
from hf_private.spending.costs import Past, cost_of, unknown_cost
from hf_private.spending.fingerprints import Fingerprints, difference_from_files
from hf_private.spending.ledger import LedgerError
from hf_private.spending.lineage import mark, past_of
from hf_private.spending.registry import Training, changed_since, recognise, register, remember, trainings
from hf_private.spending.run import Plan, Run
from hf_private.spending.stated_unit import refuse_other_units
from hf_private.tasks.heads import base_model

from .resume import check_checkpoint
from .saved_texts import changed_texts, saved_texts

if TYPE_CHECKING:
    from .publishing import PublishingMixin


def changed_outside(name: str) -> LedgerError:
    """The refusal of weights that something else than a private step has changed."""
    return LedgerError(
        f"`{name}` was changed outside of the private steps, by another trainer, a callback or by hand. No ledger has"
        " the cost of that, so no card can be written. Load the model again from where it was saved. If it was"
        " post-processing, without any training data, state it: `trainer.declare_post_processing(...)` takes"
        f" {', '.join(map(repr, POST_PROCESSING))}, and the card says so."
    )


class Provenance:
    """Tracks what the weights of a trainer have cost, and whether they are as its runs left them.

    Args:
        trainer: Its `spending`, `ranks`, `dp_config` and `continues` are read when they are needed.
    """

    def __init__(self, trainer: "PublishingMixin") -> None:
        self.trainer = trainer
        self.post_processing: list[str] = []
        self.fingerprints: Fingerprints | None = None  # of the last run that has changed the weights
        self._texts: dict[str, Any] = {}  # settings and vocabulary when the last run began
        self._written: set[str] | None = None  # which of them it has changed; None while it runs
        self._training: Training | None = None
        self._taken_over: list[Training] = []
        self._loaded = False
        self._changed = False
        self._checkpoint: str | None = None
        self._held = ExitStack()

    @property
    def model(self) -> nn.Module:
        """The trainer's model, without the wrappers of Accelerate."""
        return self.trainer.bare_model

    # ---- one run

    @contextmanager
    def tracking(self, checkpoint: str | None) -> Iterator[None]:
        """One `train()`: however it ends, the cost of the parameters by then is known to later trainers."""
        ranks, spending = self.trainer.ranks, self.trainer.spending
        if checkpoint is not None:
            ranks.run_on_first(check_checkpoint, checkpoint, self.trainer.output_dir)
            ranks.run_on_first(spending.reconcile, checkpoint)
        self._training = Training(spending)
        self._checkpoint = checkpoint
        self._taken_over = []
        self._loaded = False
        self._changed = False
        before = self.fingerprints
        try:
            with ExitStack() as self._held:
                yield
        finally:
            if not self._changed:  # a refused run is refused again
                self.fingerprints = Fingerprints(self.model) if self._loaded else before
            if self._loaded or self._changed:
                self._training.end()
                self._end_fingerprints()
            self._training = None

    def _end_fingerprints(self) -> None:
        assert self.fingerprints is not None, "a run begins with them"
        self._written = self._changed_texts()
        self.check_update()
        to_eval = getattr(self.trainer.optimizer, "eval", None)  # schedule-free optimizers keep two sets of weights
        if callable(to_eval):
            to_eval()
        remember(self.fingerprints.end(self.model), before={*self.fingerprints.start.values()})

    def note_checkpoint(self) -> None:
        """Called when the weights of a checkpoint were loaded."""
        if self._training is not None:
            self._loaded = True
            register(self.model, self._training, loads=True)

    def find_trainings(self) -> None:
        """Find what this process has trained in the model, and refuse weights that were changed since."""
        recognise(self.model)
        self._taken_over = trainings(self.model)
        changed = changed_since(self.model)
        if changed is not None and not self.post_processing:
            raise changed_outside(changed)

    def open_run(
        self,
        sample_rate: float,
        steps: int,
        releases: Callable[[float], tuple[float, ...]],
        settings: dict[str, Any],
    ) -> Run:
        """Open the ledger for the rest of `train()`: earlier training is charged, noise and steps are fixed."""
        trainer, spending = self.trainer, self.trainer.spending
        declared = {"post_processing": self.post_processing} if self.post_processing else {}

        def opened() -> Plan:
            past, disjoint = self._past(), trainer.dp_config.disjoint_data
            taken_over = past.statements if past and not disjoint else ()
            refuse_other_units(settings, [spending.statement(), *taken_over], disjoint)
            run = spending.open(
                sample_rate,
                steps,
                releases,
                trainer.dp_config.noise_multiplier,
                settings={**settings, **declared},
                past=past,
                disjoint_data=disjoint,
                checkpoint=self._checkpoint,
            )
            return self._held.enter_context(run).plan

        plan = trainer.ranks.run_on_first(opened)
        if not spending.writes:
            self._held.enter_context(spending.follow(plan))
        self.fingerprints = Fingerprints(self.model)
        self._texts, self._written = saved_texts(self.model, self.trainer.processing_class), None
        assert spending.run is not None, "it was opened just now"
        return spending.run

    def _past(self) -> Past | None:
        """What the weights have cost before; None if it is not found, and `disjoint_data` says not to charge it."""
        try:
            return past_of(self.model, self.trainer.continues, resumed=self._loaded)
        except (LedgerError, OSError):
            if self.trainer.dp_config.disjoint_data:
                return None
            raise

    # ---- one step

    def check_step(self) -> None:
        """Refuse a step on weights that were written to since the last one."""
        self.check_update()
        if self.fingerprints is not None and self.fingerprints.written_outside is not None:
            raise changed_outside(self.fingerprints.written_outside)

    def register_step(self) -> None:
        """Called at each step, not sooner: a run that failed before its first step has changed nothing."""
        if self._training is not None and not self._changed:
            mark(self.model)
            register(self.model, self._training, self._taken_over)
            self._changed = True

    def note_update(self) -> None:
        """Called after each update of the optimizer."""
        if self.fingerprints is not None:
            self.fingerprints.note_update()

    def check_update(self) -> None:
        """Find out whether anything but the optimizer has written to the weights since `note_update`."""
        optimizer = self.trainer.optimizer
        bare = getattr(optimizer, "optimizer", optimizer)  # without Accelerate's wrapper
        averages = callable(getattr(bare, "eval", None))  # a schedule-free optimizer writes to weights at evaluations
        if self.fingerprints is not None and not averages and not self.post_processing:
            self.fingerprints.check_update()

    # ---- a save

    def check_save(self) -> None:
        """Refuse to save weights that have cost more than the ledger has, or that no run has left. All ranks call it.

        If all is well, ranks do not wait for each other: the first may save alone.
        """
        found, ranks = trainings(self.model), self.trainer.ranks
        if self.trainer.spending.writes:
            _ = self.trainer.spending.ledger  # refuses one that was replaced
        if not found or any(training.spending is not self.trainer.spending for training in found):
            ranks.run_on_first(self._check_cost)
        if any(isinstance(p, DTensor) for p in self.model.parameters()):  # the ranks hold different shards
            ranks.run_on_all(self._check_weights)
        else:
            self._check_weights()

    def _changed_texts(self) -> set[str]:
        return changed_texts(self._texts, saved_texts(self.model, self.trainer.processing_class))

    def _check_weights(self) -> None:
        if self.fingerprints is None:
            return
        texts = self._changed_texts() if self._texts else set()
        written = texts if self._written is None else texts & self._written
        if written:
            raise LedgerError(
                f"`{min(written)}` was changed while training ran: what a forward pass or a collator writes there"
                " would publish training data without noise. Nothing was saved. Set it before `train()`, or set it"
                " back."
            )
        buffer = self.fingerprints.changed_buffer(self.model)
        if buffer is not None:
            raise LedgerError(
                f"`{buffer}` is a buffer that training has written to: it would publish training data without noise,"
                " so nothing was saved. Replace its module, or register it with `persistent=False`."
            )
        changed = self.fingerprints.changed(self.model)
        if changed is not None and not self.post_processing:
            raise changed_outside(changed)

    def _check_cost(self) -> None:
        spending, has_trained = self.trainer.spending, self.fingerprints is not None
        if not has_trained:
            self.find_trainings()
        found = [training.statement for training in trainings(self.model)]
        looked_up = None if found or has_trained else self._past()
        found += looked_up.statements if looked_up is not None else ()
        costs = [cost_of(statement) for statement in found]
        left_out = looked_up is not None and self.trainer.dp_config.disjoint_data
        for cost in () if left_out else costs:
            if not spending.has(cost):
                steps = sum(event["steps"] for event in cost["events"])
                raise LedgerError(
                    f"The model was trained elsewhere: {steps} private steps of the ledger with head"
                    f" {cost['head'][:16]} are not all in that of {str(spending.folder)!r}. This card would claim less"
                    " than the weights have cost, so nothing was saved. Save the model with the trainer that trained"
                    " it last, or train it here first, which takes over its cost."
                )
        if not has_trained and spending.events and not any(map(spending.has, costs)):
            raise unknown_cost(f"no run in {str(spending.folder)!r} is known to have trained them")
        if looked_up is not None and spending.events and not self.post_processing:
            self._check_origin()

    def _check_origin(self) -> None:
        """Refuse weights that differ from those that were loaded, in a trainer that has not trained them."""
        loaded_from = getattr(getattr(base_model(self.model), "config", None), "_name_or_path", None)
        folders = [folder for folder in (loaded_from, self.trainer.continues) if folder and os.path.isdir(folder)]
        differences = [difference_from_files(self.model, folder) for folder in folders]
        if None not in differences:
            raise changed_outside(next(filter(None, differences), "model"))
