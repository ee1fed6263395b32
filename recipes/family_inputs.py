"""Records for any of the heads of `architectures.py`: ids, pixels or sound, whatever a model takes."""

import inspect
from typing import Any

import torch
from architectures import FIRST_WORD, VOCABULARY
from torch import Tensor, nn

SAMPLES = 4800  # of sound: the convolutions in front make a few dozen frames of it


class NoInputsError(RuntimeError):
    """No records can be made up for a model."""


def inputs_of(
    model: nn.Module, head: str, batch_size: int, length: int, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Random records without padding, all of one length."""
    generator = generator or torch.Generator().manual_seed(100 * batch_size + length)
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    config, dtype = base.config, next(base.parameters()).dtype
    takes = inspect.signature(base.forward).parameters
    batch: dict[str, Tensor] = {}
    if head == "image" or head == "image-text":
        batch |= images(base, batch_size, generator, dtype)
    if head in ("audio", "ctc", "speech"):
        batch |= sound(base, batch_size, length, generator, dtype)
    if head in ("classification", "masked-lm", "seq2seq-lm", "causal-lm", "image-text"):
        batch["input_ids"] = ids(config, batch_size, length, generator)
        if "attention_mask" in takes:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if head == "image-text":
            batch = with_image_tokens(base, batch)
        eos = getattr(config, "eos_token_id", None)
        if config.is_encoder_decoder and head == "classification" and isinstance(eos, int):
            batch["input_ids"][:, -1] = eos
    if "decoder_input_ids" in takes and head in ("seq2seq-lm", "speech", "image-text"):
        batch["decoder_input_ids"] = ids(config, batch_size, length, generator)
    return batch


def ids(config: Any, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
    """Ordinary tokens (N, T), none of them special."""
    text = config.get_text_config()
    vocabulary = min(getattr(text, "vocab_size", None) or VOCABULARY, VOCABULARY)
    return torch.randint(min(FIRST_WORD, vocabulary // 2), vocabulary, (batch_size, length), generator=generator)


def image_shape(config: Any) -> tuple[int, int, int]:
    """(channels, height, width)"""
    vision = next((c for c in (getattr(config, "vision_config", None), config) if hasattr(c, "image_size")), config)
    size = getattr(vision, "image_size", None) or 64
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return getattr(vision, "num_channels", None) or 3, height, width


def images(base: Any, batch_size: int, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """One image for each record, in the form that the model's processor would give it."""
    config = base.config
    inner = getattr(base, "model", base)
    features = getattr(inner, "get_image_features", None) or getattr(base, "get_image_features", None)
    takes = inspect.signature(features or base.forward).parameters
    shape = image_shape(config)
    if "image_grid_thw" in takes:  # patches in a row
        vision = getattr(config, "vision_config", None) or config.get_text_config()
        patch, channels = getattr(vision, "patch_size", 8), getattr(vision, "in_channels", shape[0])
        side = 2 * getattr(vision, "spatial_merge_size", 2)
        frames = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
        shape = (channels * frames * patch**2,)
        return {
            "pixel_values": torch.randn(batch_size, side**2, *shape, generator=generator).to(dtype),
            "image_grid_thw": torch.tensor([[1, side, side]]).expand(batch_size, 3).clone(),
        }
    sizes = {}
    if "image_sizes" in takes:
        sizes["image_sizes"] = torch.tensor([shape[1:]]).expand(batch_size, 2).clone()
        if hasattr(config, "image_grid_pinpoints"):  # the whole image, and its tiles
            shape = (3, *shape)
            sizes["image_sizes"] = sizes["image_sizes"] * torch.tensor([1, 2])
    elif type(base).__name__.startswith(("Idefics", "SmolVLM")):  # several images for each record
        shape = (1, *shape)
    return {"pixel_values": torch.randn(batch_size, *shape, generator=generator).to(dtype), **sizes}


def sound(
    base: Any, batch_size: int, length: int, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    name, config = base.main_input_name, base.config
    if name == "input_values" and not hasattr(config, "num_mel_bins"):
        return {name: torch.randn(batch_size, SAMPLES, generator=generator).to(dtype)}
    encoder = next((c for c in (getattr(config, n, None) for n in ("audio_config", "encoder_config")) if c), config)
    bins = next(
        (v for n in ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_features",
                     "feature_size") if (v := getattr(encoder, n, None))), None,
    )  # fmt: skip
    if bins is None:
        raise NoInputsError(f"`{name}` of {type(base).__name__} has no known shape")
    if name == "input_values":  # a spectrogram (N, T, bins)
        return {name: torch.randn(batch_size, getattr(config, "max_length", 64), bins, generator=generator).to(dtype)}
    if positions := getattr(config, "max_source_positions", None):  # Whisper: (N, bins, frames)
        if type(base).__name__.startswith("Whisper"):
            return {name: torch.randn(batch_size, bins, 2 * positions, generator=generator).to(dtype)}
    frames = 8 * length
    batch = {name: torch.randn(batch_size, frames, bins, generator=generator).to(dtype)}
    if "attention_mask" in inspect.signature(base.forward).parameters:
        batch["attention_mask"] = torch.ones(batch_size, frames, dtype=torch.int64)
    return batch


def with_image_tokens(base: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The text with as many image tokens in front as the model makes of one image."""
    token = getattr(base.config, "image_token_id", None) or getattr(base.config, "image_token_index", None)
    if token is None:
        return batch
    inner = getattr(base, "model", base)
    images = {key: x[:1] for key, x in batch.items() if key in inspect.signature(inner.get_image_features).parameters}
    with torch.no_grad():
        found = inner.get_image_features(**images)
    found = getattr(found, "pooler_output", None) if not isinstance(found, (Tensor, list, tuple)) else found
    found = found[0] if isinstance(found, (list, tuple)) else found
    count = found.reshape(-1, found.shape[-1]).shape[0]
    front = torch.full((len(batch["input_ids"]), count), token)
    text = batch["input_ids"].masked_fill(batch["input_ids"] == token, FIRST_WORD)
    batch["input_ids"] = torch.cat([front, text], 1)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if "mm_token_type_ids" in inspect.signature(base.forward).parameters:
        batch["mm_token_type_ids"] = (batch["input_ids"] == token).long()
    return batch
