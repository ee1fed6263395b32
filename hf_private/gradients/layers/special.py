"""Inputs of layers that are not activations of the records, one row after the other."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .once import expanded
from .routed import Routed
from .tap import Tap
from .tapped import Tapped

Rule = Callable[[Tensor], Tensor]


def is_special(tap: Tap, x: Tensor) -> bool:
    """A quick look: whether `special` has to look."""
    return type(x) is not Tensor or x.shape[0] % tap.batch_size != 0


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
    if type(x) is Tensor and not tap.book.sharded and _is_shared(tap, x):
        copies = expanded(x, tap.batch_size)
        names, attribution = frozenset(tap.names.values()), tap.book.attribution
        return lambda rule: Shared(rule(copies), tap, names, attribution.is_due)
    return None


def _is_shared(tap: Tap, x: Tensor) -> bool:
    """Whether all records share `x`. What had this shape in a batch of another size, and was shared, still is: an axis
    of the records would have another length."""
    shared = not _has_records(x, tap.batch_size)
    if x.requires_grad:
        return shared
    known = tap.hints.setdefault(("shared", tuple(x.shape)), set())
    if shared:
        known.add(tap.batch_size)
    return bool(known)


def _has_records(x: Tensor, records: int) -> bool:
    """Whether an axis may hold the records.

    What all share, such as sines of positions, is (1, T). With a gradient that is all records' tokens in one row.
    """
    leading = x.shape[:-1]
    if leading[:1] == (1,) and records not in leading and not x.requires_grad:
        return False
    return any(length % records == 0 for length in leading)
