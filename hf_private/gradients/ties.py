"""Choices among equal scores: `topk` and `sort` leave open which of equal numbers come first.

What torch takes depends on the length of the row. Where a row has a score for each token, that is the padding that a
longer neighbour brings: an indexer of sparse attention whose scores are often exactly 0 then attends to other tokens.
`Choices` decides it either way, so that the self-check can see whether it matters.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

TOPK, SORT, STABLE_SORT = torch.ops.aten.topk.default, torch.ops.aten.sort.default, torch.ops.aten.sort.stable


class Choices(TorchDispatchMode):
    """Watches `topk` and `sort`; with `prefer`, they take equal scores in front, or behind.

    Rows whose length is in `fixed` (a router's scores for its experts) stay as they are.

    >>> scores = torch.tensor([2.0, 0.0, 0.0])
    >>> with Choices("first") as first, Choices("last"):
    ...     scores.topk(2).indices.tolist()
    [0, 2]
    >>> with first:
    ...     scores.topk(2).indices.tolist(), first.lengths
    ([0, 1], {3})
    """

    def __init__(self, prefer: str | None = None, fixed: Collection[int] = ()) -> None:
        super().__init__()
        self.prefer, self.fixed = prefer, fixed
        self.lengths: set[int] = set()  # of the rows that something was chosen from

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in (TOPK, SORT):
            return func(*args, **kwargs)
        names = ("self", "k", "dim", "largest", "sorted") if func is TOPK else ("self", "dim", "descending")
        given = dict(zip(names, args, strict=False)) | kwargs
        x, dim = given["self"], given.get("dim", -1)
        if not x.dim() or not x.shape[dim]:
            return func(*args, **kwargs)
        descending = given.get("largest", True) if func is TOPK else given.get("descending", False)
        length = x.shape[dim]
        self.lengths.add(length)
        if self.prefer is None or length in self.fixed:
            return func(*args, **kwargs)
        values, indices = ordered(x, dim, descending, last=self.prefer == "last")
        kept = given.get("k", length)
        return values.narrow(dim, 0, kept).contiguous(), indices.narrow(dim, 0, kept).contiguous()


def ordered(x: Tensor, dim: int, descending: bool, last: bool) -> tuple[Tensor, Tensor]:
    """Sorted values and their indices; of equal numbers, those in front come first, or those behind."""
    if not last:
        return STABLE_SORT(x, stable=True, dim=dim, descending=descending)
    values, indices = STABLE_SORT(x.flip(dim), stable=True, dim=dim, descending=descending)
    return values, x.shape[dim] - 1 - indices
