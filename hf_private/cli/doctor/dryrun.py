"""What one micro-batch costs, counted instead of guessed: a step is run on tensors without data.

On the meta device every operation computes shapes only, so that a step of a model with billions of parameters takes
seconds and no memory. `PeakMemory` adds up the storages that are alive at each moment; torch counts the operations.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from hf_private.gradients.bookkeeper import BookKeeper, trainable
from hf_private.gradients.method import Method
from hf_private.gradients.persample import Grams


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors that are created inside the block: alive now, and at most at once.

    >>> with PeakMemory() as memory:
    ...     x = torch.ones(1000)
    ...     for _ in range(3):
    ...         y = x + 1
    >>> memory.live, memory.peak
    (8000, 12000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        known_before = [x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._enter(x.untyped_storage(), known_before)
        return out

    def _enter(self, storage: torch.UntypedStorage, arguments: list[torch.UntypedStorage]) -> None:
        # A view of a tensor that was there before the block (a weight) is nothing new.
        if storage in self._known or any(storage._cdata == other._cdata for other in arguments):
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._leave, size)

    def _leave(self, size: int) -> None:
        self.live -= size


@dataclass(frozen=True)
class Cost:
    """Peak bytes of one micro-batch beyond the weights, with the sums so far, and its floating-point operations."""

    peak_bytes: int
    flops: int


def measure(step: Callable[[], None]) -> Cost:
    """Run `step` and count what it costs."""
    with FlopCounterMode(display=False) as operations, PeakMemory() as memory:
        step()
    return Cost(memory.peak, operations.get_total_flops())


def plain_step(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    """A micro-batch of ordinary training, after the first: gradients add up on every trainable parameter."""
    for p in trainable(model).values():
        p.grad = torch.zeros_like(p)
    loss().sum().backward()
    model.zero_grad(set_to_none=True)


def private_step(model: nn.Module, loss: Callable[[], Tensor], method: Method) -> None:
    """A micro-batch of a private step, after the first: backward pass, norms, clipped sums that add up."""
    some = next(iter(trainable(model).values()))
    dtype = torch.float64 if some.dtype == torch.float64 else torch.float32
    sums = {block: torch.zeros(shape, dtype=dtype, device=some.device) for block, shape in method.blocks.items()}
    with BookKeeper(model, method) as book:
        losses = loss()
        book.backward(losses)
        factors, grams = losses.detach().to(dtype), Grams()
        records = book.pop_entries()
        for value in records.values():
            try:
                value.sq_norm(grams)
            except (NotImplementedError, RuntimeError):  # an embedding's norm looks at the indices, which have no data
                pass
        del grams, value
        for block in list(records):  # the book is freed piece by piece
            records.pop(block).weighted_sum(factors, sums[block])
