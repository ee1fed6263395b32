"""Per-record losses from logits: what the mechanism differentiates instead of the model's own loss.

A model's own loss averages over the batch (or over all tokens of the batch), so the gradient of one record would move
with the labels and lengths of its neighbours and no bound on a record's influence would hold. Here labels are taken
out of the batch, the model runs without them, and record i's loss is a function of record i alone: the mean over its
own labelled tokens, or its one prediction.

Not part of any loss here: load-balancing losses of mixture-of-experts models, which couple all tokens of a batch.
"""

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto

IGNORE_INDEX = -100
SINGLE_LABEL = "single_label_classification"
LABEL_NAMES = ("labels", "label", "label_ids", "shift_labels", "start_positions", "end_positions")
PACKING_KEYS = frozenset(
    "seq_idx cu_seqlens cu_seq_lens cu_seq_lens_q cu_seq_lens_k cu_seqlens_q cu_seqlens_k "
    "max_length_q max_length_k max_seqlen max_seqlen_q max_seqlen_k".split()
)
REMEDY = "Pass `per_sample_loss=fn` with fn(outputs, labels) -> tensor of shape (batch_size,), one loss per record."


class Head(StrEnum):
    """What a model predicts, hence which loss is right. Sequences and images share `CLASSIFICATION`."""

    SEQ2SEQ_LM = "seq2seq language modeling"
    MASKED_LM = "masked language modeling"
    CAUSAL_LM = "causal language modeling"
    CLASSIFICATION = "classification"
    TOKEN_CLASSIFICATION = "token classification"
    QUESTION_ANSWERING = "question answering"
    MULTIPLE_CHOICE = "multiple choice"


def _class_names(*mappings: Mapping[str, str | tuple[str, ...]]) -> frozenset[str]:
    values = [value for mapping in mappings for value in mapping.values()]
    return frozenset(name for value in values for name in ([value] if isinstance(value, str) else value))


# The first match counts: BART is listed both as seq2seq and as masked LM, and its loss is the seq2seq one.
HEAD_CLASSES: dict[Head, frozenset[str]] = {
    Head.SEQ2SEQ_LM: _class_names(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    Head.MASKED_LM: _class_names(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    Head.CAUSAL_LM: _class_names(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    Head.CLASSIFICATION: _class_names(
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    ),
    Head.TOKEN_CLASSIFICATION: _class_names(auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
    Head.QUESTION_ANSWERING: _class_names(auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES),
    Head.MULTIPLE_CHOICE: _class_names(auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES),
}

# Listed by Transformers as language models, but trained on another objective: labels that the model does not shift
# (decoders of seq2seq families, XLM, XLNet, CPM-Ant), n-gram losses (ProphetNet), codebooks (MusicGen).
OTHER_OBJECTIVE = frozenset(
    "BartForCausalLM BigBirdPegasusForCausalLM BlenderbotForCausalLM BlenderbotSmallForCausalLM CpmAntForCausalLM "
    "MBartForCausalLM MarianForCausalLM MusicgenForCausalLM MusicgenMelodyForCausalLM MvpForCausalLM "
    "PLBartForCausalLM PegasusForCausalLM ProphetNetForCausalLM ProphetNetForConditionalGeneration TrOCRForCausalLM "
    "WhisperForCausalLM XLMWithLMHeadModel XLNetLMHeadModel".split()
)


def base_model(model: nn.Module) -> nn.Module:
    """The Transformers model inside a PEFT wrapper; any other model as it is."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def head_of(model: nn.Module) -> Head:
    """The head of a model, by its class or the nearest parent class that Transformers lists.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> head_of(GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=1, n_layer=1, vocab_size=9))).value
        'causal language modeling'
    """
    base = base_model(model)
    for parent in type(base).__mro__:
        if parent.__name__ in OTHER_OBJECTIVE:
            break
        for head, names in HEAD_CLASSES.items():
            if parent.__name__ in names:
                if head is Head.SEQ2SEQ_LM and not base.config.is_encoder_decoder:
                    break  # speech and multimodal decoders are listed here too
                return head
    raise ValueError(
        f"`model` must have one of the heads [{', '.join(HEAD_CLASSES)}], got {type(base).__name__}, whose loss per "
        f"record is not known. {REMEDY}"
    )


def _float(logits: Tensor) -> Tensor:
    """Half precision is lifted to float32 as Transformers does; float64 stays."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def token_loss(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross entropy over each record's own labelled tokens; 0 for a record without any.

    Shapes: logits (B, T, V), labels (B, T) with -100 for tokens that do not count -> (B,). The logits are only viewed,
    never shifted or copied (unless they are half precision).
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"`labels` must have the shape {tuple(logits.shape[:-1])} of the logits, got {tuple(labels.shape)}. "
            "(Prompt tuning lengthens the logits and is not supported; LoRA is.)"
        )
    losses = F.cross_entropy(
        _float(logits).flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return losses.view_as(labels).sum(-1) / (labels != IGNORE_INDEX).sum(-1).clamp(min=1)


def shifted(labels: Tensor) -> Tensor:
    """Labels (B, T) moved one to the left: position t holds what its logits predict, the last one nothing."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def span_loss(start_logits: Tensor, end_logits: Tensor, start: Tensor, end: Tensor, lengths: Tensor) -> Tensor:
    """Mean of the start and the end cross entropy, each over the record's own tokens; 0 for a position outside them.

    Transformers lets padding tokens compete in the softmax, which would tie a record's loss to the longest record of
    its batch; here they cannot be chosen. Shapes: logits (B, T), positions and lengths (B,) -> (B,).
    """
    padding = torch.arange(start_logits.shape[1], device=start_logits.device) >= lengths[:, None]
    losses = []
    for logits, position in ((start_logits, start), (end_logits, end)):
        position = position.reshape(-1).clamp(min=0)
        position = position.masked_fill(position >= lengths, IGNORE_INDEX)
        logits = _float(logits).masked_fill(padding, -torch.inf)
        losses.append(F.cross_entropy(logits, position, ignore_index=IGNORE_INDEX, reduction="none"))
    return (losses[0] + losses[1]) / 2


def problem_type(config: Any, labels: Tensor) -> str:
    """The kind of classification, from the config and the dtype of the labels; the config is left as it is."""
    if config.problem_type is not None:
        return config.problem_type
    if config.num_labels == 1:
        return "regression"
    whole = labels.dtype in (torch.int64, torch.int32)
    return SINGLE_LABEL if whole else "multi_label_classification"


def classification_loss(logits: Tensor, labels: Tensor, kind: str, label_smoothing: float = 0.0) -> Tensor:
    """Cross entropy, mean squared error or mean binary cross entropy of each record: logits (B, K) -> (B,)."""
    logits = _float(logits)
    if kind == SINGLE_LABEL:
        if labels.numel() != len(logits):
            raise ValueError(
                f"`labels` must hold one class per record, shape ({len(logits)},), got {tuple(labels.shape)}. For "
                "several classes per record give floats and config.problem_type='multi_label_classification'."
            )
        labels = labels.reshape(-1).long()
        return F.cross_entropy(
            logits, labels, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=label_smoothing
        )
    if label_smoothing > 0:
        raise ValueError(f"`label_smoothing` must be 0 for {kind}, got {label_smoothing}: it needs exclusive classes.")
    if labels.numel() != logits.numel():
        raise ValueError(f"`labels` must have the shape {tuple(logits.shape)} for {kind}, got {tuple(labels.shape)}.")
    labels = labels.reshape(logits.shape).to(logits.dtype)
    if kind == "regression":
        return F.mse_loss(logits, labels, reduction="none").mean(-1)
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(-1)


class PerSampleLoss:
    """The loss of every record of a batch, for the head of a model.

    Guarantee: record i's loss does not depend on the labels, the length or the content of other records, as far as the
    model's forward keeps rows apart. Batches for which it would (packing, left padding, padding without a mask or with
    labels) are refused. The model's own loss is never computed and its config is never written.

    Args:
        model: the model, unwrapped (PEFT models are looked into); decides the loss by its head.
        custom: fn(outputs, labels) -> (B,) instead of the head's loss. `labels` is the tensor popped from the batch,
            or a dict of tensors if the batch has several of `LABEL_NAMES`. It must not mix records.
        label_smoothing: as `TrainingArguments.label_smoothing_factor`, per record.

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
    ) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"`label_smoothing` must be >= 0 and < 1, got {label_smoothing}.")
        if custom is not None and label_smoothing > 0:
            raise ValueError(f"`label_smoothing` must be 0 with `per_sample_loss`, got {label_smoothing}.")
        self.custom = custom
        self.label_smoothing = label_smoothing
        self.head = head_of(model) if custom is None else None
        if self.head is Head.QUESTION_ANSWERING and label_smoothing > 0:
            raise ValueError(f"`label_smoothing` must be 0 for question answering, got {label_smoothing}.")
        base = base_model(model)
        _refuse_model(base, own_loss=custom is None)
        self._options = {"return_dict": True} if self.head or takes(base, "return_dict") else {}
        if takes(base, "use_cache"):
            self._options["use_cache"] = False

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Runs the model on the batch without its labels -> (B,) losses. The batch is not changed."""
        labels = {name: batch[name] for name in LABEL_NAMES if batch.get(name) is not None}
        inputs = {name: value for name, value in batch.items() if name not in LABEL_NAMES}
        if not labels:
            raise ValueError(f"`batch` must hold labels ({', '.join(LABEL_NAMES)}), got only {sorted(batch)}.")
        base = base_model(model)
        _refuse_batch(base, self.head, inputs, labels)
        target = self._target(labels)
        sequence = target if self.head is Head.SEQ2SEQ_LM else labels.get("labels") if self.head is None else None
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
        """The label tensor that the head needs; several (a span, or what a custom loss gets) stay a dict."""
        if self.head is None:
            return next(iter(labels.values())) if len(labels) == 1 else labels
        if self.head is Head.QUESTION_ANSWERING:
            if not {"start_positions", "end_positions"} <= labels.keys():
                raise ValueError(f"`batch` must hold start_positions and end_positions, got {sorted(labels)}.")
            return labels
        if self.head is Head.CAUSAL_LM and "shift_labels" in labels:
            return labels["shift_labels"]
        names = [name for name in ("labels", "label", "label_ids") if name in labels]
        if len(names) != 1:
            raise ValueError(f"`batch` must hold `labels` once for {self.head}, got {sorted(labels)}.")
        return shifted(labels[names[0]]) if self.head is Head.CAUSAL_LM else labels[names[0]]

    def _losses(self, base: nn.Module, outputs: Any, target: Any, inputs: dict[str, Any]) -> Tensor:
        if self.head is Head.QUESTION_ANSWERING:
            mask = inputs.get("attention_mask")
            mask = torch.ones_like(outputs.start_logits) if mask is None else mask
            positions = target["start_positions"], target["end_positions"]
            return span_loss(outputs.start_logits, outputs.end_logits, *positions, lengths=(mask != 0).sum(-1))
        if self.head in (Head.CLASSIFICATION, Head.MULTIPLE_CHOICE):
            kind = problem_type(base.config, target) if self.head is Head.CLASSIFICATION else SINGLE_LABEL
            return classification_loss(outputs.logits, target, kind, self.label_smoothing)
        return token_loss(outputs.logits, target, self.label_smoothing)


def takes(base: nn.Module, name: str) -> bool:
    """Whether a forward takes this keyword by name, itself or through the trunk it hands its keywords to."""
    parameters = inspect.signature(base.forward).parameters
    if name in parameters:
        return True
    trunk = getattr(base, "base_model", base)
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return hands_on and trunk is not base and name in inspect.signature(trunk.forward).parameters


def _decoder_inputs(base: nn.Module, labels: Tensor, required: bool) -> dict[str, Tensor]:
    """The decoder inputs that the model would have made from the labels, had it been given them."""
    prepare = getattr(base, "prepare_decoder_input_ids_from_labels", None)
    if prepare is None and required:
        raise ValueError(
            f"`batch` must hold `decoder_input_ids` for {type(base).__name__}, which has no "
            "`prepare_decoder_input_ids_from_labels`. Let the data collator add them."
        )
    return {} if prepare is None else {"decoder_input_ids": prepare(labels=labels)}


def _refuse_model(base: nn.Module, own_loss: bool) -> None:
    """Settings under which a model's rows are not independent, or its objective is not the head's."""
    config = getattr(base, "config", None)
    name = type(base).__name__
    if own_loss and hasattr(base, "_loss_function"):  # where the setter of `model.loss_function` keeps it
        raise ValueError(f"`model.loss_function` must not be replaced, got a replaced one ({name}). {REMEDY}")
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"`output_router_logits` must be False, got True ({name}). The load-balancing loss couples all records of "
            "a batch and is never added; set model.config.output_router_logits = False to say that you know."
        )
    if getattr(config, "sparse_prediction", False):
        raise ValueError(
            f"`sparse_prediction` must be False, got True ({name}). It drops the record axis of the logits; load the "
            "model with sparse_prediction=False."
        )
    if hasattr(config, "expert_capacity"):
        raise ValueError(
            f"`model` must route records independently, got {name} with expert_capacity={config.expert_capacity}: "
            "experts drop tokens once other records have filled them. Use a model without expert capacity."
        )


def _refuse_batch(base: nn.Module, head: Head | None, inputs: dict[str, Any], labels: dict[str, Tensor]) -> None:
    """Batches in which a row is not a record, or in which a record's loss moves with its neighbours' lengths."""
    packed = sorted(PACKING_KEYS & inputs.keys())
    if packed:
        raise ValueError(f"`batch` must hold one record per row, got packed sequences ({packed}). Pad instead.")
    if inputs.get("output_router_logits"):
        raise ValueError("`output_router_logits` must be False, got True in the batch: that loss couples all records.")
    config = getattr(base, "config", None)
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    for name in ("attention_mask", "decoder_attention_mask"):
        _refuse_left_padding(name, inputs.get(name), ids if name == "attention_mask" else None)
    real = None if mask is None else mask != 0

    positions = inputs.get("position_ids")
    if positions is not None:
        restarts = positions[..., 1:] <= positions[..., :-1]
        if bool((restarts if real is None else restarts & real[..., 1:]).any()):
            raise ValueError("`position_ids` must rise along a row, got a restart: packed sequences. Pad instead.")

    pad, eos = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
    ambiguous = pad is None or pad in (eos, getattr(config, "bos_token_id", None))
    if mask is None and ids is not None and not ambiguous:
        # Causal attention never sees padding on the right; any other attention does.
        edge = ids[..., 0] if head is Head.CAUSAL_LM else ids[..., [0, -1]]
        if bool((edge == pad).any()):
            raise ValueError("`attention_mask` must be given for a padded batch, got none: padding would be attended.")

    tokens = labels.get("shift_labels", next(iter(labels.values())))
    if head in (Head.CAUSAL_LM, Head.MASKED_LM, Head.TOKEN_CLASSIFICATION) and real is not None:
        if tokens.shape == real.shape and bool(((tokens != IGNORE_INDEX) & ~real).any()):
            raise ValueError("`labels` must be -100 at padding tokens, got others: a record would count its padding.")
    if head is Head.SEQ2SEQ_LM:
        counted = tokens != IGNORE_INDEX
        if "decoder_input_ids" not in inputs and bool((counted[:, 1:] & ~counted[:, :1]).any()):
            raise ValueError("`labels` must be padded on the right, got -100 at the start. Set padding_side='right'.")
        if pad is not None and pad != eos and bool((tokens[:, -1] == pad).any()):
            raise ValueError(f"`labels` must be padded with -100, got pad_token_id={pad}: padding would be counted.")


def _refuse_left_padding(name: str, mask: Any, ids: Tensor | None) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or (mask.shape != ids.shape if ids is not None else mask.ndim != 2):
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"`{name}` must have one entry per token, got {got}. Other masks may hide packed records.")
    real = mask != 0
    if bool((real[..., 1:] & ~real[..., :-1]).any()):
        raise ValueError(
            f"`{name}` must be padded on the right, got a 0 before a 1. Left padding shifts a record's positions by "
            "the length of its neighbours; train with tokenizer.padding_side = 'right' (generation may keep 'left')."
        )
