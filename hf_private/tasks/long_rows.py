"""Lengths beyond which a model computes rows in another way: windows, chunks, and the number of tokens that it keeps.

The self-check runs on short rows. A model that chooses 2,048 tokens of a row is plain attention there, and may couple
records only in longer rows. So it is compared again at lengths just above such limits, if records are that long.
"""

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from .heads import base_model
from .limits import positions_of

LIMIT = re.compile(r"(?!.*layers).*(window|chunk|block|local|topk|top_k|radius|stride|landmark|segment).*")
MARGIN = 9  # tokens above a limit


def longer_rows(model: nn.Module, shortest: int, longest: Callable[[], int | None]) -> list[int]:
    """Lengths above `shortest` at which a model is compared again.

    `longest()` gives the tokens of the longest record, or None if that is not known. It is called only if it matters.

    >>> from transformers import MistralConfig, MistralForCausalLM
    >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, vocab_size=9)
    >>> model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=40))
    >>> longer_rows(model, 11, lambda: 400), longer_rows(model, 11, lambda: 30)
    ([49], [])
    """
    config = getattr(base_model(model), "config", None)
    if config is None:
        return []
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    values = [value for name, value in vars(text).items() if LIMIT.fullmatch(name)]
    flat = [x for value in values for x in (value if isinstance(value, (list, tuple)) else [value])]
    limits = {x for x in flat if isinstance(x, int) and not isinstance(x, bool) and x >= shortest}
    if not limits:
        return []
    try:
        most = positions_of(model)
    except (AttributeError, NotImplementedError):  # images, sound
        return []
    limits = {limit for limit in limits if limit < most}
    reached = longest() if limits else None
    return sorted(min(limit + MARGIN, most) for limit in limits if reached is None or limit < reached)
