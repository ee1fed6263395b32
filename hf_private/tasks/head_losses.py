"""The loss of each record from the logits of a head: language models, classifiers, spans, CTC. Pure functions."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .heads import IGNORE_INDEX

SINGLE_LABEL = "single_label_classification"


def _float(logits: Tensor) -> Tensor:
    """Cast half precision to float32, as Transformers does; float64 stays."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of each position: logits (..., V), labels (...) -> (...), 0 where the label does not count.

    Same values as torch's, but its backward pass allocates one tensor of the logits' size, not two. With a large
    vocabulary those tensors are the peak of a step's memory.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        p = logits.softmax(-1)
        counts = labels != IGNORE_INDEX
        index = labels.where(counts, 0).unsqueeze(-1)
        ctx.smoothing = smoothing
        ctx.save_for_backward(p, index, counts)
        target = (1 - smoothing) * logits.gather(-1, index).squeeze(-1)
        if smoothing:
            target = target + smoothing * logits.mean(-1)
        # log(sum exp(logits)) - target, from the most likely class: its p is at least 1 / V, others may underflow.
        return ((logits.amax(-1) - target) - p.amax(-1).log()).where(counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override] # the decorator is untyped
        (g,) = grad_outputs
        p, index, counts = ctx.saved_tensors
        g = g.where(counts, 0).unsqueeze(-1)
        gradient = p * g
        if ctx.smoothing:
            gradient.sub_(g * (ctx.smoothing / p.shape[-1]))
        return gradient.scatter_add_(-1, index, (ctx.smoothing - 1) * g), None, None


def token_loss(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross entropy over each record's own labelled tokens; 0 for a record without any.

    Shapes: logits (B, T, V), labels (B, T) with -100 for tokens that do not count -> (B,).
    """
    losses = token_losses(logits, labels, label_smoothing)
    return losses.sum(-1) / (labels != IGNORE_INDEX).sum(-1).clamp(min=1)


def token_losses(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross entropy of each token; 0 where the label is -100. The logits are not shifted.

    Shapes: logits (B, T, V), labels (B, T) -> (B, T). The logits are never copied (unless they are half precision).
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"`labels` must have the shape {tuple(logits.shape[:-1])} of the logits, got {tuple(labels.shape)}. "
            "(Prompt tuning lengthens the logits; it is supported for causal language models.)"
        )
    return _CrossEntropy.apply(_float(logits), labels, label_smoothing)


def shifted(labels: Tensor) -> Tensor:
    """Labels (B, T) shifted one to the left: position t holds what its logits predict, the last is ignored."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def span_loss(start_logits: Tensor, end_logits: Tensor, start: Tensor, end: Tensor, lengths: Tensor) -> Tensor:
    """Mean of the start and the end cross entropy, each over the record's own tokens; 0 for a position outside them.

    In Transformers, padding tokens take part in the softmax, so a record's loss depends on the longest record of its
    batch. Here they are excluded. Shapes: logits (B, T), positions and lengths (B,) -> (B,).
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
    """The kind of classification, from the config and the dtype of the labels. The config is not changed."""
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


def ctc_loss(logits: Tensor, labels: Tensor, lengths: Tensor, config: Any) -> Tensor:
    """CTC loss of each record, divided by its number of labels if the config says "mean": (B, T, V) -> (B,).

    `lengths` (B,) are the records' frames; labels (B, L) are -100 beyond their end.
    """
    counted = labels >= 0
    targets = counted.sum(-1)
    losses = F.ctc_loss(
        _float(logits).log_softmax(-1).transpose(0, 1),
        labels.where(counted, 0),
        lengths,
        targets,
        blank=config.pad_token_id,
        reduction="none",
        zero_infinity=config.ctc_zero_infinity,
    )
    return losses / targets.clamp(min=1) if config.ctc_loss_reduction == "mean" else losses


def frames(base: Any, logits: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Frames (B,) of each record, from its mask of samples."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return torch.full((len(logits),), logits.shape[1], device=logits.device)
    return base._get_feat_extract_output_lengths(mask.sum(-1)).long().clamp(max=logits.shape[1])
