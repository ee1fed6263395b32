"""The gradient methods that `DPConfig` offers, by the name of its field.

Each method has its own folder, with its config (which builds the method and describes it for the card) and its maths,
and an entry in `CONFIGS`. BK, plain DP-SGD by book-keeping, needs no config: it is the default.
"""

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_private.gradients.method import Full, Method

from .carriers.config import CarrierConfig
from .carriers.method import Carriers
from .gep.config import AnchorConfig
from .gep.method import Anchors
from .presets import PRESETS
from .presets import train_only as freeze_all_but
from .targeting import TargetConfig

CONFIGS: dict[str, type[TargetConfig]] = {"carriers": CarrierConfig, "anchors": AnchorConfig}
CONFIGURED = {method.__name__ for method in (Full, Carriers, Anchors)}  # methods whose settings are in `DPConfig`


def parse_config(field: str, value: TargetConfig | Mapping[str, Any] | str | None) -> TargetConfig | None:
    """The config object for a field of `DPConfig`, from the object itself, a dict of its fields, or a JSON string.

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


def resolve_method(
    config: TargetConfig | None,
    model: nn.Module,
    *,
    clipping: str = "flat",
    seed: int = 0,
    train_only: str | None = None,
) -> Method:
    """The gradient method that a config asks for; freezes every parameter of the model that it does not train.

    `seed` is public (`TrainingArguments.seed`); no secret may depend on it. `train_only` names a preset of
    `methods.presets`, which is applied first.
    """
    if train_only is not None:
        freeze_all_but(model, train_only)
    return Full() if config is None else config.build(model, clipping=clipping, seed=seed)


def describe_method(settings: Mapping[str, Any], peft: str | None = None, recorded: str | None = None) -> str:
    """The card's description of the method of a run.

    Args:
        settings: Those of `DPConfig`.
        peft: Kind of the trained adapter, if there is one.
        recorded: What the ledger says of the run's method (`Method.describe`); None before the first run. A method
            that `DPConfig` does not configure is described by this text.

    >>> describe_method({"carriers": {"r": 8, "sparsity": 0.3}})
    'LSG: low-rank, sparse gradient carriers (r=8, sparsity=0.3)'
    >>> describe_method({"train_only": "lora-B"}, peft="LORA")
    'DP-SGD with book-keeping (BK) on the matrices B (FFA-LoRA) of a LoRA adapter'
    >>> describe_method({}, recorded="DP-PowerSGD")
    'DP-PowerSGD'
    """
    preset = PRESETS.get(settings.get("train_only") or "")
    part = f"{preset.words} of " if preset and peft else ""
    adapter = f" on {part}a {'LoRA' if peft == 'LORA' else peft} adapter" if peft else ""
    if recorded is not None and recorded not in CONFIGURED:
        return recorded + adapter
    for field, config in CONFIGS.items():
        if settings.get(field):
            return config.describe(settings[field])
    trained = f" on {preset.words}" if preset else " on every trainable weight"
    return "DP-SGD with book-keeping (BK)" + (adapter or trained)
