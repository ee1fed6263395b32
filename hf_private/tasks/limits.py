"""Limits of each input field of a model: lengths, token ids, labels.

A value outside these limits makes a step fail after it was charged. So they are checked before the first charge for
the whole dataset (`dataset_check.py`), and used to explain a failure inside a step. Messages name the field and the
limit, never the value.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from .heads import IGNORE_INDEX, Head, base_model

TOKEN_LEVEL = (Head.CAUSAL_LM, Head.MASKED_LM, Head.TOKEN_CLASSIFICATION)
CLASS_LABELS = ("labels", "label", "label_ids")


class Limit(NamedTuple):
    """Limits of one field of a record."""

    below: int | None = None  # whole numbers are at least 0 and below it
    below_name: str = ""  # where `below` comes from
    longest: int | None = None  # most elements
    empty: bool = True  # whether it may have no element
    ignored: bool = False  # whether -100 is allowed
    remedy: str = ""
    aligned: bool = False  # whether it has one element for each of `input_ids`

    def problem(self, value: Any, tokens: int | None = None) -> str | None:
        """What is wrong with a value, without quoting it; None if it is valid.

        `tokens` is the number of the record's `input_ids`.

        >>> Limit(below=3, below_name="`num_labels`").problem(7)
        'must be at least 0 and below 3 (`num_labels`), got a value outside'
        """
        if value is None:
            return "must not be missing, got None"
        if _holds_text(value):
            return "must hold numbers, got text"
        array = _flat(value)
        if array is None:
            return "must hold numbers, got something else"
        if self.longest is not None and _width(value) > self.longest:
            return f"must have at most {self.longest} elements (`max_position_embeddings`), got more"
        if not self.empty and not array.size:
            return "must have at least 1 element, got none"
        if self.aligned and tokens is not None and _width(value) != tokens:
            return "must have one element for each of `input_ids`, got another number"
        if self.below is not None and array.dtype.kind in "iub":
            fits = (array >= 0) & (array < self.below)
            if self.ignored:
                fits |= array == IGNORE_INDEX
            if not fits.all():
                also = f", or {IGNORE_INDEX}" if self.ignored else ""
                return f"must be at least 0 and below {self.below} ({self.below_name}){also}, got a value outside"
        return None


def limits_of(model: nn.Module, head: Head | None) -> dict[str, Limit]:
    """The limits of a model's fields; those of labels only where the head is known."""
    base = base_model(model)
    config = getattr(base, "config", None)
    if config is None:
        return {}
    limits: dict[str, Limit] = {}
    try:
        vocabulary = vocabulary_of(base)
    except (AttributeError, NotImplementedError):  # images, sound
        vocabulary = None
    longest = _most_tokens(base)
    ids = Limit(
        vocabulary, "`vocab_size`", longest, empty=False, remedy="Truncate to it, or use the model's tokenizer."
    )
    if vocabulary is not None:
        limits["input_ids"] = ids
        limits["decoder_input_ids"] = ids
        limits["attention_mask"] = Limit(aligned=True)
        segments = getattr(config.get_text_config(), "type_vocab_size", None) or 0
        limits["token_type_ids"] = Limit(segments or None, "`type_vocab_size`", aligned=True)
    return limits | _label_limits(config, head, ids)


def vocabulary_of(base: Any) -> int:
    """Number of ids that are valid both in the (possibly resized) embedding and in the logits."""
    sizes = [len(layer.weight) for layer in (base.get_input_embeddings(), base.get_output_embeddings()) if layer]
    return min(sizes) if sizes else base.config.get_text_config().vocab_size


def positions_of(model: nn.Module) -> int:
    """The most tokens that a row may have. RoBERTa numbers positions after its padding index, so it has fewer."""
    base = base_model(model)
    most = getattr(base.config.get_text_config(), "max_position_embeddings", None) or 0
    most = most if most > 0 else 2**31  # XLNet says -1 for no limit
    for name, module in base.named_modules():
        if (
            name.endswith("position_embeddings")
            and isinstance(module, nn.Embedding)
            and module.padding_idx is not None
        ):
            most = min(most, module.num_embeddings - module.padding_idx - 1)
    return most


def _label_limits(config: Any, head: Head | None, ids: Limit) -> dict[str, Limit]:
    limit = Limit()
    classes = getattr(config, "num_labels", None)
    if head is None:
        return {}
    if head in (Head.CAUSAL_LM, Head.MASKED_LM, Head.SEQ2SEQ_LM):
        limit = ids._replace(ignored=True, empty=True, aligned=head in TOKEN_LEVEL)
    elif head is Head.TOKEN_CLASSIFICATION:
        limit = Limit(classes, "`num_labels`", ignored=True, aligned=True)
    elif head is Head.CLASSIFICATION and config.problem_type != "regression" and classes != 1:
        limit = Limit(classes, "`num_labels`", ignored=True)
    limit = limit._replace(remedy="Map labels to whole numbers, as ClassLabel does." if not limit.aligned else "")
    spans = ("start_positions", "end_positions") if head is Head.QUESTION_ANSWERING else ()
    return dict.fromkeys((*CLASS_LABELS, *spans), limit)


def _most_tokens(base: Any) -> int | None:
    """The length of a table of positions; None for models that compute them (rotary, relative)."""
    tables = [
        name
        for name, module in base.named_modules()
        if isinstance(module, nn.Embedding) and any(part in name.rpartition(".")[2] for part in ("pos", "wpe"))
    ]
    most = positions_of(base)
    return most if tables and most < 2**31 else None


def problems(fields: Mapping[str, Any], limits: Mapping[str, Limit]) -> Iterable[tuple[str, str]]:
    """Fields that are outside their limits, and what is wrong with them."""
    ids = fields.get("input_ids")
    tokens = None if ids is None or _holds_text(ids) else _width(ids)
    for name, limit in limits.items():
        if name in fields:
            text = limit.problem(fields[name], tokens)
            if text is not None:
                yield name, text


def _holds_text(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_text(element) for element in value)
    return isinstance(value, (str, bytes))


def _flat(value: Any) -> np.ndarray | None:
    """All numbers of a value (N,), of any nesting; None if it holds anything else."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return (value.float() if value.is_floating_point() else value).numpy().ravel()
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)):
        parts = [_flat(part) for part in value]
        return None if any(part is None for part in parts) else np.concatenate([p for p in parts if p is not None])
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    if not array.size:
        array = array.astype(np.int64)
    return array.ravel() if array.dtype.kind in "iubf" else None


def _width(value: Any) -> int:
    """Size of the last axis, the longest part of a ragged list; 0 for a number."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return shape[-1] if len(shape) else 0
    if not isinstance(value, (list, tuple)):
        return 0
    if value and isinstance(value[0], (list, tuple)):
        return max(map(_width, value))
    return len(value)
