"""A trainable parameter as the model's code sees it while the book is open.

Wherever the model uses it, in the forward pass of its own module or of another, the call comes here: to the rule of
that torch function, or, if there is none, to `shared.py`, where each record gets its own copy of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .attribution import PART

if TYPE_CHECKING:
    from .tap import Tap


class Tapped(Tensor):
    """A parameter, or an expert or the transpose of one, that shares the parameter's storage.

    As a leaf it collects what autograd finds in a batch of one record. In other batches nothing may reach it.
    """

    tap: Tap
    entry: str  # its name in the book
    plain: Tensor  # the same values outside the graph
    _is_param = True  # for `isinstance(p, nn.Parameter)`

    @classmethod
    def of(cls, parameter: Tensor, tap: Tap, entry: str) -> Tapped:
        plain = parameter.detach()
        tapped = torch.Tensor._make_subclass(cls, plain, True)
        tapped.tap, tapped.entry, tapped.plain = tap, entry, plain
        return tapped

    def part(self, key: str, plain: Tensor) -> Tapped:
        """One index of the first axis ("3"), a range of it ("0:32"), or the transpose ("T")."""
        return Tapped.of(plain, self.tap, f"{self.entry}{PART}{key}")

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        from .shared import dispatch

        return dispatch(func, args, kwargs or {})


def plainly(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Call a function without ado: autograd sees a tapped parameter as the leaf that it is."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _integer(index: Any) -> int | None:
    if isinstance(index, int) and not isinstance(index, bool):
        return index
    if type(index) is Tensor and index.dim() == 0 and not index.is_floating_point() and index.dtype != torch.bool:
        return int(index)
    return None


def part_of(func: Callable, args: tuple, kwargs: dict) -> Tapped | tuple[Tapped, ...] | None:
    """The parts of a parameter that a call picks, if it is one of those that are known; None otherwise."""
    first = args[0] if args else None
    if not isinstance(first, Tapped) or any(isinstance(x, Tensor) and isinstance(x, Tapped) for x in args[1:]):
        return None
    name, plain, whole = getattr(func, "__name__", ""), first.plain, PART not in first.entry
    if name == "__getitem__" and len(args) == 2 and plain.dim() > 1 and whole:
        index, length = _integer(args[1]), len(plain)
        if index is not None:
            index %= length
            return first.part(str(index), plain[index])
        if isinstance(args[1], slice) and args[1].step in (None, 1):
            start, stop, _ = args[1].indices(length)
            return first.part(f"{start}:{stop}", plain[start:stop])
        return None
    dims = tuple(args[1:]) + tuple(kwargs.values())
    swaps = name in ("t", "numpy_T") or (name == "transpose" and sorted(d % 2 for d in dims if isinstance(d, int)) == [0, 1])
    if plain.dim() == 2 and (swaps or func in _TRANSPOSES):
        return first.part("T", plain.t())
    if name in ("chunk", "split") and len(args) == 2 and not kwargs and plain.dim() > 1 and whole:
        bounds, start = [], 0
        for piece in plain.chunk(args[1]) if name == "chunk" else plain.split(args[1]):
            bounds.append((start, start + len(piece)))
            start += len(piece)
        return tuple(first.part(f"{a}:{b}", plain[a:b]) for a, b in bounds)
    return None


_TRANSPOSES = {Tensor.T.__get__, Tensor.mT.__get__}
