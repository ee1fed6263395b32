"""A trainable parameter as the model's code sees it while the book is open.

Wherever the model uses it, in the forward pass of its own module or of another, the call comes here: to the rule of
that torch function, or, if there is none, to `copied_call.py`, where each record gets its own copy of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
        """A part of it, as parts.py names them."""
        numbers = ",".join(str(n) for n in self.plain.shape)
        return Tapped.of(plain, self.tap, f"{self.entry}{PART}{key}:{numbers}")

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        from .dispatch import dispatch

        return dispatch(func, args, kwargs or {})


def leaves(x: Any) -> Iterator[Any]:
    """All values in lists, tuples and dictionaries. Small functions take less time than torch's trees."""
    if isinstance(x, (list, tuple)):
        for y in x:
            yield from leaves(y)
    elif isinstance(x, dict):
        for y in x.values():
            yield from leaves(y)
    else:
        yield x


def plainly(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Call a function without ado: autograd sees a tapped parameter as the leaf that it is."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def is_in_place(func: Callable, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call changes its first argument: by the function's name, or by `inplace=True`."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_") or bool(kwargs.get("inplace"))


RESHAPES = frozenset("view reshape flatten squeeze unsqueeze unflatten view_as reshape_as".split())
CASTS = frozenset("to float double half bfloat16 type type_as contiguous clone".split())
MATRIX_TRANSPOSE: Any = Tensor.mT.__get__  # pyrefly: ignore
TRANSPOSES: set[Any] = {MATRIX_TRANSPOSE, Tensor.T.__get__}  # pyrefly: ignore


def part_of(func: Callable, args: tuple, kwargs: dict) -> Tapped | tuple[Tapped, ...] | None:
    """The parts of a parameter that a call picks, if it is one of those that are known; None otherwise."""
    first = args[0] if args else None
    name = getattr(func, "__name__", "")
    if not isinstance(first, Tapped) or any(isinstance(x, Tapped) for x in args[1:]):
        return None
    plain = first.plain
    if func in TRANSPOSES or name in ("t", "transpose"):
        swaps = func is MATRIX_TRANSPOSE or _swaps(plain.dim(), args[1:], kwargs)
        return first.part("T", plain.mT) if plain.dim() > 1 and swaps else None
    if name in CASTS:
        cast = func(plain, *args[1:], **kwargs)
        return first.part("C", cast) if cast.is_floating_point() else None
    if name in RESHAPES:
        return first.part("R", func(plain, *args[1:], **kwargs))
    if name == "__getitem__" and plain.dim() > 0:
        return _indexed(first, args[1])
    if name in ("chunk", "split", "unbind") and plain.dim() > 1 and not kwargs and len(args) < 3:
        parts, start = [], 0
        for piece in func(plain, *args[1:]):
            rows = 1 if name == "unbind" else len(piece)
            parts.append(first[start] if name == "unbind" else first[start : start + rows])
            start += rows
        return tuple(parts)
    return None


def _indexed(whole: Tapped, index: Any) -> Tapped | None:
    plain, length = whole.plain, len(whole.plain)
    if isinstance(index, slice) and index.step in (None, 1):
        start, stop, _ = index.indices(length)
        return whole.part(f"S{start}-{stop}", plain[start:stop])
    if isinstance(index, Tensor) and (index.dim() or index.is_floating_point() or index.dtype == torch.bool):
        return None
    if isinstance(index, (int, Tensor)) and not isinstance(index, bool):
        number = int(index) % length
        return whole.part(f"I{number}", plain[number])
    return None


def _swaps(rank: int, dims: tuple, kwargs: dict) -> bool:
    """Whether the last two axes change places, and no others."""
    named = (*dims, *kwargs.values())
    return sorted(d % rank for d in named) == [rank - 2, rank - 1] if named else rank == 2
