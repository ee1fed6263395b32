"""DPTrainer: Trainer with a private step. Loop, scheduler, callbacks, checkpoints and evaluation are Trainer's own.

How it fits: one item of the training DataLoader is one whole Poisson batch, and `training_step` runs the mechanism on
it, so that each turn of Trainer's loop is one private step. Nothing un-noised leaves `training_step`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from hf_private.accounting.signal import noise_to_signal
from hf_private.config import DPConfig
from hf_private.distributed.fsdp import run_collectively
from hf_private.distributed.ranks import Ranks
from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.method import Method
from hf_private.gradients.selfcheck import LENGTH, Loss, self_check
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource, reseed_global
from hf_private.mechanism.sampling import PoissonLoader
from hf_private.mechanism.step import Mechanism
from hf_private.mechanism.units import as_unit_batch
from hf_private.methods.carriers.method import Carriers
from hf_private.methods.gep.method import Anchors
from hf_private.methods.gep.public_data import AnchorBooks, AnchorData, checked_anchors
from hf_private.methods.registry import resolve_method
from hf_private.randomness import Key
from hf_private.spending.spending import LEDGER, Spending
from hf_private.tasks.losses import LABEL_NAMES, PerSampleLoss
from hf_private.tasks.micro_batches import LogicalCollator
from hf_private.tasks.units import UnitColumn

from .callbacks import PrivacyCallback, UpdateCallback
from .data_guards import EvaluationGuard, check_data, main_input, public_batch
from .facts import public_facts
from .guards import (
    PrivateStepGuard,
    check_gradients,
    check_optimizer,
    check_order,
    check_parameters,
    check_ranks,
    check_size,
)
from .interruption import GracefulStop
from .loading import private_loader
from .log_filter import LogFilter
from .publishing import PublishingMixin, own_arguments
from .refusals import refusals, refused_overrides
from .rehearsal import rehearse
from .resume import check_layout, last_checkpoint

logger = logging.get_logger(__name__)


class Keys(NamedTuple):
    """The secrets of one `train()`: never saved, and drawn anew by the next."""

    sampling: Key | bytes
    noise: Key | bytes


class PrivateMixin(PublishingMixin):
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
        self._given_batch_size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.expected_batch_size = dp_config.expected_batch_size or self._given_batch_size
        self.evaluation_guard = EvaluationGuard(self)
        self._keys: Keys | None = None
        self._mechanism: Mechanism | None = None
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
        # before the user's callbacks, which may change weights, and before the reporters, which then see epsilon
        self.callback_handler.callbacks[:0] = [self.privacy_callback, UpdateCallback(self.provenance.note_update)]
        self.log_filter = LogFilter(self.dp_config)
        self.log_filter.keep_first(self.callback_handler)
        self.graceful_stop = GracefulStop(self.ranks)
        self.step_guard = PrivateStepGuard()
        for callback in (self.graceful_stop, self.step_guard):
            self.add_callback(callback)

    def _validate_args(self) -> None:
        self._check_settings()
        super()._validate_args()
        if self.num_records is not None:
            drawn = self.num_units if self.dp_config.draws_units else self.num_records
            check_size(self.expected_batch_size, self.dp_config.target_delta, drawn or 0)

    @property
    def num_units(self) -> int | None:
        """Number of units in the training set; None if every record is its own unit."""
        units = self.unit_column.units(self.train_dataset)
        return None if units is None else len(units)

    @property
    def num_records(self) -> int | None:
        """Number of training records; None if there is no training set. One without a length is refused."""
        dataset: Any = self.train_dataset
        return None if dataset is None else len(dataset)

    def _check_settings(self) -> None:
        """Refuse what would void the guarantee; again at each `train()`, for all of it can be set later, too."""
        problems = refusals(
            self.args,
            train_dataset=self.train_dataset,
            data_collator=self.data_collator,
            compute_loss_func=self.compute_loss_func,
            custom_compute_loss=type(self).compute_loss is not self.objective_of.compute_loss,
        )
        if found := [*problems, *refused_overrides(self)]:
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
                self.ranks.check_weights(trainable(self.accelerator.unwrap_model(self.model)))
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

    def get_train_dataloader(self) -> PoissonLoader:
        """Loader whose items are whole Poisson batches, split into micro-batches."""
        if self.train_dataset is None:
            raise ValueError("`train_dataset` must be given to train, got None.")
        dataset: Any = self.train_dataset
        collator, args = self.data_collator, self.args
        if isinstance(dataset, datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        logical = LogicalCollator(
            collator,
            args.per_device_train_batch_size,
            self.dp_config.micro_batch_tokens,
            rows_of=(main_input(self.model), *LABEL_NAMES, *(args.label_names or ())),
        )
        check_data(self, dataset, logical, all_records=self._keys is not None)
        return private_loader(
            dataset,
            self.unit_column.units(self.train_dataset),
            logical,
            self.dp_config,
            args,
            self.expected_batch_size,
            key=self._keys.sampling if self._keys else None,
        )

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """As Trainer does, and the unit's column in any case, in training and in evaluation."""
        return self.unit_column.removed(super()._remove_unused_columns(dataset, description))

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        return self.unit_column.hidden_from(super()._get_collator_with_removed_columns(data_collator, description))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Trainer's loader, for units that are not trained on."""
        self.evaluation_guard.check(eval_dataset if not isinstance(eval_dataset, str) else self.eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Trainer's loader, for units that are not trained on."""
        self.evaluation_guard.check(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def evaluation_loop(self, dataloader: DataLoader, *args: Any, **kwargs: Any) -> Any:
        """Trainer's loop of `evaluate` and `predict`, for anything but the training records: their metrics would be
        published without noise."""
        self.evaluation_guard.check_content(getattr(dataloader, "dataset", None))
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def rehearse(self, steps: int = 2) -> None:
        """Train, evaluate, save and resume on made-up records in a scratch folder. Charges and changes nothing."""
        rehearse(self, steps)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The expected batch size, for Trainer's banner and speed."""
        return self.expected_batch_size

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if self._mechanism is not None:
            raise RuntimeError("A run must not begin anew within one `train()`: its noise and its draws would repeat.")
        # freezes what the method does not train, so it comes before the optimizer
        method = self.create_method()
        self.provenance.find_trainings()  # before FSDP2 replaces the parameters
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if steps := max(max_steps - self.state.global_step, 0):
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
            method.books = self._anchor_books()
        return method

    def create_loss(self, model: nn.Module) -> Loss:
        """fn(model, batch) -> (B,), the loss of each record: that of the model's head, or `per_sample_loss`.

        Guarantee: The self-check at the start of `train()` runs on it, whatever a subclass returns.
        """
        return PerSampleLoss(model, self.per_sample_loss, self.args.label_smoothing_factor, self.args.label_names)

    def _with_checked_anchors(self, config: DPConfig) -> DPConfig:
        """The settings with the name and fingerprint of `anchor_dataset` in them."""
        own: Any = config.method_config  # parsed by DPConfig
        checked: Any = checked_anchors(own, self.anchor_dataset, self.train_dataset)
        return replace(config, **{"anchors" if config.carriers is None else "carriers": checked})

    def _anchor_books(self) -> AnchorBooks:
        """The public records of GEP or of public carriers, in micro-batches as the private ones have."""
        args, dataset, collator = self.args, self.anchor_dataset, self.data_collator
        config: Any = self.dp_config.method_config
        if isinstance(dataset, datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description="anchor")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="anchor")
        data = AnchorData(
            dataset,
            collator,
            self.model,
            num_anchors=config.num_anchors,
            labels=config.labels,
            max_rows=args.per_device_train_batch_size,
            max_tokens=self.dp_config.micro_batch_tokens,
            seed=args.seed,
        )
        loss = self.create_loss(self.model)
        return AnchorBooks(self.model, loss, lambda step: map(self._prepare_inputs, data(step)), args.seed)

    def _attach(self, method: Method, sample_rate: float, steps: int) -> None:
        """Check the model, fix the noise and the number of steps that may be taken, and build the mechanism."""
        config, model = self.dp_config, self.accelerator.unwrap_model(self.model_wrapped)
        loss = self.create_loss(model)
        assert self.optimizer is not None and self._keys is not None, "Trainer and `train()` have made them"
        check_optimizer(self.optimizer, model)
        meet = self.args.per_device_train_batch_size > 1
        args = (model, loss, self.public_batch, meet, config.clip_norm, config.gamma)
        report = run_collectively(self.ranks, model, self_check, *args)
        logger.info(report)
        noise = NoiseSource(config.noise, self._keys.noise)
        run = self.provenance.open_run(
            sample_rate,
            steps,
            method.releases,
            {
                **config.to_dict(),
                "expected_batch_size": self.expected_batch_size,
                "num_records": None if config.draws_units else self.num_records,
                "num_units": self.num_units,
                "method": method.describe(),
                "reproducible": noise.reproducible,
                "ranks": self.ranks.world_size,
            },
        )
        self._mechanism = Mechanism(
            model,
            loss,
            method=method,
            clipping=Clipping(config.clipping, config.clip_norm, config.gamma),
            noise=noise,
            noise_multiplier=run.plan.noise_multiplier,
            sample_rate=sample_rate,
            expected_batch_size=self.expected_batch_size,
            charge=run.charge,
            ranks=self.ranks,
            dummy=lambda: self._prepare_inputs(self.public_batch(1, LENGTH)),
            log_nonprivate=config.log_nonprivate,
        )
        self._announce_noise(method, run.plan.noise_multiplier)
        self._mechanism.steps = self.state.global_step  # with a test key, a resumed run repeats the noise of its steps
        self._gradients_checked = False

    def _announce_noise(self, method: Method, noise_multiplier: float) -> None:
        """Say how loud the noise of a step is; warn if the run may learn nothing. It reads no data."""
        if not noise_multiplier or not self.is_world_process_zero():
            return
        noised = sum(shape.numel() for shape in method.blocks.values())
        # GEP splits a step into two releases, each with more noise than the effective multiplier
        found = noise_to_signal(max(method.releases(noise_multiplier)), noised, self.expected_batch_size)
        if found.warning:
            logger.warning(found.warning)
        else:
            logger.info(str(found))

    def public_batch(
        self, batch_size: int, length: int, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """A made-up batch for the self-check at the start of `train()`: inputs and labels of records of up to `length`
        tokens, no two alike. Override it for a model or a `per_sample_loss` that needs other inputs."""
        return public_batch(self, batch_size, length, generator)

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
        self.provenance.check_step()
        self._mechanism.step(as_unit_batch(part).map(self._prepare_inputs) for part in inputs.micro_batches)
        self.step_guard.released += 1
        self.provenance.register_step()
        if not self._gradients_checked and inputs.size:
            check_gradients(self._mechanism.model, self.dp_config.is_private)
            self._gradients_checked = True
        seen = self._mechanism.nonprivate  # None unless `log_nonprivate`
        return torch.tensor(seen["loss_sum"] / max(seen["batch_size"], 1) if seen else 0.0, device=self.args.device)

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


class DPTrainer(PrivateMixin, Trainer):
    """Trainer whose model can be published: it fine-tunes with differential privacy, as `dp_config` says.

    Takes all that `Trainer` takes, and:

    Args:
        dp_config: Privacy settings, see `DPConfig`.
        per_sample_loss: fn(outputs, labels) -> (B,), a loss for each record, in place of the one that fits the
            model's head; `labels` is a dict if there are several. It replaces `compute_loss`.
        anchor_dataset: Public records that span the subspace of `DPConfig.anchors`.
        continues: Folder or Hub repository whose privacy.json this run continues, beside that of the base model: for
            an adapter from `PeftModel.from_pretrained`, which does not keep where it came from, also if that was this
            output folder.

    `gradient_accumulation_steps` and `per_device_train_batch_size` change speed and memory only, once
    `DPConfig.expected_batch_size` is set. Epochs are counted in steps of that size: an epoch is ceil(n / B) steps.

    >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
    >>> model = BertForSequenceClassification(
    ...     BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, intermediate_size=8, vocab_size=50)
    ... )
    >>> records = [{"input_ids": [7, 8, 9, 10 + i], "labels": i % 2} for i in range(40)]
    >>> folder = getfixture("tmp_path")
    >>> args = TrainingArguments(folder, max_steps=2, report_to=[], disable_tqdm=True, logging_strategy="no")
    >>> trainer = DPTrainer(model, args, dp_config=DPConfig(noise_multiplier=1.0), train_dataset=records)
    >>> output = trainer.train()
    {'train_runtime': ...}
    >>> output.global_step
    2
    >>> trainer.privacy_spent().epsilon < 5
    True
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        dp_config: DPConfig | None = None,
        per_sample_loss: Callable[[Any, Any], Tensor] | None = None,
        anchor_dataset: Any = None,
        continues: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        optional = {  # passed on if given: the trainer of another library that is mixed in may not take them all
            "model_init": model_init,
            "compute_loss_func": compute_loss_func,
            "compute_metrics": compute_metrics,
            "callbacks": callbacks,
            "optimizers": optimizers,
            "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
            "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
        }
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            dp_config=dp_config,
            per_sample_loss=per_sample_loss,
            anchor_dataset=anchor_dataset,
            continues=continues,
            **{name: value for name, value in optional.items() if value not in (None, (None, None))},
            **kwargs,
        )
