"""Per-record losses, computed from logits. The mechanism differentiates these instead of the model's own loss.

A model's own loss averages over the batch (or over all its tokens), so the gradient of one record depends on the
labels and lengths of its neighbours, and no bound on a record's influence holds. Here the model runs without labels,
and the loss of record i is a function of record i alone: the mean over its own labelled tokens, or its one prediction.

Load-balancing losses of mixture-of-experts models are never added: they couple all tokens of a batch.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel, PeftType
from torch import Tensor, nn

from .head_losses import (
    SINGLE_LABEL,
    classification_loss,
    ctc_loss,
    frames,
    problem_type,
    shifted,
    span_loss,
    token_loss,
)
from .heads import IGNORE_INDEX, REMEDY, Head, base_model, head_of
from .independence import empty_rows, refuse_adapters, refuse_batch, refuse_model, with_one_token
from .limits import Limit, limits_of, problems

LABEL_NAMES = ("labels", "label", "label_ids", "shift_labels", "start_positions", "end_positions")


def _batch_limits(base: Any, head: Head | None) -> dict[str, Limit]:
    """Limits of a padded batch: an empty mask is allowed in it, a row has the length of the longest record."""
    return {name: limit._replace(aligned=False) for name, limit in limits_of(base, head).items()}


class CheckedBatch(dict):
    """A batch that `PerSampleLoss.checked` has let pass. It stays one when it is moved to another device."""


class PerSampleLoss:
    """The loss of every record of a batch, for the head of a model.

    Guarantee: record i's loss does not depend on the labels, the length or the content of other records, provided that
    the model's forward keeps rows independent. Batches that break this (packing, left padding, padding without a mask
    or with labels) are refused. The model's own loss is never computed, and its config is never changed.

    Args:
        model: The unwrapped model, possibly a PEFT model. Its head determines the loss.
        custom: fn(outputs, labels) -> (B,) instead of the head's loss. `labels` is the tensor popped from the batch,
            or a dict of tensors if the batch has several of `LABEL_NAMES`. It must not mix records.
        label_smoothing: Like `TrainingArguments.label_smoothing_factor`, per record.
        label_names: `TrainingArguments.label_names`: further names of labels, for `custom`.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(
        ...     hidden_size=8, num_attention_heads=1, num_hidden_layers=1, intermediate_size=8, vocab_size=9
        ... )
        >>> model = BertForSequenceClassification(config)
        >>> batch = {"input_ids": torch.tensor([[1, 2], [3, 4], [5, 6]]), "labels": torch.tensor([0, 1, 1])}
        >>> PerSampleLoss(model)(model, batch).shape
        torch.Size([3])
    """

    def __init__(
        self,
        model: nn.Module,
        custom: Callable[[Any, Tensor | dict[str, Tensor]], Tensor] | None = None,
        label_smoothing: float = 0.0,
        label_names: Sequence[str] | None = None,
    ) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"`label_smoothing` must be >= 0 and < 1, got {label_smoothing}.")
        if custom is not None and label_smoothing > 0:
            raise ValueError(f"`label_smoothing` must be 0 with `per_sample_loss`, got {label_smoothing}.")
        self.custom = custom
        self.label_names = tuple(dict.fromkeys((*LABEL_NAMES, *(label_names or ()))))
        self.label_smoothing = label_smoothing
        self.head = head_of(model) if custom is None else None
        if self.head in (Head.QUESTION_ANSWERING, Head.CTC) and label_smoothing > 0:
            raise ValueError(f"`label_smoothing` must be 0 for {self.head}, got {label_smoothing}.")
        base = base_model(model)
        refuse_model(base, own_loss=custom is None)
        refuse_adapters(model)
        self.prompt = prompt_length(model)
        self._options = {"return_dict": True} if self.head or takes(base, "return_dict") else {}
        own = "use_cache" in inspect.signature(base.forward).parameters
        # Classifiers of encoder-decoder models pass their own value on, beside their keywords (T5Gemma).
        if own or (takes(base, "use_cache") and not getattr(base.config, "is_encoder_decoder", False)):
            self._options["use_cache"] = False

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Run the model on the batch without its labels -> (B,) losses. The batch is not changed."""
        inputs, labels = self._divided(self.checked(model, batch))
        base = base_model(model)
        empty = empty_rows(inputs)
        if empty is not None:
            inputs = with_one_token(inputs)
        try:
            losses = self._forward(model, base, inputs, labels)
        except (IndexError, RuntimeError, TypeError, ValueError):
            for name, text in problems({**inputs, **labels}, _batch_limits(base, self.head)):
                # torch's own message may quote a label, and it does not name the field
                raise ValueError(f"`{name}` {text}, in a batch of training records.") from None
            raise
        return losses if empty is None else losses.where(~empty, 0)

    def checked(self, model: nn.Module, batch: Mapping[str, Any]) -> CheckedBatch:
        """Refuse a batch whose records depend on each other, or return it.

        Call it while the batch is in the memory of the host: on another device, the host would have to wait for each
        answer. A `CheckedBatch` is not checked again.
        """
        if isinstance(batch, CheckedBatch):
            return batch
        inputs, labels = self._divided(batch)
        refuse_batch(base_model(model), self.head, inputs, labels)
        return CheckedBatch(batch)

    def _divided(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Inputs and labels."""
        labels = {name: batch[name] for name in self.label_names if batch.get(name) is not None}
        if not labels:
            raise ValueError(f"`batch` must hold labels ({', '.join(self.label_names)}), got only {sorted(batch)}.")
        return {name: value for name, value in batch.items() if name not in self.label_names}, labels

    def _forward(self, model: nn.Module, base: Any, inputs: dict[str, Any], labels: dict[str, Tensor]) -> Tensor:
        """The losses (B,), checked for their shape."""
        target = self._target(labels)
        sequence = labels.get("labels") if self.head is None else None
        if self.head is Head.SEQ2SEQ_LM:
            assert isinstance(target, Tensor)
            sequence = target
        if sequence is not None and "decoder_input_ids" not in inputs:
            inputs |= _decoder_inputs(base, sequence, required=self.head is Head.SEQ2SEQ_LM)
        outputs = model(**inputs, **self._options)
        losses = self.custom(outputs, target) if self.custom else self._losses(base, outputs, target, inputs)
        rows = len(inputs.get(getattr(base, "main_input_name", "input_ids"), next(iter(labels.values()))))
        if not isinstance(losses, Tensor) or losses.shape != (rows,):
            got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(f"The loss must be a tensor of shape ({rows},), one per record, got {got}. {REMEDY}")
        return losses

    def _target(self, labels: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """The label tensor that the head needs. Several labels (a span, or those of a custom loss) stay a dict."""
        if self.head is None:
            return next(iter(labels.values())) if len(labels) == 1 else labels
        if self.head is Head.QUESTION_ANSWERING:
            if not {"start_positions", "end_positions"} <= labels.keys():
                raise ValueError(f"`batch` must hold start_positions and end_positions, got {sorted(labels)}.")
            return labels
        if self.head is Head.CAUSAL_LM and "shift_labels" in labels:
            return F.pad(labels["shift_labels"], (self.prompt, 0), value=IGNORE_INDEX)
        names = [name for name in ("labels", "label", "label_ids") if name in labels]
        if len(names) != 1:
            raise ValueError(f"`batch` must hold `labels` once for {self.head}, got {sorted(labels)}.")
        if self.head is not Head.CAUSAL_LM:
            return labels[names[0]]
        return shifted(
            F.pad(labels[names[0]], (self.prompt, 0), value=IGNORE_INDEX) if self.prompt else labels[names[0]]
        )

    def _losses(self, base: nn.Module, outputs: Any, target: Any, inputs: dict[str, Any]) -> Tensor:
        if self.head is Head.QUESTION_ANSWERING:
            mask = inputs.get("attention_mask")
            mask = torch.ones_like(outputs.start_logits) if mask is None else mask
            positions = target["start_positions"], target["end_positions"]
            return span_loss(outputs.start_logits, outputs.end_logits, *positions, lengths=(mask != 0).sum(-1))
        if self.head in (Head.CLASSIFICATION, Head.MULTIPLE_CHOICE):
            kind = problem_type(base.config, target) if self.head is Head.CLASSIFICATION else SINGLE_LABEL
            return classification_loss(outputs.logits, target, kind, self.label_smoothing)
        if self.head is Head.CTC:
            return ctc_loss(outputs.logits, target, frames(base, outputs.logits, inputs), base.config)
        return token_loss(outputs.logits, target, self.label_smoothing)


def takes(base: nn.Module, name: str) -> bool:
    """Whether `forward` takes this keyword, itself or through the base model that it passes its keywords to."""
    parameters = inspect.signature(base.forward).parameters
    if name in parameters:
        return True
    inner = getattr(base, "base_model", base)
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return passes_on and inner is not base and name in inspect.signature(inner.forward).parameters


def _decoder_inputs(base: Any, labels: Tensor, required: bool) -> dict[str, Tensor]:
    """The decoder inputs that the model makes from labels when it gets them."""
    prepare = getattr(base, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        return {"decoder_input_ids": prepare(labels=labels)}
    if not required:
        return {}
    modules = [sys.modules[parent.__module__] for parent in type(base).__mro__ if parent.__module__ in sys.modules]
    shift = next((m.shift_tokens_right for m in modules if hasattr(m, "shift_tokens_right")), None)
    if shift is None or len(inspect.signature(shift).parameters) != 3:
        raise ValueError(
            f"`batch` must hold `decoder_input_ids` for {type(base).__name__}, which has no "
            "`prepare_decoder_input_ids_from_labels`. Let the data collator add them."
        )
    config, text = base.config, base.config.get_text_config(decoder=True)  # a model of parts may name them in either
    special = [getattr(config, n, getattr(text, n, None)) for n in ("pad_token_id", "decoder_start_token_id")]
    return {"decoder_input_ids": shift(labels, *special)}


def prompt_length(model: nn.Module) -> int:
    """How many learned tokens PEFT puts in front of each record, and so in front of its logits.

    >>> prompt_length(nn.Linear(2, 2))
    0
    """
    config: Any = getattr(model, "active_peft_config", None) if isinstance(model, PeftModel) else None
    in_front = getattr(config, "peft_type", None) in (PeftType.PROMPT_TUNING, PeftType.P_TUNING)
    return config.num_virtual_tokens if in_front else 0
