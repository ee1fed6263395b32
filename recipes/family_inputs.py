"""Made-up records for all heads of `architectures.py`: ids, pixels or sound.

Where a model puts images or sound into its text, the text has as many special tokens in front as the model makes
of the image or sound of one record.
"""

import inspect
from typing import Any

import torch
from architectures import FIRST_WORD, VOCABULARY
from torch import Tensor, nn

# Models that take patches in one row for all records only, and those whose patches are small images, not numbers.
ONE_ROW = ("Cosmos3Edge", "HunYuanVL", "Kimi", "PaddleOCR", "MuseGlimmer")
SMALL_IMAGES = ("Kimi", "PaddleOCR")
BINS = (
    "num_mel_bins",
    "input_feat_per_channel",
    "feature_projection_input_dim",
    "input_features",
    "feature_size",
    "input_dim",
)
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
    if head == "image" and base.main_input_name == "input_ids":  # pixels are words, or come with words
        head = "image-text" if "pixel_values" in takes else "causal-lm"
    if head == "image" or head == "image-text":
        batch |= images(base, batch_size, generator, dtype)
    listens = head in ("seq2seq-lm", "speech") and part_with(base, "get_audio_features") is not None
    if listens:
        try:
            batch |= heard(base, batch_size, generator, dtype)
        except NoInputsError:  # the text alone; what it does not reach is counted
            pass
    elif head in ("audio", "ctc", "speech"):
        batch |= sound(base, batch_size, length, generator, dtype)
    if listens or head in ("classification", "masked-lm", "seq2seq-lm", "causal-lm", "image-text"):
        batch["input_ids"] = ids(config, batch_size, length, generator)
        if "attention_mask" in takes:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if "qformer_input_ids" in takes:
            batch["qformer_input_ids"] = ids(config.qformer_config, batch_size, length, generator)
        if head == "image-text":
            batch = with_image_tokens(base, batch)
        if listens and batch.keys() - {"input_ids", "attention_mask"}:
            batch = with_tokens(base, batch, "get_audio_features", ("audio_token_id", "audio_token_index"))
        eos = getattr(config, "eos_token_id", None)
        if config.is_encoder_decoder and head == "classification" and isinstance(eos, int):
            batch["input_ids"][:, -1] = eos
        if "bbox" in takes and head == "image-text":
            batch["bbox"] = torch.rand(*batch["input_ids"].shape, 4, generator=generator).to(dtype)
    if "decoder_input_ids" in takes and head in ("seq2seq-lm", "speech", "image-text"):
        batch["decoder_input_ids"] = ids(config, batch_size, length, generator)
        if channels := getattr(getattr(config, "decoder_config", None), "num_channels", None):  # of a codec
            each = batch["decoder_input_ids"].unsqueeze(-1)
            batch["decoder_input_ids"] = (each + torch.arange(channels)) % (VOCABULARY // 2)
    return batch


def own(x: Tensor, records: int, n: int) -> Tensor:
    """The rows of record n: one, or several where all records' patches lie in one row."""
    return x.unflatten(0, (records, -1))[n]


def ids(config: Any, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
    """Ordinary tokens (N, T), none of them special."""
    text = config.get_text_config()
    vocabulary = min(getattr(text, "vocab_size", None) or VOCABULARY, VOCABULARY)
    return torch.randint(min(FIRST_WORD, vocabulary // 2), vocabulary, (batch_size, length), generator=generator)


def _required(parameters: Any) -> bool:
    return "image_sizes" in parameters and parameters["image_sizes"].default is inspect.Parameter.empty


def image_shape(config: Any) -> tuple[int, int, int]:
    """(channels, height, width)"""
    parts = (getattr(config, "vision_config", None), getattr(config, "encoder", None), config)
    vision = next((c for c in parts if hasattr(c, "image_size")), config)
    size = getattr(vision, "image_size", None) or 64
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return getattr(vision, "num_channels", None) or 3, height, width


def images(base: Any, batch_size: int, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """One image for each record, in the form that the model's processor would give it.

    Where the processor puts the patches of all images in one row, each record has as many of them.
    """
    config = base.config
    inner = part_with(base, "get_image_features")
    features = inspect.signature(inner.get_image_features if inner else base.forward).parameters
    takes = {*inspect.signature(base.forward).parameters, *features}
    channels, height, width = shape = image_shape(config)
    vision = getattr(config, "vision_config", None) or config.get_text_config()
    patch = getattr(vision, "patch_size", 8)

    def random(*shape: int) -> Tensor:
        return torch.randn(batch_size, *shape, generator=generator).to(dtype)

    def each(*numbers: int) -> Tensor:
        return torch.tensor([numbers]).expand(batch_size, len(numbers)).clone()

    if "image_grid_thw" in takes:
        channels, side = getattr(vision, "in_channels", channels), 2 * getattr(vision, "spatial_merge_size", 2)
        frames = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
        patches = random(side**2, channels * frames * patch**2)
        if type(base).__name__.startswith(ONE_ROW):
            patches = patches.flatten(0, 1)
        if type(base).__name__.startswith(SMALL_IMAGES):
            patches = patches.unflatten(-1, (channels, patch, patch))
        found = {"pixel_values": patches, "image_grid_thw": each(1, side, side)}
        return found | ({"image_merge_sizes": each(2)[:, 0]} if "image_merge_sizes" in takes else {})
    if "image_position_ids" in takes:
        side = 2 * getattr(vision, "pooling_kernel_size", 2)
        places = torch.stack([torch.arange(side**2) % side, torch.arange(side**2) // side], -1)
        pixels = random(side**2, channels * patch**2).sigmoid()
        return {"pixel_values": pixels, "image_position_ids": places.expand(batch_size, -1, 2).clone()}
    if "spatial_shapes" in takes:
        return {
            "pixel_values": random(16, channels * patch**2),
            "spatial_shapes": each(4, 4),
            "pixel_attention_mask": torch.ones(batch_size, 16, dtype=torch.int64),
        }
    if "flattened_patches" in takes:
        numbers = torch.arange(16)
        places = torch.stack([numbers // 4, numbers % 4], -1).to(dtype).expand(batch_size, 16, 2)
        return {"flattened_patches": torch.cat([places, random(16, vision.patch_embed_hidden_size)], -1)}
    more: dict[str, Tensor] = {}
    if "target_sizes" in takes:
        raise NoInputsError(
            f"{type(base).__name__} takes the patches of all images in one image, with no row for each"
        )
    pinpoints, pixtral = hasattr(config, "image_grid_pinpoints"), getattr(vision, "model_type", "") == "pixtral"
    if "image_sizes" in takes and (pinpoints or pixtral or "image_sizes" not in features or _required(features)):
        more["image_sizes"] = each(height, width)
        if hasattr(config, "image_grid_pinpoints"):  # the whole image, and its tiles
            shape = (3, *shape)
            more["image_sizes"] = more["image_sizes"] * torch.tensor([1, 2])
    elif type(base).__name__.startswith(("Idefics", "SmolVLM", "InstructBlipVideo")):  # several images for each record
        shape = (1, *shape)
    elif type(base).__name__.startswith("Inkling"):
        shape = (vision.temporal_patch_size, height, width, channels)
    if "high_res_pixel_values" in takes:
        more["high_res_pixel_values"] = random(*image_shape(config.high_res_vision_config))
    return {"pixel_values": random(*shape), **more}


def sound(
    base: Any, batch_size: int, length: int, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    name, config = base.main_input_name, base.config
    if name == "inputs":  # an encoder and a decoder of any kind
        name = config.encoder.main_input_name if hasattr(config.encoder, "main_input_name") else "input_values"
    if name == "input_values" and (not hasattr(config, "num_mel_bins") or hasattr(config, "conv_dim")):
        return {name: torch.randn(batch_size, SAMPLES, generator=generator).to(dtype)}
    encoder = next((c for c in (getattr(config, n, None) for n in ("audio_config", "encoder_config")) if c), config)
    bins = next((v for n in BINS if (v := getattr(encoder, n, None))), None)
    first = next((m for m in base.modules() if isinstance(m, nn.Linear)), None)
    if bins and first is not None and first.in_features == 4 * bins:  # four frames in one
        bins *= 4
    if name == "input_ids":
        return {name: ids(config, batch_size, length, generator)}
    if bins is None:  # what the first layer takes
        bins = first.in_features if first is not None and name == "input_features" else None
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
    length = batch["input_ids"].shape[1]
    if "image_attention_mask" in inspect.signature(base.forward).parameters:  # each token sees the image
        batch["image_attention_mask"] = torch.ones(len(batch["input_ids"]), length, 1, dtype=torch.int64)
        return batch
    if "image_embeds_position_mask" in inspect.signature(base.forward).parameters:
        front, count = batch["input_ids"][:, :1].expand(-1, base.config.latent_query_num), base.config.latent_query_num
        batch["input_ids"] = torch.cat([front, batch["input_ids"]], 1)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["image_embeds_position_mask"] = (torch.arange(count + length) < count).expand(len(front), -1).clone()
        return batch
    batch = with_tokens(base, batch, "get_image_features", ("image_token_id", "image_token_index", "video_token_id"))
    if "mm_token_type_ids" in inspect.signature(base.forward).parameters:
        batch["mm_token_type_ids"] = (batch["input_ids"] == base.config.image_token_id).long()
    return batch


def with_tokens(base: Any, batch: dict[str, Tensor], method: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The text with a special token in front for each feature that `method` makes of one record."""
    inner = part_with(base, method)
    if inner is None:
        return batch
    takes, records = inspect.signature(getattr(inner, method)).parameters, len(batch["input_ids"])
    one = {key: own(x, records, 0) for key, x in batch.items() if key in takes}
    with torch.no_grad():
        found = getattr(inner, method)(**one)
    found = getattr(found, "pooler_output", None) if not isinstance(found, (Tensor, list, tuple)) else found
    found = found[0] if isinstance(found, (list, tuple)) else found
    if found is None:
        raise NoInputsError(f"`{method}` of {type(base).__name__} does not tell how many tokens an image takes")
    count = found.reshape(-1, found.shape[-1]).shape[0]
    token = next((t for name in names if (t := getattr(base.config, name, None)) is not None), None)
    if token is None:  # features are added to those of the words
        batch["input_ids"] = batch["input_ids"].repeat(1, count)[:, :count]
    else:
        front = torch.full((records, count), token)
        text = batch["input_ids"].masked_fill(batch["input_ids"] == token, FIRST_WORD)
        batch["input_ids"] = torch.cat([front, text], 1)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


def part_with(base: Any, method: str) -> Any:
    """The model or the one inside it that has a method, None if there is none."""
    return next((m for m in (getattr(base, "model", None), base) if hasattr(m, method)), None)


def heard(base: Any, batch_size: int, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Sound for a language model that listens: a spectrogram, frames first or last, or a wave, whichever it takes."""
    features = getattr(part_with(base, "get_audio_features"), "get_audio_features")  # noqa: B009
    takes = inspect.signature(features).parameters
    name = next(iter(takes))
    parts = [getattr(base.config, name, None) for name in ("audio_config", "encoder_config")]
    config = next((part for part in parts if part is not None), base.config)
    bins = next((v for n in BINS if (v := getattr(config, n, None))), 0)
    frames = 2 * (getattr(config, "max_source_positions", None) or 32)
    reasons = []
    for shape in ((bins, frames), (frames, bins)) if bins else ((SAMPLES,),):
        batch = {name: torch.randn(batch_size, *shape, generator=generator).to(dtype)}
        batch |= {n: torch.ones(batch_size, frames, dtype=torch.int64) for n in takes if n == f"{name}_mask"}
        try:
            with torch.no_grad():
                features(**{key: x[:1] for key, x in batch.items()})
            return batch
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reasons.append(str(error))
    raise NoInputsError(f"no sound fits {type(base).__name__}: {reasons}")
