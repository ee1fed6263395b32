"""Cost of one micro-batch, measured by running a step on tensors without data.

On the meta device every operation computes shapes only, so a step of a model with billions of parameters takes seconds
and no memory. `PeakMemory` adds up the storages that are alive at each moment; torch counts the operations.
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from hf_private.gradients import onednn
from hf_private.gradients.bookkeeper import BookKeeper, trainable
from hf_private.gradients.method import Method
from hf_private.gradients.persample import Grams, PerSample
from hf_private.gradients.tensors import accumulation_dtype


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors created inside the block: alive now (`live`), and at most at once (`peak`).

    >>> with PeakMemory() as memory:
    ...     x = torch.ones(1000)
    ...     for _ in range(3):
    ...         y = x + 1
    >>> memory.live, memory.peak
    (8000, 12000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        known_before = [x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._enter(x.untyped_storage(), known_before)
        return out

    def _enter(self, storage: torch.UntypedStorage, arguments: list[torch.UntypedStorage]) -> None:
        # A view of a tensor that existed before the block (a weight) takes no new memory.
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


class _Modules:
    """In the place of torch's tracker of modules, which cannot take inputs that all records share."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def measure(step: Callable[[], None]) -> Cost:
    """Run `step` and measure its cost."""
    counter = FlopCounterMode(display=False, custom_mapping=onednn.operations())
    setattr(counter, "mod_tracker", _Modules())  # noqa: B010
    with counter as operations, PeakMemory() as memory:
        step()
    return Cost(memory.peak, operations.get_total_flops())


def plain_step(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    """A micro-batch of ordinary training, not the first: gradients add up on every trainable parameter."""
    for p in trainable(model).values():
        p.grad = torch.zeros_like(p)
    loss().sum().backward()
    model.zero_grad(set_to_none=True)


def private_step(model: nn.Module, loss: Callable[[], Tensor], method: Method, rows_per_unit: int = 1) -> None:
    """A micro-batch of a private step, not the first: backward pass, norms, clipped sums that add up."""
    first = next(iter(trainable(model).values()))
    dtype = accumulation_dtype(first)
    sums = {block: torch.zeros(shape, dtype=dtype, device=first.device) for block, shape in method.blocks.items()}
    with BookKeeper(model, method) as book:
        book.rows_per_record = rows_per_unit
        losses = loss()
        book.backward(losses)
        factors = losses.detach().to(dtype)
        entries = book.pop_entries()
        _take_norms(entries)
        for block in list(entries):  # frees the entries one by one
            entries.pop(block).weighted_sum(factors, sums[block])


def _take_norms(entries: Mapping[str, PerSample]) -> None:
    grams = Grams()
    for value in entries.values():
        # The norm of an embedding reads the indices, which have no data on the meta device.
        with suppress(NotImplementedError, RuntimeError):
            value.sq_norm(grams)
