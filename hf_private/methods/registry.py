"""The gradient methods that `DPConfig` offers, by the name of its field.

A method has a folder of its own here: its config (which builds it and says what a card calls it), its maths, and a row
in `CONFIGS`. BK, plain DP-SGD by book-keeping, needs no config: it is what runs if none is given.
"""

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_private.gradients.method import Full, Method

from .carriers.config import CarrierConfig
from .gep.config import AnchorConfig
from .targeting import TargetConfig

CONFIGS: dict[str, type[TargetConfig]] = {"carriers": CarrierConfig, "anchors": AnchorConfig}


def parse_config(field: str, value: TargetConfig | Mapping[str, Any] | str | None) -> TargetConfig | None:
    """The config object that a field of `DPConfig` stands for: itself, a dict of its fields, or the same as JSON.

    >>> parse_config("carriers", '{"r": 4}').r
    4
    """
    wanted = CONFIGS[field]
    if value is None or isinstance(value, wanted):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"`{field}` must be a {wanted.__name__}, a dict or JSON, got {value!r}.") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"`{field}` must be a {wanted.__name__}, a dict or JSON, got {value!r}.")
    try:
        return wanted(**value)
    except TypeError as error:
        raise ValueError(f"`{field}` must name fields of {wanted.__name__}: {error}.") from error


def resolve_method(config: TargetConfig | None, model: nn.Module, *, clipping: str = "flat", seed: int = 0) -> Method:
    """The gradient method that a config asks for; freezes every parameter of the model that it does not train.

    `seed` is public (`TrainingArguments.seed`); no secret may depend on it.
    """
    return Full() if config is None else config.build(model, clipping=clipping, seed=seed)


def describe_method(settings: Mapping[str, Any], peft: str | None = None) -> str:
    """What a card calls the method of a run with these settings of `DPConfig`.

    >>> describe_method({"carriers": {"r": 8, "sparsity": 0.3}})
    'LSG: low-rank, sparse gradient carriers (r=8, sparsity=0.3)'
    """
    for field, config in CONFIGS.items():
        if settings.get(field):
            return config.describe(settings[field])
    full = "DP-SGD with book-keeping (BK)"
    return f"{full} on a {'LoRA' if peft == 'LORA' else peft} adapter" if peft else f"{full} on every trainable weight"
