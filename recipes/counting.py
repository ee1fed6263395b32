"""Counting what a step costs: the peak of live tensor bytes, and torch's count of operations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the model's storages and of all that operations create while they live; keeps the peak."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = WeakIdKeyDictionary()
        for tensor in (*model.parameters(), *model.buffers()):
            self._track(tensor.untyped_storage())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._track(tensor.untyped_storage())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = _Finally(lambda: self._free(size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, size: int) -> None:
        self.live -= size


class _Finally:
    """Runs a function when the entry that holds it goes."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def __del__(self) -> None:
        self.function()


@contextmanager
def counted(model: nn.Module) -> Iterator[dict[str, float]]:
    row: dict[str, float] = {}
    with FlopCounterMode(display=False) as flops, LiveBytes(model) as live:
        yield row
    row["flops"], row["bytes"] = flops.get_total_flops(), live.peak
