"""Whether a call with one copy per record gives the results and gradients of the call without copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .attribution import UncoveredError
from .once import is_same
from .shared import Shared

if TYPE_CHECKING:
    from .copied_call import CopiedCall

RANDOM = frozenset("dropout dropout1d dropout2d dropout3d alpha_dropout bernoulli rand_like randn_like".split())


def agreement(copied_call: CopiedCall, run: Callable, for_all: bool) -> list[int | None] | None:
    """The records' axis in each result of `run(leaves)` if results and gradients are those of the call, else None.

    `run` takes the arguments with copies. With `for_all`, each record's result must be that of the call.
    """
    leaves, records, call, in_place = copied_call.leaves, copied_call.records, copied_call.call, copied_call.in_place
    if any(isinstance(x, Tensor) and x.is_meta for x in leaves):
        with torch.random.fork_rng():
            return _placed(run(leaves), call(_one(leaves)), records, for_all, 0.0)
    several, single = ([_leaf(x, one) for x in leaves] for one in (False, True))
    # Gradient checkpointing counts what is saved: this is not for it.
    keep = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.enable_grad(), keep, torch.random.fork_rng():
        copied, plain = (_changeable(x) if in_place else x for x in (several, single))
        wanted = call(plain)
        limit = _limit(plain, wanted)
        try:
            found = run(copied)
        except UncoveredError:
            return None
        if in_place:
            found, wanted = copied[0], plain[0]
            placed: list[int | None] | None = [None]
            same = found.shape == wanted.shape
            if isinstance(found, Shared):
                found = found.copies  # each of them, changed in place
            same = same and _close(found, wanted, limit)
            pairs = [(found, wanted)]
        else:
            placed = _placed(found, wanted, records, for_all, limit)
            if placed is None:
                return None
            back = [restored(x, a) for x, a in zip(tree_leaves(found), placed, strict=True)]
            pairs = [(x, y) for x, y in zip(back, tree_leaves(wanted), strict=True) if isinstance(x, Tensor)]
            same = all(_close(x, y, limit) for x, y in pairs)
        if getattr(copied_call.func, "__name__", "") in RANDOM:
            return placed
        return placed if same and _same_gradients(pairs, several, single, limit) else None


def _limit(leaves: list[Any], result: Any) -> float:
    """How far results may be apart: the square root of the precision of the least precise tensor."""
    tensors = [x for x in tree_leaves([leaves, result]) if isinstance(x, Tensor) and x.is_floating_point()]
    return max((torch.finfo(x.dtype).eps for x in tensors), default=0.0) ** 0.5


def _placed(result: Any, wanted: Any, records: int, for_all: bool, limit: float) -> list[int | None] | None:
    """The axis of the records in each of the results, None for what all share; None if the results are not those."""
    axes: list[int | None] = []
    for x, y in zip(tree_leaves(result), tree_leaves(wanted), strict=True):
        if not isinstance(x, Tensor) or for_all:
            axes.append(None)
            if isinstance(x, Tensor) and x.shape[1:] != y.shape:
                return None
            continue
        fits = [
            a
            for a in range(y.dim())
            if x.dim() == y.dim() + 1
            and x.shape[a + 1] * records == y.shape[a]
            and all(x.shape[b + 1] == y.shape[b] for b in range(y.dim()) if b != a)
        ]
        close = [a for a in fits if _close(restored(x, a), y, limit)]
        if not close:
            return None
        axes.append(close[0])
    return axes


def restored(x: Any, axis: int | None) -> Any:
    """Results (N, ...) with the records where the call has them."""
    return x.movedim(0, axis).flatten(axis, axis + 1) if isinstance(x, Tensor) and axis is not None else x


def _one(leaves: list[Any]) -> list[Any]:
    """The arguments if all records share one copy."""
    return [x.copies[0].detach() if isinstance(x, Shared) else x for x in leaves]


def _leaf(x: Any, one: bool) -> Any:
    """An argument by itself, outside the model's graph; of what is shared one copy, or all of them."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return _one([x])[0] if one else x
    if not isinstance(x, Shared):
        return x.detach().clone().requires_grad_(x.requires_grad)
    if one:
        return x.copies[0].detach().clone().requires_grad_()
    same = x.copies[:1].detach().expand_as(x.copies)  # dropout in training has made them differ
    return x.with_copies((same if is_same(x.copies) else same.clone()).requires_grad_())


def _changeable(leaves: list[Any]) -> list[Any]:
    """For a call that changes its first argument: a copy of that."""
    first = leaves[0]
    return [first.with_copies(first.copies.clone()) if isinstance(first, Shared) else first.clone(), *leaves[1:]]


def _same_gradients(pairs: list[tuple[Tensor, Tensor]], several: list[Any], single: list[Any], limit: float) -> bool:
    """Whether gradients with copies, added up over the records, are those without."""
    pairs = [(x, y) for x, y in pairs if y.requires_grad and x.requires_grad]
    inputs = [
        (x.copies if isinstance(x, Shared) else x, y)
        for x, y in zip(several, single, strict=True)
        if isinstance(x, Tensor) and x.is_floating_point() and y.requires_grad
    ]
    if not pairs or not inputs:
        return True
    weights = [torch.randn_like(y) for _, y in pairs]
    copied = [w.expand_as(x) for w, (x, _) in zip(weights, pairs, strict=True)]
    found = torch.autograd.grad([x for x, _ in pairs], [x for x, _ in inputs], copied, allow_unused=True)
    wanted = torch.autograd.grad([y for _, y in pairs], [y for _, y in inputs], weights, allow_unused=True)
    for g, expected in zip(found, wanted, strict=True):
        if g is None or expected is None:
            if g is not None or expected is not None:
                return False
            continue
        each = pairs[0][0].dim() > pairs[0][1].dim()  # one result for each record, all with the same weights
        times = len(pairs[0][0]) if each else 1
        total = g.sum(0) if g.dim() > expected.dim() else g
        if not _close(total, times * expected, limit):
            return False
    return True


def _close(x: Tensor, y: Tensor, limit: float) -> bool:
    if x.is_meta or not x.is_floating_point():
        return True
    x, y = x.detach(), y.detach()
    sizes = y.abs()[torch.isfinite(y)]
    largest = float(sizes.max()) if sizes.numel() else 0.0
    return torch.allclose(x, y, rtol=limit, atol=limit * largest, equal_nan=True)
