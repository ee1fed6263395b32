"""Made-up images for models that read them beside a text, as LLaVA and Qwen-VL do."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .heads import IGNORE_INDEX

IMAGE_SIZE = 64  # for convolutional networks, whose configs name no size: large enough to be halved five times
TOKENS = ("image_token_id", "image_token_index")
MERGED = 2  # merged patches of an image of patches, in a row and in a column


def image_shape(config: Any) -> tuple[int, int, int]:
    """(channels, height, width)"""
    if getattr(config, "pretrained_cfg", None):  # timm
        return tuple(config.pretrained_cfg["input_size"])
    parts = (config, getattr(config, "vision_config", None), getattr(config, "encoder", None))  # CLIP, SigLIP; TrOCR
    vision = next((part for part in parts if hasattr(part, "image_size")), config)
    size = getattr(vision, "image_size", None) or IMAGE_SIZE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return getattr(vision, "num_channels", None) or 3, height, width


def image_token(base: Any) -> int | None:
    """The token of a text that stands for a part of an image, None if the model has none."""
    config = getattr(base, "config", None)
    return next((token for name in TOKENS if (token := getattr(config, name, None)) is not None), None)


def image_reader(base: Any) -> Any:
    """The model, or the one inside it, that turns images into features of a text; None if there is none."""
    parts = (getattr(base, "model", None), base)
    reader = next((part for part in parts if hasattr(part, "get_image_features")), None)
    return None if image_token(base) is None else reader


def with_images(base: Any, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """A made-up batch with an image for each record, and in front of its text as many image tokens as the model makes
    of an image. They carry no labels.

    Raises:
        ValueError: If no image can be made up for this model.
    """
    rows, token = len(batch["input_ids"]), image_token(base)
    assert token is not None, "asked for models that read images only"
    for form in (_patches, _tiles, _pixels):
        images = form(base, rows, generator)
        count = 0 if images is None else _tokens_of_one(base, images)
        if count:
            break
    else:
        raise ValueError(
            f"`public_examples` must be given for {type(base).__name__}: no image could be made up for it."
        )
    front = {"input_ids": token, "attention_mask": 1, "token_type_ids": 0}
    aligned = batch.get("labels") is not None and batch["labels"].shape == batch["input_ids"].shape
    if aligned and not base.config.is_encoder_decoder:
        front["labels"] = IGNORE_INDEX
    longer = {
        name: torch.cat([batch[name].new_full((rows, count), value), batch[name]], 1)
        for name, value in front.items()
        if name in batch
    }
    batch = batch | (images or {}) | longer
    for name in ("token_type_ids", "mm_token_type_ids"):  # where a text has no segments: which tokens are of an image
        if name not in batch and name in inspect.signature(base.forward).parameters:
            batch[name] = (batch["input_ids"] == token).long()
    return batch


def _patches(base: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor] | None:
    """A square of patches in each row, for models that take its sides (Qwen-VL, GLM)."""
    config, vision = base.config, getattr(base.config, "vision_config", None)
    if vision is None or "image_grid_thw" not in _takes(base):
        return None
    side = MERGED * getattr(vision, "spatial_merge_size", 2)
    channels = getattr(vision, "in_channels", image_shape(config)[0])
    values = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    return {
        "pixel_values": torch.randn(rows, side**2, values, generator=generator).to(base.dtype),
        "image_grid_thw": torch.tensor([[1, side, side]]).repeat(rows, 1),
    }


def _tiles(base: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor] | None:
    """An image of the first size that the config allows, as a whole and in tiles (LLaVA-NeXT)."""
    sizes, (channels, height, width) = getattr(base.config, "image_grid_pinpoints", None), image_shape(base.config)
    if not sizes or "image_sizes" not in _takes(base):
        return None
    tiles = 1 + (sizes[0][0] // height) * (sizes[0][1] // width)
    return {
        "pixel_values": torch.randn(rows, tiles, channels, height, width, generator=generator).to(base.dtype),
        "image_sizes": torch.tensor([list(sizes[0])]).repeat(rows, 1),
    }


def _pixels(base: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor] | None:
    """The pixels of an image in each row (LLaVA), or those of one image of several (Idefics)."""
    channels, height, width = image_shape(base.config)
    pixels = torch.randn(rows, channels, height, width, generator=generator).to(base.dtype)
    found, sizes = {"pixel_values": pixels}, _takes(base).get("image_sizes")
    kind = getattr(getattr(base.config, "vision_config", None), "model_type", "")
    if sizes is not None and (sizes.default is sizes.empty or kind == "pixtral"):
        found["image_sizes"] = torch.tensor([[height, width]]).repeat(rows, 1)
    several = {"pixel_values": pixels.unsqueeze(1)}
    return found if _tokens_of_one(base, found) else several


def _takes(base: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(image_reader(base).get_image_features).parameters


def _tokens_of_one(base: Any, images: dict[str, Tensor]) -> int:
    """How many tokens the first image stands for; 0 if the model does not take it."""
    one = {name: x[:1].to(base.device) for name, x in images.items()}
    try:
        with torch.no_grad(), torch.random.fork_rng():
            features = image_reader(base).get_image_features(**one)
        if not isinstance(features, (Tensor, list, tuple)):
            features = features.pooler_output
        if isinstance(features, (list, tuple)):
            features = features[0]
        return features.reshape(-1, features.shape[-1]).shape[0]
    except Exception:  # whatever a model raises for an image of another form
        return 0
