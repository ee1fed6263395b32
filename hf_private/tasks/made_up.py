"""Made-up records with the schema of a dataset: the same fields, types and shapes, but random content.

Checks that need records (of the data collator, or a rehearsal) run on these, so their outcome depends on the schema
and not on what the records say. The schema is treated as public: names and types of fields, sizes that are equal in
all records, and which sizes vary.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .heads import base_model
from .losses import LABEL_NAMES
from .synthetic import ordinary_tokens
from .synthetic_images import image_token

SAMPLES = 16  # records that show the schema
WORDS = "cat dog sun map red box ten sky pen cup".split()  # short, so that most tokenizers have one token for each
SIZES = ("image_grid_thw", "image_sizes")  # of images that are fields of their own
ONES = ("attention_mask", "pixel_mask", "loss_mask")

Maker = Callable[[int, torch.Generator], Any]  # (length, generator) -> a value


class UnknownSchemaError(TypeError):
    """A record holds a type for which no content can be made up."""


class Ranges(NamedTuple):
    """Public ranges of the values that a model takes: token ids (V,) and the number of classes."""

    tokens: Tensor
    classes: int
    image_token: int | None = None


def ranges_of(model: nn.Module) -> Ranges:
    """The ranges of a model; small ones for a model without a Transformers config."""
    base = base_model(model)
    classes = getattr(getattr(base, "config", None), "num_labels", None) or 2
    try:
        return Ranges(ordinary_tokens(base), classes, image_token(base))
    except (AttributeError, NotImplementedError, ValueError):  # no config, no embedding, or a tiny vocabulary
        return Ranges(torch.arange(1, 9), classes)


def sample(dataset: Any, count: int = SAMPLES) -> list[Any]:
    """Some records, spread over the dataset: a sorted one has its short records in one place."""
    size = len(dataset)
    count = min(count, size)
    positions = sorted({round(i * (size - 1) / max(1, count - 1)) for i in range(count)})
    return [dataset[position] for position in positions]


def schema_of(records: Sequence[Any], ranges: Ranges) -> Maker:
    """A function (length, generator) that makes records like these, with `length` elements where sizes vary.

    >>> records = [{"input_ids": [5, 6], "labels": 1}, {"input_ids": [7], "labels": 0}]
    >>> make = schema_of(records, Ranges(torch.arange(9), 2))
    >>> made = make(4, torch.Generator())
    >>> sorted(made), len(made["input_ids"])
    (['input_ids', 'labels'], 4)
    """
    return _maker("", list(records), ranges, [])


def _maker(name: str, values: list[Any], ranges: Ranges, main: list[Any]) -> Maker:
    """How to make one field, given its values in the sampled records. `main` holds the sizes of `input_ids`."""
    values = [value for value in values if value is not None]
    if not values:
        return lambda length, generator: None
    first = values[0]
    if isinstance(first, Mapping):
        lengths = [_shape(value.get("input_ids")) for value in values]
        fields = {key: _maker(str(key), [value.get(key) for value in values], ranges, lengths) for key in first.keys()}
        images = _image_tokens([value.get("input_ids") for value in values], ranges.image_token)

        def make_record(length: int, generator: torch.Generator) -> dict:
            record = {key: make(length + images, generator) for key, make in fields.items()}
            for name, mark in (("input_ids", ranges.image_token), ("token_type_ids", 1), ("mm_token_type_ids", 1)):
                for n in range(images if name in record else 0):
                    record[name][n] = mark
            return record

        return make_record
    if isinstance(first, str):
        return lambda length, generator: " ".join(WORDS[i] for i in _integers(len(WORDS), (length,), generator))
    if isinstance(first, (bool, int, float, np.number)):
        own: Any = type(first)
        return lambda length, generator: own(_content(name, _kind(first) or int, (), ranges, generator).item())
    if type(first).__module__.startswith("PIL."):
        return _images(values)
    if name in SIZES and len({str(value) for value in values}) == 1:
        return lambda length, generator: copy.deepcopy(first)
    if _kind(first) is not None:
        return _arrays(name, values, ranges, main)
    if isinstance(first, (tuple, list)):
        parts = [
            _maker(name, [value[i] for value in values if len(value) > i], ranges, main) for i in range(len(first))
        ]
        return lambda length, generator: type(first)(make(length, generator) for make in parts)
    raise UnknownSchemaError(f"no content can be made up for {type(first).__name__} (field `{name}`)")


def _image_tokens(ids: list[Any], token: int | None) -> int:
    """How many image tokens every record has, if that is the same number; else 0."""
    if token is None or any(len(_shape(value) or ()) != 1 for value in ids):
        return 0
    counts = {int((torch.as_tensor(value) == token).sum()) for value in ids}
    return counts.pop() if len(counts) == 1 else 0


def _arrays(name: str, values: list[Any], ranges: Ranges, main: list[Any]) -> Maker:
    """Makes a tensor, an array or a (nested) list of numbers, with `length` elements along the axes that vary."""
    first, shapes = values[0], [_shape(value) or () for value in values]
    kind = _kind(first) or int
    axes = {axis for axis in range(len(shapes[0])) if len({shape[axis] for shape in shapes}) > 1}
    tokens = _holds_tokens(name)
    if tokens and kind is int:
        axes.add(len(shapes[0]) - 1)
    aligned = [size is not None and shape[: len(size)] == size for shape, size in zip(shapes, main, strict=False)]
    if aligned and all(aligned):  # one element for each token
        axes.add(len(main[0]) - 1)

    def make(length: int, generator: torch.Generator) -> Any:
        shape = tuple(length if axis in axes else size for axis, size in enumerate(shapes[0]))
        made = _content(name, kind, shape, ranges, generator)
        if isinstance(first, Tensor):
            return made.to(first.dtype)
        if isinstance(first, np.ndarray):
            return made.numpy().astype(first.dtype)
        return made.tolist()

    return make


def _content(name: str, kind: type, shape: tuple[int, ...], ranges: Ranges, generator: torch.Generator) -> Tensor:
    """Random numbers that are valid for a field of this name."""
    if kind is float:
        return torch.randn(shape, generator=generator)
    if name in ONES or name.endswith("attention_mask"):
        return torch.ones(shape, dtype=torch.int64)
    if name in ("special_tokens_mask", "token_type_ids", "mm_token_type_ids"):
        return torch.zeros(shape, dtype=torch.int64)
    if name in ("position_ids", "offset_mapping") and shape:  # rising, and each token a word of its own
        return torch.arange(int(np.prod(shape))).reshape(shape)
    if name in LABEL_NAMES:
        return torch.randint(ranges.classes, shape, generator=generator)
    if _holds_tokens(name):
        return ranges.tokens[torch.randint(len(ranges.tokens), shape, generator=generator)]
    return torch.randint(2, shape, generator=generator)


def _holds_tokens(name: str) -> bool:
    """Whether a field of whole numbers holds token ids: `input_ids`, or `prompt_ids` and `chosen_ids` of a pair."""
    return not name or (name.endswith("_ids") and name not in ("position_ids", "token_type_ids", *LABEL_NAMES))


def _images(values: list[Any]) -> Maker:
    from PIL import Image  # only datasets of images need it

    first, varies = values[0], len({value.size for value in values}) > 1

    def make(length: int, generator: torch.Generator) -> Any:
        width, height = (8 * length, 8 * length) if varies else first.size
        pixels = torch.randint(256, (height, width, 3), generator=generator).numpy().astype(np.uint8)
        return Image.fromarray(pixels).convert(first.mode)

    return make


def _integers(below: int, shape: tuple[int, ...], generator: torch.Generator) -> list[int]:
    return torch.randint(below, shape, generator=generator).tolist()


def _kind(value: Any) -> type | None:
    """int or float for numbers and for what consists of numbers, of any nesting; None for anything else."""
    if isinstance(value, Tensor):
        return float if value.is_floating_point() else int
    if isinstance(value, (np.ndarray, np.number)):
        return {"f": float, "i": int, "u": int, "b": int}.get(value.dtype.kind)
    if isinstance(value, (bool, int, float)):
        return float if isinstance(value, float) else int
    if isinstance(value, (list, tuple)) and len(value):
        kinds = {_kind(element) for element in value}
        if kinds <= {int, float} and len({_shape(element) is None for element in value}) == 1:
            return float if float in kinds else int
    return None


def _shape(value: Any) -> tuple[int, ...] | None:
    """Sizes of a tensor, an array or a (nested) list; a ragged list has the sizes of its longest parts."""
    if hasattr(value, "shape"):
        return tuple(value.shape) or None
    if not isinstance(value, (list, tuple)):
        return None
    inner = [shape for shape in map(_shape, value) if shape is not None]
    return (len(value), *(max(sizes) for sizes in zip(*inner, strict=False)))
