"""Refuses models and batches in which a record's loss depends on the other records of its batch.

The bound on a record's influence holds only if its gradient is a function of this record alone. This module refuses
the known violations by name; the self-check finds the others.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .heads import IGNORE_INDEX, REMEDY, Head

PACKING_KEYS = frozenset(
    "seq_idx cu_seqlens cu_seq_lens cu_seq_lens_q cu_seq_lens_k cu_seqlens_q cu_seqlens_k "
    "max_length_q max_length_k max_seqlen max_seqlen_q max_seqlen_k".split()
)
MASKS = ("attention_mask", "decoder_attention_mask")


def refuse_model(base: nn.Module, own_loss: bool) -> None:
    """Refuse settings that make a model's rows depend on each other, or change its objective."""
    config = getattr(base, "config", None)
    name = type(base).__name__
    if own_loss and hasattr(base, "_loss_function"):  # where the setter of `model.loss_function` keeps it
        raise ValueError(f"`model.loss_function` must not be replaced, got a replaced one ({name}). {REMEDY}")
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"`output_router_logits` must be False, got True ({name}). The load-balancing loss couples all records of "
            "a batch, so it is never added. Set model.config.output_router_logits = False."
        )
    if getattr(config, "sparse_prediction", False):
        raise ValueError(
            f"`sparse_prediction` must be False, got True ({name}). It drops the record axis of the logits; load the "
            "model with sparse_prediction=False."
        )
    _refuse_outliers(base)
    if hasattr(config, "expert_capacity"):
        raise ValueError(
            f"`model` must route records independently, got {name} with expert_capacity={config.expert_capacity}: "
            "experts drop tokens once other records have filled them. Use a model without expert capacity."
        )


def refuse_adapters(model: nn.Module) -> None:
    """Refuse PEFT adapters whose objective is more than the loss of the records."""
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind == "ADALORA" and config.orth_reg_weight > 0:
            raise ValueError(
                f"`orth_reg_weight` must be 0 for the AdaLoRA adapter {name!r}, got {config.orth_reg_weight}: PEFT"
                " adds this regulariser to the model's own loss, which private training does not use. Set"
                " AdaLoraConfig(orth_reg_weight=0.0), or use LoRA."
            )


def _refuse_outliers(base: nn.Module) -> None:
    """LLM.int8 picks the columns that it keeps in half precision over the whole batch, unless its threshold is 0."""
    settings = getattr(getattr(base, "config", None), "quantization_config", None)
    if isinstance(settings, Mapping):
        found = [settings.get("load_in_8bit") and settings.get("llm_int8_threshold", 6.0)]
    else:
        found = [getattr(settings, "load_in_8bit", False) and getattr(settings, "llm_int8_threshold", 6.0)]
    for module in base.modules():
        named = any(parent.__name__ == "Linear8bitLt" for parent in type(module).__mro__)
        if named and not hasattr(module, "base_layer"):  # PEFT's layer around it has the same name
            found.append(getattr(getattr(module, "state", None), "threshold", 6.0))
    threshold = max(float(value or 0.0) for value in found)
    if threshold > 0:
        raise ValueError(
            f"`llm_int8_threshold` must be 0, got {threshold}: LLM.int8 chooses outlier columns over the whole batch,"
            " so a record's gradient depends on the other records. Load the model with"
            " BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or in 4 bits."
        )


def rope_limit(config: Any) -> int | None:
    """Number of tokens beyond which the longest record of a batch changes the positions of the others, or None.

    Rotary embeddings of the kinds "dynamic" and "longrope" choose their frequencies by the largest position in a
    batch once it exceeds the pretraining length ("dynamic" also keeps them for later batches).
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = [kind for kind in found.values() if isinstance(kind, Mapping)]
    limits = []
    for rope in by_layer or [found]:
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if "dynamic" in kind or kind == "longrope":
            own = rope.get("original_max_position_embeddings"), getattr(config, "max_position_embeddings", None)
            limits.append(min((length for length in own if length), default=0))
    return min(limits, default=None)


def refuse_batch(base: nn.Module, head: Head | None, inputs: dict[str, Any], labels: dict[str, Tensor]) -> None:
    """Refuse batches whose rows are not records, or in which a record's loss depends on its neighbours' lengths."""
    packed = sorted(PACKING_KEYS & inputs.keys())
    if packed:
        raise ValueError(f"`batch` must hold one record per row, got packed sequences ({packed}). Pad instead.")
    if inputs.get("output_router_logits"):
        raise ValueError("`output_router_logits` must be False, got True in the batch: that loss couples all records.")
    config = getattr(base, "config", None)
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    for name in MASKS:
        _refuse_left_padding(name, inputs.get(name), ids if name == "attention_mask" else None)
    real = None if mask is None else mask != 0
    if real is not None:
        _refuse_blind_padding(base, real)

    positions, limit = inputs.get("position_ids"), rope_limit(config)
    if limit is not None:
        embedded = inputs.get("inputs_embeds")
        length = 0 if embedded is None else embedded.shape[-2]
        length = length if ids is None else ids.shape[-1]
        length = length if positions is None else int(positions.max()) + 1
        if length > limit:
            raise ValueError(
                f"`input_ids` must have at most {limit} tokens for {type(base).__name__}, got {length}: beyond that,"
                " its rotary embeddings depend on the longest record of a batch. Truncate records to that length."
            )
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


def empty_rows(inputs: Mapping[str, Any]) -> Tensor | None:
    """Which records (B,) have a mask without any 1; None if the batch has no masks.

    Such a record attends to all of its padding (eager attention) or to nothing (NaN), so it depends on the longest
    record of its batch. Its loss is 0.
    """
    masks = [inputs[name] for name in MASKS if isinstance(inputs.get(name), Tensor)]
    empty = [(mask == 0).all(-1).reshape(len(mask), -1).any(1) for mask in masks if mask.ndim > 1]
    return torch.stack(empty).any(0) if empty else None


def with_one_token(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with a 1 at the start of each empty mask, so that the forward pass stays finite."""
    changed = dict(inputs)
    for name in MASKS:
        mask = changed.get(name)
        if isinstance(mask, Tensor) and mask.ndim > 1 and mask.shape[-1]:
            changed[name] = mask.clone()
            changed[name][..., 0] = torch.where((mask == 0).all(-1), 1, mask[..., 0])
    return changed


def _refuse_blind_padding(base: nn.Module, real: Tensor) -> None:
    """Padding beyond an attention window sees nothing. In float64, eager attention makes NaN of this row, and the next
    layer or the backward pass spreads it to the record: its gradient is removed if a neighbour is long enough."""
    config: Any = getattr(base, "config", None)
    if getattr(base, "dtype", None) is not torch.float64 or config is None:
        return
    config = config.get_text_config()
    both_sides = getattr(config, "local_attention", None)  # ModernBERT
    window = both_sides // 2 + 1 if both_sides else getattr(config, "sliding_window", None)
    if not isinstance(window, int) or getattr(config, "_attn_implementation", None) != "eager":
        return
    blind = real.shape[-1] - real.sum(-1).amin().clamp(min=1) >= window
    if bool(blind):
        raise ValueError(
            f"`attention_mask` must leave less padding than the attention window ({window} tokens) in float64 with"
            f" eager attention, got a row with more ({type(base).__name__}): its loss or gradient would be NaN because"
            " of its neighbours. Load the model with attn_implementation='sdpa', or in float32."
        )


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
