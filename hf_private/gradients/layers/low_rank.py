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
    """`base + scale * lhs @ rhs`, of which `copies` are made when they are needed."""

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

    def transposed(self) -> LowRank:
        base = None if self.base is None else self.base.mT
        return LowRank(base, self.rhs.mT, self.lhs.mT, self.scale)


def low_rank(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of a call that makes a product of narrow matrices or keeps it one; `NotImplemented` for others."""
    first, second = (*args, None, None)[:2]
    if func is torch.baddbmm and len(args) == 3 and not _is_shared(first) and set(kwargs) <= {"alpha"}:
        return _of(first, *args[1:], kwargs.get("alpha", 1.0))
    if func in MATMULS and len(args) == 2 and first.dim() == second.dim() == 2:
        if isinstance(second, LowRank) and not _is_shared(first):
            return second.product(first)
        return _of(None, first, second, 1.0)
    if func is F.linear and isinstance(second, LowRank) and second.dim() == 2 and not _is_shared(first):
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        y = second.transposed().product(first)
        return y if bias is None else y + bias
    if isinstance(first, LowRank) and getattr(func, "__name__", "") in CASTS:
        base, lhs, rhs = (None if x is None else func(x, *args[1:], **kwargs) for x in (first.base, first.lhs, first.rhs))
        return LowRank(base, lhs, rhs, first.scale)
    value, other = (first, second) if isinstance(first, LowRank) else (second, first)
    if not isinstance(value, LowRank) or kwargs:
        return NotImplemented
    if func in SCALES and isinstance(other, (int, float)):
        return LowRank(None if value.base is None else other * value.base, value.lhs, value.rhs, other * value.scale)
    if func in SUMS and isinstance(other, Tensor) and other.shape == value.shape and not _is_shared(other):
        return LowRank(other if value.base is None else value.base + other, value.lhs, value.rhs, value.scale)
    if func in TRANSPOSES:
        return value.transposed()
    if func is Tensor.__getitem__ and value.dim() == 3 and (isinstance(other, int) or _is_number(other)):
        base = None if value.base is None else value.base[other]
        return LowRank(base, value.lhs[other], value.rhs[other], value.scale)
    return NotImplemented


def _of(base: Tensor | None, lhs: Tensor, rhs: Tensor, scale: float) -> Any:
    """A new product of two factors that all records share, if it is larger than they are."""
    if not (_is_shared(lhs) and _is_shared(rhs)) or lhs.shape[-1] >= min(lhs.shape[-2], rhs.shape[-1]):
        return NotImplemented
    lhs, rhs = (Shared.of(x) if isinstance(x, Tapped) else x for x in (lhs, rhs))
    return LowRank(base, lhs, rhs, scale)


def _matmul(x: Tensor, factor: Shared) -> Tensor:
    return with_copies(F.linear, (x, factor.mT), {}, factor=True)


def _is_shared(x: Any) -> bool:
    return isinstance(x, (Shared, Tapped))


def _is_number(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dim() == 0 and not index.is_floating_point() and index.dtype != torch.bool
