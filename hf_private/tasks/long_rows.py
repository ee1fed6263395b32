"""Lengths beyond which a model computes rows in another way: windows, chunks, and the number of tokens that it keeps.

The self-check runs on short rows. A model that chooses 2,048 tokens of a row is plain attention there, and may couple
records only in longer rows. So it is compared again at lengths just above such limits, if records are that long.
"""

import re
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
from torch import nn

from .heads import base_model
from .limits import positions_of
from .made_up import sample

LIMIT = re.compile(r"(?!.*layers).*(window|chunk|block|local|topk|top_k|radius|stride|landmark|segment).*")
CHUNK = 10_000  # rows of an Arrow table
MARGIN = 9  # tokens above a limit


def longer_rows(model: nn.Module, shortest: int, longest: Callable[[], int]) -> list[int]:
    """Lengths above `shortest` at which a model is compared again.

    `longest()` gives the tokens of the longest record. It is called only if it matters.

    >>> from transformers import MistralConfig, MistralForCausalLM
    >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, vocab_size=9)
    >>> model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=40))
    >>> longer_rows(model, 11, lambda: 400), longer_rows(model, 11, lambda: 30)
    ([49], [])
    """
    base = base_model(model)
    config = getattr(base, "config", None)
    if config is None or getattr(base, "main_input_name", "input_ids") != "input_ids":
        return []
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    values = [value for name, value in vars(text).items() if LIMIT.fullmatch(name)]
    flat = [x for value in values for x in (value if isinstance(value, (list, tuple)) else [value])]
    limits = {x for x in flat if isinstance(x, int) and not isinstance(x, bool) and x >= shortest}
    if not limits:
        return []
    most = positions_of(model)
    limits = {limit for limit in limits if limit < most}
    reached = longest() if limits else 0
    return sorted(min(limit + MARGIN, most) for limit in limits if limit < reached)


def longest_of(dataset: Any, length_of: Callable[[Any], int], collate: Callable[[list[Any]], Any]) -> int:
    """Tokens of the longest record; where the collator makes the tokens, of some of the records.

    >>> longest_of([{"input_ids": [5, 6]}, {"input_ids": [7]}], lambda record: len(record["input_ids"]), list)
    2
    """
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        if "input_ids" in dataset.column_names:
            plain: Any = dataset.select_columns(["input_ids"]).with_format("arrow")
            chunks = (chunk for table in plain.iter(CHUNK) for chunk in table.column(0).chunks if len(chunk))
            return max((int(np.nanmax(chunk.value_lengths().to_numpy(False))) for chunk in chunks), default=0)
    longest = max((length_of(dataset[row]) for row in range(len(dataset))), default=0)
    if longest > 1:
        return longest
    batches = [collate([record]) for record in sample(dataset)]
    return max((batch["input_ids"].shape[-1] for batch in batches if "input_ids" in batch), default=0)
