"""One `train()`: its checks, its secret keys, its method and loss, and the mechanism of its steps."""

import math
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

import hf_private.accounting.pld
import hf_private.accounting.prv  # noqa: F401  here, as the first `train()` needs both: 0.4 seconds
from hf_private.config import DPConfig
from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.method import Method
from hf_private.gradients.selfcheck import Loss
from hf_private.mechanism.noise import reseed_global
from hf_private.mechanism.step import Mechanism
from hf_private.methods.carriers.method import Carriers
from hf_private.methods.gep.method import Anchors
from hf_private.methods.registry import resolve_method
from hf_private.spending.spending import LEDGER
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.unit_loss import RowsLoss

from .averaging import AveragingMixin
from .guards import ForwardGuard, check_optimizer, check_order, check_ranks
from .interruption import GracefulStop, save_after_error
from .loading import LoadingMixin
from .log_filter import LogFilter
from .publishing import PublishingMixin
from .refusals import refusals, refused_overrides
from .resume import check_layout, last_checkpoint
from .setup import Keys, build_mechanism


class TrainingMixin(AveragingMixin, PublishingMixin, LoadingMixin):
    """The runs of a private Trainer class. `PrivateMixin` sets what they read."""

    log_filter: LogFilter
    graceful_stop: GracefulStop
    _given_batch_size: int
    _mechanism: Mechanism | None
    _forward_guard: ForwardGuard | None
    _gradients_checked: bool
    _first_step: int  # of the run

    # The class whose `compute_loss` is replaced by the loss of `create_loss`. A subclass that overrides it is refused.
    objective_of: type[Trainer] = Trainer

    # Tests set 32 bytes here to repeat a run. Whoever knows them can undo the noise: the run is then NOT PRIVATE.
    _test_key: bytes | None = None

    def _check_settings(self) -> None:
        """Refuse settings that void the guarantee. Each `train()` checks again: settings may have changed since."""
        problems = refusals(
            self.args,
            train_dataset=self.train_dataset,
            data_collator=self.data_collator,
            compute_loss_func=self.compute_loss_func,
            custom_compute_loss=type(self).compute_loss is not self.objective_of.compute_loss,
        )
        found = [*problems, *refused_overrides(self)]
        if found:
            raise ValueError("\n".join(found))
        self.evaluation_guard.check(self.eval_dataset)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train privately; what the output folder's ledger has charged before counts too. See `Trainer.train`."""
        if trial is not None:
            self.hyperparameter_search()
        self._check_settings()
        config = DPConfig.from_dict(self.dp_config.to_dict())  # its checks, for what was set since
        self.dp_config = self._with_checked_anchors(config)
        self.unit_column.name = config.unit_column
        self.spending.set_budget(
            config.target_epsilon, config.target_risk, config.target_delta, config.accountant, config.group_size
        )
        self.log_filter.config = self.dp_config
        self.log_filter.keep_first(self.callback_handler)
        check_ranks(self.ranks, self.args)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self.ranks.run_on_first(last_checkpoint, self.output_dir)
        try:
            with self.provenance.tracking(resume_from_checkpoint or None), self.graceful_stop.listening():
                self.ranks.run_on_all(check_layout, resume_from_checkpoint, self)
                self.expected_batch_size = self.ranks.run_on_first(
                    self._resolve_batch_size, bool(resume_from_checkpoint)
                )
                self.ranks.assert_equal(dp_config=self.dp_config.to_dict())
                check_order(self.ranks, self.train_dataset)
                self.ranks.assert_equal(unit_column=self.unit_column.fingerprint(self.train_dataset))
                self.evaluation_guard.forget()
                self.evaluation_guard.check_content(self.eval_dataset)
                self.evaluation_guard.check_public(
                    anchor_dataset=self.anchor_dataset, public_examples=self.public_examples
                )
                self._keys = self._draw_keys()
                reseed_global()
                try:
                    output = super().train(resume_from_checkpoint, None, ignore_keys_for_eval)
                except Exception:
                    if self._mechanism is not None:
                        save_after_error(self, self._first_step)
                    raise
                self.ranks.check_weights(trainable(self.bare_model))
        finally:
            self._keys = None
            self._mechanism = None
            self.is_in_train = False
            self._end_average()
        self.graceful_stop.raise_if_stopped()
        return output if self.dp_config.log_nonprivate else output._replace(training_loss=math.nan)

    def _resolve_batch_size(self, resumes: bool) -> int:
        """The expected batch size: what was recorded if a run is resumed, on however many devices."""
        asked = self.dp_config.expected_batch_size
        recorded = self.spending.last_run.get("expected_batch_size") if resumes else None
        if asked and recorded and asked != recorded:
            raise ValueError(
                f"`expected_batch_size` must stay {recorded} when a run is resumed, got {asked}. For a new phase with"
                " other settings call train() without `resume_from_checkpoint`."
            )
        return recorded or asked or self._given_batch_size

    def _draw_keys(self) -> Keys:
        """Fresh secrets for sampling and for noise."""
        if self._test_key is not None:
            return Keys(self._test_key, self._test_key)
        return Keys(self.ranks.key(), self.ranks.key())

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if self._mechanism is not None:
            raise RuntimeError("A run must not begin anew within one `train()`: its noise and its draws would repeat.")
        # freezes what the method does not train, so it comes before the optimizer
        method = self.create_method()
        self.provenance.find_trainings()  # before FSDP2 replaces the parameters
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        steps = max(max_steps - self.state.global_step, 0)
        self._first_step = self.state.global_step
        if steps:
            self._attach(method, train_dataloader.batch_sampler.sample_rate, steps)
            checkpoint = resume_from_checkpoint
            method.begin_run(
                Path(self.output_dir, LEDGER).parent,
                resumes=checkpoint is not None,
                writes=self.spending.writes,
                state=None if checkpoint is None else Path(checkpoint, LEDGER).parent,
            )
        return prepared

    def create_method(self) -> Method:
        """The gradient method that `dp_config` asks for. Override it to train with one of your own."""
        config, seed = self.dp_config, self.args.seed
        own, only = config.method_config, config.train_only
        method = resolve_method(own, self.model, clipping=config.clipping, seed=seed, train_only=only)
        if isinstance(method, Anchors | Carriers) and own is not None and own.reads_public_data:
            method.books = self._anchor_books(self.create_loss(self.model))
        return method

    @property
    def objective_name(self) -> str | None:
        """Name of the objective on the card; None for that of the model's head."""
        return None

    def create_loss(self, model: nn.Module) -> Loss:
        """fn(model, batch) -> (B,), the loss of each record: that of the model's head, or `per_sample_loss`.

        Guarantee: The self-check at the start of `train()` runs on the loss that a subclass returns, too.
        """
        loss = PerSampleLoss(model, self.per_sample_loss, self.args.label_smoothing_factor, self.args.label_names)
        return loss if self.rows_per_record == 1 else RowsLoss(loss, self.rows_per_record)

    def _attach(self, method: Method, sample_rate: float, steps: int) -> None:
        """Check the optimizer, and build the mechanism for this number of steps."""
        assert self.optimizer is not None and self._keys is not None, "Trainer and `train()` have made them"
        model = self.accelerator.unwrap_model(self.model_wrapped)
        first = self.provenance.fingerprints is None and not self.state.global_step
        check_optimizer(self.optimizer, model, first)
        self._mechanism = build_mechanism(self, model, method, self._keys, sample_rate, steps)
        self._forward_guard = ForwardGuard(model)
        self._gradients_checked = False
