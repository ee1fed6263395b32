"""PrivateMixin: the private step in the loop of a Trainer class, and the checks around it.

How it fits: one item of the training DataLoader is one whole Poisson batch, and `training_step` runs the mechanism on
it, so that each turn of Trainer's loop is one private step. Nothing un-noised leaves `training_step`.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput

from hf_private.config import DPConfig
from hf_private.distributed.ranks import Ranks
from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.method import Method
from hf_private.gradients.selfcheck import Loss
from hf_private.mechanism.noise import reseed_global
from hf_private.mechanism.step import Mechanism
from hf_private.mechanism.units import as_unit_batch
from hf_private.methods.carriers.method import Carriers
from hf_private.methods.gep.method import Anchors
from hf_private.methods.registry import resolve_method
from hf_private.spending.spending import LEDGER, Spending
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.unit_loss import RowsLoss
from hf_private.tasks.units import UnitColumn

from .callbacks import PrivacyCallback, UpdateCallback, show_epsilon_in_notebooks
from .data_guards import EvaluationGuard
from .facts import public_facts
from .guards import (
    ForwardGuard,
    PrivateStepGuard,
    check_gradients,
    check_optimizer,
    check_order,
    check_parameters,
    check_ranks,
    check_size,
)
from .interruption import GracefulStop
from .loading import LoadingMixin
from .log_filter import LogFilter
from .publishing import PublishingMixin, own_arguments
from .refusals import refusals, refused_overrides
from .rehearsal import rehearse
from .resume import check_layout, last_checkpoint
from .setup import Keys, build_mechanism


class PrivateMixin(PublishingMixin, LoadingMixin):
    """Makes a Trainer class private: `class Mine(PrivateMixin, SomeTrainer)`, with nothing of SomeTrainer copied.

    It takes the arguments that all Trainer classes begin with, those of privacy (see `DPTrainer`), and passes on the
    rest by keyword. A class whose `compute_loss` is its own objective sets `objective_of` to that class, and returns
    from `create_loss` the same objective with one value for each record.
    """

    # The class whose `compute_loss` the loss of `create_loss` stands for. A subclass that overrides it is refused.
    objective_of: type[Trainer] = Trainer
    # The class of `args`.
    arguments_class: type[TrainingArguments] = TrainingArguments

    # Tests set 32 bytes here to repeat a run. Whoever knows them can undo the noise: the run is then NOT PRIVATE.
    _test_key: bytes | None = None

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        dp_config: DPConfig | None = None,
        per_sample_loss: Callable[[Any, Any], Tensor] | None = None,
        anchor_dataset: Any = None,
        public_examples: Any = None,
        continues: str | Path | None = None,
        **arguments: Any,
    ) -> None:
        if not isinstance(dp_config, DPConfig):
            raise ValueError(
                f"`dp_config` must be a DPConfig, got {dp_config!r}. For instance DPConfig(target_epsilon=8.0)."
            )
        args = self.arguments_class("tmp_trainer") if args is None else args
        if not isinstance(args, self.arguments_class):
            raise ValueError(
                f"`args` must be {self.arguments_class.__name__} for {type(self).__name__}, got {type(args).__name__}."
            )
        self.per_sample_loss = per_sample_loss
        self.anchor_dataset = anchor_dataset
        self.public_examples = public_examples
        self._given_batch_size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.expected_batch_size = dp_config.expected_batch_size or self._given_batch_size
        self.evaluation_guard = EvaluationGuard(self)
        self._keys: Keys | None = None
        self._mechanism: Mechanism | None = None
        self._forward_guard: ForwardGuard | None = None
        self._gradients_checked = False
        self.unit_column = UnitColumn(dp_config.unit_column)
        super().__init__(
            dp_config=dp_config,
            continues=continues,
            spending=Spending(
                args.output_dir or "tmp_trainer",
                dp_config.target_delta,
                target_epsilon=dp_config.target_epsilon,
                target_risk=dp_config.target_risk,
                accountant=dp_config.accountant,
                records_per_unit=dp_config.group_size,
                writes=args.process_index == 0,
            ),
            ranks=Ranks(),
            model=model,
            args=own_arguments(args),
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **arguments,
        )
        self.dp_config = self._with_checked_anchors(dp_config)
        self.privacy_callback = PrivacyCallback(self.spending)
        self.step_guard = PrivateStepGuard()
        # before the user's callbacks, which may change weights, and before the reporters, which then see epsilon
        self.callback_handler.callbacks[:0] = [
            self.privacy_callback,
            UpdateCallback(self.provenance.note_update),
            self.step_guard,
        ]
        self.log_filter = LogFilter(self.dp_config)
        self.log_filter.keep_first(self.callback_handler)
        show_epsilon_in_notebooks(self.callback_handler)
        self.graceful_stop = GracefulStop(self.ranks)
        self.add_callback(self.graceful_stop)

    def _validate_args(self) -> None:
        self._check_settings()
        super()._validate_args()
        if self.num_records is not None:
            drawn = self.num_units if self.dp_config.draws_units else self.num_records
            check_size(self.expected_batch_size, self.dp_config.target_delta, drawn or 0)

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

    # ---- one run

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
                self._keys = self._draw_keys()
                reseed_global()
                output = super().train(resume_from_checkpoint, None, ignore_keys_for_eval)
                self.ranks.check_weights(trainable(self.bare_model))
        finally:
            self._keys = None
            self._mechanism = None
            self.is_in_train = False
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

    def rehearse(self, steps: int = 2) -> None:
        """Train, evaluate, save and resume on made-up records in a scratch folder. Charges and changes nothing."""
        rehearse(self, steps)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if self._mechanism is not None:
            raise RuntimeError("A run must not begin anew within one `train()`: its noise and its draws would repeat.")
        # freezes what the method does not train, so it comes before the optimizer
        method = self.create_method()
        self.provenance.find_trainings()  # before FSDP2 replaces the parameters
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        steps = max(max_steps - self.state.global_step, 0)
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
        """What the card says of the objective; None if it is that of the model's head."""
        return None

    def create_loss(self, model: nn.Module) -> Loss:
        """fn(model, batch) -> (B,), the loss of each record: that of the model's head, or `per_sample_loss`.

        Guarantee: The self-check at the start of `train()` runs on it, whatever a subclass returns.
        """
        loss = PerSampleLoss(model, self.per_sample_loss, self.args.label_smoothing_factor, self.args.label_names)
        return loss if self.rows_per_record == 1 else RowsLoss(loss, self.rows_per_record)

    def _attach(self, method: Method, sample_rate: float, steps: int) -> None:
        """Build the mechanism for so many steps, of a model and an optimizer that keep the guarantee."""
        assert self.optimizer is not None and self._keys is not None, "Trainer and `train()` have made them"
        model = self.accelerator.unwrap_model(self.model_wrapped)
        check_optimizer(self.optimizer, model)
        self._mechanism = build_mechanism(self, model, method, self._keys, sample_rate, steps)
        self._forward_guard = ForwardGuard(model)
        self._gradients_checked = False

    # ---- one step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """One private step on one Poisson batch, a `LogicalBatch`. Returns 0, or the loss if `log_nonprivate`."""
        model.train()
        switch = getattr(self.optimizer, "train", None)  # of optimizers with two sets of weights (schedule-free)
        if callable(switch):
            switch()
        if self._mechanism is None:  # a complete run was resumed, and Trainer counts one step more before it looks
            self.state.global_step -= 1
            return torch.zeros((), device=self.args.device)
        check_parameters(self._mechanism.model, self._mechanism.parameters)
        assert self._forward_guard is not None
        self._forward_guard.check()
        self.provenance.check_step()
        self._mechanism.step(as_unit_batch(part).map(self._ready) for part in inputs.micro_batches)
        self.step_guard.note_release(self._mechanism.model)
        self.provenance.register_step()
        if not self._gradients_checked and inputs.size:
            check_gradients(self._mechanism.model, self.dp_config.is_private)
            self._gradients_checked = True
        seen = self._mechanism.nonprivate  # None unless `log_nonprivate`
        loss = seen["loss_sum"] / max(seen["batch_size"], 1) if seen else 0.0
        return torch.full((), loss, device=self.args.device)

    def _ready(self, batch: Any) -> Any:
        """A micro-batch on the device, checked before it goes there: afterwards the host would wait for each check."""
        assert self._mechanism is not None
        loss = self._mechanism.per_sample_loss
        if isinstance(loss, PerSampleLoss):
            batch = loss.checked(self._mechanism.model, batch)
        return self._prepare_inputs(batch)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """No second clip: each record was clipped before the noise."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> None:
        """No norm in the logs."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log what may be published; what is not private only if asked for, and by that name. See `LogFilter`."""
        self.log_filter.keep_first(self.callback_handler)
        super().log(logs, start_time)

    def _save_method_state(self, folder: Path) -> None:
        if self._mechanism is not None:
            self._mechanism.method.save_state(folder, writes=self.args.should_save)

    def _public_facts(self) -> dict[str, Any]:
        return public_facts(self)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: choosing the best of several private runs costs privacy that no single run accounts for."""
        raise NotImplementedError(
            "`hyperparameter_search` cannot be combined with privacy: every trial spends, and so does choosing among"
            " them. Tune on public data, or train each setting in its own output_dir and add them up (`hf-private"
            " compose`)."
        )
