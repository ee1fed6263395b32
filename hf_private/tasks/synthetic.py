"""Random batches for a model's head. The self-check and `hf-private doctor` run on them instead of on real data."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from hf_private._validate import integer_at_least

from .head_losses import SINGLE_LABEL, problem_type
from .heads import IGNORE_INDEX, Head, base_model, head_of
from .limits import positions_of, vocabulary_of
from .losses import takes
from .synthetic_images import image_reader, image_shape, with_images

CHOICES = 3
TOKEN_HEADS = (Head.CAUSAL_LM, Head.MASKED_LM, Head.SEQ2SEQ_LM, Head.TOKEN_CLASSIFICATION)
SOUND = ("input_values", "input_features")
BINS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")  # of a spectrogram
MOONSHINE = (64, 3, 2), (127, 7, 3)  # strides and kernels of its convolutions, which its config does not name
FRAMES = 4  # of a wave for each token of its text
SPECIAL = ("_token_id", "_token_ids", "_token_index")  # how configs name special tokens, an image's among them


def synthetic_batch(
    model: nn.Module, batch_size: int, length: int, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Random inputs and labels that are valid for the model's head, all rows different.

    Row 0 has `length` tokens (fewer if the model has fewer positions); the others are padded on the right at random,
    row 1 always if `length` > 2. Images have the size of the config and no length; for a model that reads them beside
    a text, image tokens come in front of the `length` others. The values depend on the generator (on the CPU; a fixed
    one by default) and the config, not on weights; tensors come on the model's device.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> config = BertConfig(
        ...     hidden_size=8, num_attention_heads=1, num_hidden_layers=1, intermediate_size=8, vocab_size=200
        ... )
        >>> batch = synthetic_batch(BertForMaskedLM(config), batch_size=2, length=5)
        >>> sorted(batch), batch["labels"].shape
        (['attention_mask', 'input_ids', 'labels', 'token_type_ids'], torch.Size([2, 5]))
    """
    integer_at_least(1, batch_size=batch_size, length=length)
    generator = generator or torch.Generator().manual_seed(0)
    length = min(length, positions_of(model))
    lengths = torch.randint(min(2, length), length + 1, (batch_size,), generator=generator)
    lengths[0] = length
    if length > 2:
        lengths[1:2].clamp_(max=length - 1)
    batch = _draw(model, lengths, length, generator)
    main = batch[_main_input(model)].flatten(1)
    if len(main.unique(dim=0)) < batch_size:
        raise ValueError(f"`length` must allow {batch_size} different rows, got {length}. Make it longer.")
    return batch


def random_labels(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Labels that are valid for the model's head and a batch of unlabelled inputs, drawn at random.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, vocab_size=9)
        >>> model = BertForSequenceClassification(config)
        >>> random_labels(model, {"input_ids": torch.ones(3, 5).long()}, torch.Generator())["labels"].shape
        torch.Size([3])
    """
    main = batch[_main_input(model)]
    mask = batch.get("attention_mask", torch.ones(main.shape, dtype=torch.int64)).cpu()
    lengths = mask.flatten(1).sum(1)
    labels = _labels(
        base_model(model), head_of(model), {"input_ids": main.cpu(), "attention_mask": mask}, lengths, generator
    )
    return {name: value.to(main.device) for name, value in labels.items()}


def widen(model: nn.Module, batch: dict[str, Tensor], columns: int) -> dict[str, Tensor]:
    """A copy of a text batch with more padding on the right, as a longer neighbour would cause. It must not change a
    record's loss.

    A batch of images or sound is returned unchanged. The model must have enough positions.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=1, n_layer=1, vocab_size=99))
        >>> batch = synthetic_batch(model, batch_size=3, length=7)
        >>> widen(model, batch, columns=2)["input_ids"].shape
        torch.Size([3, 9])
    """
    base = base_model(model)
    if _main_input(model) in SOUND:
        return dict(batch)
    filler = {"input_ids": _padding(base), "attention_mask": 0, "token_type_ids": 0}
    if batch.get("labels") is not None and head_of(model) in TOKEN_HEADS:
        filler["labels"] = IGNORE_INDEX
    return batch | {
        name: nn.functional.pad(batch[name], (0, columns), value=value)
        for name, value in filler.items()
        if name in batch
    }


def _draw(model: nn.Module, lengths: Tensor, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """One row per entry of `lengths` (B,), text padded on the right to `width`."""
    base, head = base_model(model), head_of(model)
    rows = len(lengths)
    reads_images = head in (Head.CAUSAL_LM, Head.SEQ2SEQ_LM) and image_reader(base) is not None
    if reads_images:
        batch = _text(base, lengths, width, generator)
    elif _main_input(model) == "pixel_values":
        batch = {"pixel_values": torch.randn(rows, *image_shape(base.config), generator=generator).to(base.dtype)}
    elif _main_input(model) in SOUND:
        batch = _sound(base, lengths, width, generator)
    elif head is Head.MULTIPLE_CHOICE:
        choices = [_text(base, lengths, width, generator) for _ in range(CHOICES)]
        batch = {name: torch.stack([choice[name] for choice in choices], dim=1) for name in choices[0]}
    else:
        batch = _text(base, lengths, width, generator)
    batch |= _labels(base, head, batch, lengths, generator)
    if reads_images:
        batch = with_images(base, batch, generator)
    return {name: value.to(base.device) for name, value in batch.items()}


def _text(base: Any, lengths: Tensor, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    config = base.config.get_text_config()
    mask = torch.arange(width) < lengths[:, None]
    ids = _tokens(base, mask.shape, generator)
    end = _end(base)
    if base.config.is_encoder_decoder and end is not None:
        # Classifiers of this family read the state at the single <eos> that every record must have.
        ids[torch.arange(len(ids)), lengths - 1] = end
    batch = {"input_ids": ids.masked_fill(~mask, _padding(base)), "attention_mask": mask.long()}
    segments = getattr(config, "type_vocab_size", None) or 0
    if segments > 1 and takes(base, "token_type_ids"):
        batch["token_type_ids"] = torch.randint(segments, mask.shape, generator=generator).masked_fill(~mask, 0)
    return batch


def _sound(base: Any, lengths: Tensor, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A wave with its mask, `FRAMES` frames for each of `lengths`; or a spectrogram of the model's size."""
    config, rows = base.config, len(lengths)
    if base.main_input_name == "input_features" and type(base).__name__.startswith("Whisper"):
        shape = (rows, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=generator).to(base.dtype)}
    if base.main_input_name == "input_values" and hasattr(config, "frequency_stride"):  # spectrogram transformers
        shape = (rows, config.max_length, config.num_mel_bins)
        return {"input_values": torch.randn(shape, generator=generator).to(base.dtype)}
    wave = base.main_input_name == "input_values"
    bins = next((size for name in BINS if (size := getattr(config, name, None))), 0)
    if not wave and not bins:
        raise ValueError(f"`public_examples` must be given for {type(base).__name__}: its input is not known.")
    if wave:
        strides, kernels = getattr(config, "conv_stride", MOONSHINE[0]), getattr(config, "conv_kernel", MOONSHINE[1])
        stride = math.prod(strides)
        sizes = FRAMES * stride * lengths + sum(kernels) * stride
    else:
        sizes = 8 * FRAMES * lengths  # convolutions leave every fourth or eighth
    mask = torch.arange(int(sizes.max())) < sizes[:, None]
    sound = torch.randn(*mask.shape, 1 if wave else bins, generator=generator).to(base.dtype)
    sound = sound.masked_fill(~mask.unsqueeze(-1), 0)
    return {base.main_input_name: sound.squeeze(-1) if wave else sound, "attention_mask": mask.long()}


def _labels(
    base: Any, head: Head, batch: dict[str, Tensor], lengths: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    rows, config = len(lengths), base.config
    if head is Head.CLASSIFICATION:
        kind = problem_type(config, torch.empty(0, dtype=torch.int64))
        if kind == SINGLE_LABEL:
            return {"labels": torch.randint(config.num_labels, (rows,), generator=generator)}
        values = torch.rand(rows, config.num_labels, generator=generator)
        return {"labels": values if kind == "regression" else values.round()}
    if head is Head.MULTIPLE_CHOICE:
        return {"labels": torch.randint(batch["input_ids"].shape[1], (rows,), generator=generator)}
    if head is Head.QUESTION_ANSWERING:
        ends = (torch.rand(2, rows, generator=generator) * lengths).long().sort(dim=0).values
        return {"start_positions": ends[0], "end_positions": ends[1]}

    if head is Head.CTC:
        targets = lengths.clamp(min=1)
        words = torch.randint(1, config.vocab_size, (rows, int(targets.max())), generator=generator)
        words = words.where(words != config.pad_token_id, 0)  # the blank is no label
        return {"labels": words.masked_fill(torch.arange(words.shape[1]) >= targets[:, None], IGNORE_INDEX)}
    ids = batch["input_ids"] if "input_ids" in batch else _tokens(base, (rows, int(lengths.max())), generator)
    ignored = batch["attention_mask"] == 0 if "input_ids" in batch else torch.zeros_like(ids, dtype=torch.bool)
    if head is Head.TOKEN_CLASSIFICATION:
        labels = torch.randint(config.num_labels, ids.shape, generator=generator)
    elif head is Head.MASKED_LM:
        labels = _tokens(base, ids.shape, generator)
        unmasked = torch.rand(ids.shape, generator=generator) < 0.5
        unmasked[:, 0] = False  # every record needs a label
        ignored = ignored | unmasked
    elif head is Head.SEQ2SEQ_LM:
        targets = torch.randint(1, ids.shape[1] + 1, (rows,), generator=generator)
        labels = _tokens(base, ids.shape, generator)
        end = _end(base)
        if end is not None:
            labels[torch.arange(rows), targets - 1] = end
        ignored = torch.arange(ids.shape[1]) >= targets[:, None]
    else:
        labels = ids
    return {"labels": labels.masked_fill(ignored, IGNORE_INDEX)}


def ordinary_tokens(base: Any) -> Tensor:
    """All ids (V,) of a Transformers model's vocabulary but its special tokens."""
    ordinary = torch.ones(vocabulary_of(base), dtype=torch.bool)
    for name, special in (*vars(base.config).items(), *vars(base.config.get_text_config()).items()):
        for token in special if isinstance(special, list) else [special]:
            if name.endswith(SPECIAL) and isinstance(token, int) and 0 <= token < len(ordinary):
                ordinary[token] = False
    ids = ordinary.nonzero().flatten()
    if len(ids) < 2:
        raise ValueError(f"`vocab_size` must leave 2 ordinary tokens, got {len(ordinary)}. Use a larger vocabulary.")
    return ids


def _tokens(base: Any, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Ids drawn from the vocabulary without its special tokens."""
    ids = ordinary_tokens(base)
    return ids[torch.randint(len(ids), shape, generator=generator)]


def _padding(base: Any) -> int:
    pad = getattr(base.config.get_text_config(), "pad_token_id", None)
    return pad if pad is not None and 0 <= pad < vocabulary_of(base) else 0


def _main_input(model: nn.Module) -> str:
    base = base_model(model)
    if base.main_input_name not in ("input_ids", "pixel_values", *SOUND):
        raise ValueError(
            f"`model` must take input_ids, pixel_values or sound, got {type(base).__name__} with"
            f" {base.main_input_name}. Give the self-check `public_examples`."
        )
    return base.main_input_name


def _end(base: Any) -> int | None:
    """The token that ends a text; a model of several parts may name it in the part that reads text."""
    configs = (base.config, base.config.get_text_config(decoder=True))
    end = next((token for config in configs if (token := getattr(config, "eos_token_id", None)) is not None), None)
    return end[0] if isinstance(end, list) else end
