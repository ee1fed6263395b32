"""Products of two narrow matrices that all records share, as LoRA adds to the weights of experts: W + s * lhs @ rhs.

An activation is multiplied with one factor after the other, so each record gets a copy of the factors and not of W.
Whatever else a model does with such a value is done with a copy of it per record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .copied_call import with_copies
from .shared import Shared, wrapper
from .tapped import CASTS, TRANSPOSES, Tapped

MATMULS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
SCALES = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)


class LowRank(Shared):
    """`base + scale * lhs @ rhs`; `copies` are made when they are needed."""

    base: Tensor | None
    lhs: Shared
    rhs: Shared
    scale: float

    @staticmethod
    def __new__(cls, base: Tensor | None, lhs: Shared, rhs: Shared, scale: float) -> LowRank:
        shape = (*lhs.shape[:-1], rhs.shape[-1])
        value = wrapper(cls, lhs.copies, shape, lhs.tap, lhs.entries | rhs.entries, lhs.fresh or rhs.fresh)
        value.base, value.lhs, value.rhs, value.scale = base, lhs, rhs, scale
        return value

    @property
    def copies(self) -> Tensor:  # pyrefly: ignore[bad-override]
        product = self.scale * (self.lhs.copies @ self.rhs.copies)
        return product if self.base is None else product + self.base

    def product(self, x: Tensor) -> Tensor:
        """`x @ self`, for an activation."""
        y = self.scale * _matmul(_matmul(x, self.lhs), self.rhs)
        return y if self.base is None else x @ self.base + y

    def map(self, change: Callable[[Any], Any]) -> LowRank:
        """The value with something done to each of its parts."""
        base = None if self.base is None else change(self.base)
        return LowRank(base, change(self.lhs), change(self.rhs), self.scale)

    def transposed(self) -> LowRank:
        flipped = self.map(lambda x: x.mT)
        return LowRank(flipped.base, flipped.rhs, flipped.lhs, self.scale)


def low_rank(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of a call that makes a product of narrow matrices or keeps it one; `NotImplemented` for others."""
    if len(args) < 2 or not isinstance(args[0], Tensor):
        return _kept(func, args, kwargs) if args and isinstance(args[0], LowRank) else NotImplemented
    first, second = args[:2]
    if func is torch.baddbmm and len(args) == 3 and not _is_shared(first) and set(kwargs) <= {"alpha"}:
        return _of(first, *args[1:], kwargs.get("alpha", 1.0))
    if func in MATMULS and first.dim() == second.dim() == 2 and _is_shared(first):
        return _of(None, first, second, 1.0)
    if isinstance(second, LowRank) and second.dim() == 2 and not _is_shared(first):
        if func in MATMULS:
            return second.product(first)
        if func is F.linear:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            y = second.transposed().product(first)
            return y if bias is None else y + bias
    return _kept(func, args, kwargs)


def _kept(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of a function that leaves a product of narrow matrices one."""
    value, *others = args if isinstance(args[0], LowRank) else args[::-1]
    if not isinstance(value, LowRank):
        return NotImplemented
    if value is args[0] and getattr(func, "__name__", "") in CASTS:
        return value.map(lambda x: func(x, *others, **kwargs))
    if func in TRANSPOSES:
        return value.transposed()
    if len(others) != 1 or kwargs:
        return NotImplemented
    (other,) = others
    if func in SCALES and isinstance(other, (int, float)):
        return LowRank(None if value.base is None else other * value.base, value.lhs, value.rhs, other * value.scale)
    if func in SUMS and isinstance(other, Tensor) and other.shape == value.shape and not _is_shared(other):
        return LowRank(other if value.base is None else value.base + other, value.lhs, value.rhs, value.scale)
    if func is Tensor.__getitem__ and value.dim() == 3 and (isinstance(other, int) or _is_number(other)):
        return value.map(lambda x: x[other])
    return NotImplemented


def _of(base: Tensor | None, lhs: Tensor, rhs: Tensor, scale: float) -> Any:
    """A new product of two factors that all records share, if it is larger than they are."""
    if not (_is_shared(lhs) and _is_shared(rhs)) or lhs.shape[-1] >= min(lhs.shape[-2], rhs.shape[-1]):
        return NotImplemented
    return LowRank(base, _shared(lhs), _shared(rhs), scale)


def _matmul(x: Tensor, factor: Shared) -> Tensor:
    return with_copies(F.linear, (x, factor.mT), {}, factor=True)


def _is_shared(x: Any) -> bool:
    return isinstance(x, (Shared, Tapped))


def _shared(x: Any) -> Shared:
    return Shared.of(x) if isinstance(x, Tapped) else x


def _is_number(index: Any) -> bool:
    return (
        isinstance(index, Tensor) and index.dim() == 0 and not index.is_floating_point() and index.dtype != torch.bool
    )
