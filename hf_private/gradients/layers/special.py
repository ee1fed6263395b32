"""Inputs of layers that are not activations of the records, one row after the other."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .routed import Routed
from .tap import Tap
from .tapped import Tapped

Rule = Callable[[Tensor], Tensor]


def special(tap: Tap, x: Tensor) -> Callable[[Rule], Tensor] | None:
    """How a rule takes `x`: the copies of what all records share, or rows of experts in the order of records."""
    from .shared import Shared

    if isinstance(x, Tapped) and not tap.lone:
        x = Shared.of(x)
    if isinstance(x, Shared):
        return lambda rule: x.with_copies(rule(x.copies))
    if isinstance(x, Routed):
        route = x.route
        return lambda rule: Routed.of(route.unpadded(rule(route.padded(x.as_subclass(Tensor)))), route)
    return None
