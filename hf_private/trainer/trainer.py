"""DPTrainer: Trainer with a private step. Loop, scheduler, callbacks, checkpoints and evaluation are Trainer's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments

from hf_private.config import DPConfig

from .private import PrivateMixin


class DPTrainer(PrivateMixin, Trainer):
    """Trainer whose model can be published: it fine-tunes with differential privacy, as `dp_config` says.

    Takes all that `Trainer` takes, and:

    Args:
        dp_config: Privacy settings, see `DPConfig`.
        per_sample_loss: fn(outputs, labels) -> (B,), a loss for each record, in place of the one that fits the
            model's head; `labels` is a dict if there are several. It replaces `compute_loss`.
        anchor_dataset: Public records that span the subspace of `DPConfig.anchors`.
        public_examples: A few public records of the form of `train_dataset`, for the self-check at the start of
            `train()`. By default it makes records up, which fails for what cannot be made up, such as file names.
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
        public_examples: Any = None,
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
            public_examples=public_examples,
            continues=continues,
            **{name: value for name, value in optional.items() if value not in (None, (None, None))},
            **kwargs,
        )
