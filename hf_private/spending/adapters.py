"""What an adapter's weights say of its past. PEFT does not keep where an adapter was loaded from.

Some adapters begin at values that show whether they were trained: LoRA's second factor at zero, IA3 at one. Others
begin at random, or at a part of the base model's weights, and show nothing. All adapters of a model count, the idle
ones too: they are saved with it. Copies of the base model's modules (`modules_to_save`) share the base model's past.
"""

import re
from collections.abc import Container, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

ZERO_AT_FIRST = re.compile(r"\.lora_(?:B|embedding_A)\.")  # of an embedding it is the first factor
COPIES = re.compile(r"\.(?:modules_to_save|trainable_tokens_delta)\.")


def trained_adapter(model: nn.Module, settled: Container[Tensor] = ()) -> str | None:
    """A weight that a fresh adapter would have at another value; None if there is none.

    Args:
        settled: Parameters whose past is known.
    """
    for name, parameter, config in _weights(model, settled):
        at_first = _at_first(name, config)
        values = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if at_first is not None and not values.is_meta and bool((values != at_first).any()):
            return name
    return None


def unreadable_adapter(model: nn.Module, settled: Container[Tensor] = ()) -> str | None:
    """A weight of an adapter that does not show whether it was trained; None if there is none."""
    return next((name for name, _, config in _weights(model, settled) if not _readable(config)), None)


def _weights(model: nn.Module, settled: Container[Tensor]) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """The adapters' weights of unknown past, with the settings of the adapter that each belongs to."""
    for adapter, config in (getattr(model, "peft_config", None) or {}).items():
        part = re.compile(rf"\.{re.escape(adapter)}(?:\.|$)")
        for name, parameter in model.named_parameters():
            if part.search(name) and not COPIES.search(name) and parameter not in settled:
                yield name, parameter, config


def _readable(config: Any) -> bool:
    """Whether an adapter of these settings shows that it was trained."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind == "LORA":
        return config.init_lora_weights in (True, "gaussian")
    return kind == "IA3" and bool(config.init_ia3_weights)


def _at_first(name: str, config: Any) -> float | None:
    """The one value that a fresh weight has; None if it has others."""
    if not _readable(config):
        return None
    if ".ia3_l." in name:
        return 1.0
    return 0.0 if ZERO_AT_FIRST.search(name) else None
