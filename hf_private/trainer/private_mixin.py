"""PrivateMixin: the private step in the loop of a Trainer class, and the checks around it.

How it fits: one item of the training DataLoader is one whole Poisson batch, and `training_step` runs the mechanism on
it, so that each turn of Trainer's loop is one private step. Nothing un-noised leaves `training_step`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EvalPrediction, TrainerCallback, TrainingArguments

from hf_private.config import DPConfig
from hf_private.distributed.ranks import Ranks
from hf_private.gradients.tensors import sent
from hf_private.mechanism.step import Mechanism
from hf_private.mechanism.units import UnitBatch, as_unit_batch
from hf_private.spending.spending import Spending
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.micro_batches import OneByOne
from hf_private.tasks.unit_column import UnitColumn

from .callbacks import PrivacyCallback, UpdateCallback, show_epsilon_in_notebooks
from .data_guards import EvaluationGuard
from .facts import public_facts
from .guards import ForwardGuard, PrivateStepGuard, check_gradients, check_parameters, check_size
from .interruption import GracefulStop
from .log_filter import LogFilter
from .publishing import own_arguments
from .rehearsal import rehearse
from .setup import Keys
from .training_run import TrainingMixin


class PrivateMixin(TrainingMixin):
    """Makes a Trainer class private: `class Mine(PrivateMixin, SomeTrainer)`, with nothing of SomeTrainer copied.

    It takes the arguments of Trainer and the privacy arguments that `DPTrainer` documents, and passes others on by
    keyword. A class with an objective of its own in `compute_loss` sets `objective_of` to that class, and returns the
    same objective from `create_loss`, with one value for each record.
    """

    # The class of `args`.
    arguments_class: type[TrainingArguments] = TrainingArguments

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
        optional = {  # passed on if given: not all Trainer classes take all of them
            "model_init": model_init,
            "compute_loss_func": compute_loss_func,
            "compute_metrics": compute_metrics,
            "callbacks": callbacks,
            "optimizers": optimizers,
            "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
            "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
        }
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
            **{name: value for name, value in optional.items() if value not in (None, (None, None))},
            **arguments,
        )
        self.dp_config = self._with_checked_anchors(dp_config)
        self.privacy_callback = PrivacyCallback(self.spending)
        self.step_guard = PrivateStepGuard(self.provenance.check_flags)
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

    def rehearse(self, steps: int = 2) -> None:
        """Train, evaluate, save and resume on made-up records in a scratch folder. Charges and changes nothing."""
        rehearse(self, steps)

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
        of_weights = self.provenance.check_step()
        self._mechanism.step(OneByOne(inputs.micro_batches, self._ready))
        self.step_guard.note_release(self._mechanism.model, of_weights)
        self.provenance.register_step()
        if not self._gradients_checked and inputs.size:
            check_gradients(self._mechanism.model, self.dp_config.is_private)
            self._gradients_checked = True
        seen = self._mechanism.nonprivate  # None unless `log_nonprivate`
        loss = seen["loss_sum"] / max(seen["batch_size"], 1) if seen else 0.0
        return torch.full((), loss, device=self.args.device)

    def _ready(self, micro_batch: Any) -> UnitBatch:
        """A micro-batch on the device, checked before it goes there: afterwards the host would wait for each check."""
        assert self._mechanism is not None
        model, loss = self._mechanism.model, self._mechanism.per_sample_loss
        part = as_unit_batch(micro_batch)
        if isinstance(loss, PerSampleLoss):
            part = part.map(partial(loss.checked, model))
        return part.map(self._prepare_inputs)

    def _prepare_input(self, data: Any) -> Any:
        """Trainer's way to the device, without a wait for each tensor of a batch."""
        return super()._prepare_input(sent(data, self.args.device) if isinstance(data, Tensor) else data)

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
            "`hyperparameter_search` cannot be combined with privacy: every trial spends budget, as does choosing"
            " among them. Tune on public data, or train each setting in its own output_dir and add them up"
            " (`hf-private compose`)."
        )
