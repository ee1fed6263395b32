"""torch's own multi-head attention: its projections are linear layers, often stacked in one weight."""

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .tap import AutogradOnlyError, Tap

SIGNATURE = signature(F.multi_head_attention_forward)


def attention(tap: Tap, *args: Any, **kwargs: Any) -> Any:
    """Rule for `F.multi_head_attention_forward`: the projections go to the rule for `F.linear`.

    What is left runs as it is, with identities in their places.
    """
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    if a["bias_k"] is not None or a["bias_v"] is not None or tap.lone:
        raise AutogradOnlyError(f"`{tap.path}` has a key and a value of its own.")
    inputs, width = [a["query"], a["key"], a["value"]], len(a["out_proj_weight"])
    projected = _projected(inputs, width, a)
    one = torch.eye(width, dtype=a["query"].dtype, device=a["query"].device)
    a |= dict(zip(("query", "key", "value"), projected, strict=True))
    a |= dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), one)
    out, bias = a["out_proj_weight"], a["out_proj_bias"]
    a |= dict(use_separate_proj_weight=True, out_proj_weight=one, out_proj_bias=None)
    a |= dict.fromkeys(("in_proj_weight", "in_proj_bias"))
    y, weights = F.multi_head_attention_forward(**a)
    return F.linear(y, out, bias), weights


def _projected(inputs: list[Tensor], width: int, a: dict[str, Any]) -> list[Tensor]:
    query, key, value = inputs
    weight, bias = a["in_proj_weight"], a["in_proj_bias"]
    if a["use_separate_proj_weight"]:
        found = [F.linear(x, a[f"{name}_proj_weight"]) for name, x in zip("qkv", inputs, strict=True)]
        return found if bias is None else [x + b for x, b in zip(found, bias.chunk(3), strict=True)]
    if query is key and key is value:
        return list(F.linear(query, weight, bias).chunk(3, -1))
    rows = [slice(n * width, (n + 1) * width) for n in range(3)]
    return [F.linear(x, weight[r], None if bias is None else bias[r]) for x, r in zip(inputs, rows, strict=True)]
