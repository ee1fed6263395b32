"""Computes values in background threads before they are needed, in the order in which they will be.

It is used for noise, which is a function of key, step, name and index: whoever computes a piece of it, and whenever,
gets the same numbers. So nothing depends on what was computed ahead but speed.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

import torch

Piece = TypeVar("Piece")
Value = TypeVar("Value")

MOST_THREADS = 4


def free_threads(device: torch.device) -> int:
    """How many cores have nothing else to do while a model runs on a device.

    On a CPU, those that torch does not use; beside another device, all but the one that gives it work. Ranks on one
    machine share its cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    busy = torch.get_num_threads() if device.type == "cpu" else 1
    return max(0, min(MOST_THREADS, cores - busy))


class Ahead(Generic[Piece, Value]):
    """`take(piece)` is `compute(piece)`, from a background thread if one has come so far.

    Args:
        compute: A pure function. What it raises in a thread is raised by `take`.
        pieces: The pieces in the order of their use. Others can be taken too, and are computed then.
        threads: Number of threads; 0 computes nothing ahead.
        most: Values that exist at a time, at most.

    >>> with Ahead(abs, [-3, -4, -5], threads=1, most=2) as ahead:
    ...     [ahead.take(piece) for piece in (-3, -4, -5, -6)]
    [3, 4, 5, 6]
    """

    def __init__(self, compute: Callable[[Piece], Value], pieces: Iterable[Piece], threads: int, most: int) -> None:
        self._compute = compute
        self._pieces = iter(pieces)
        self._pool = ThreadPoolExecutor(threads, "noise") if threads else None
        self._values: dict[Piece, Future[Value]] = {}
        self._submit(most)

    def _submit(self, count: int) -> None:
        if self._pool is not None:
            for piece in islice(self._pieces, count):
                self._values[piece] = self._pool.submit(self._compute, piece)

    def take(self, piece: Piece) -> Value:
        """The value of a piece, which is then forgotten."""
        value = self._values.pop(piece, None)
        # A piece that no thread has begun is computed here, rather than waited for.
        result = self._compute(piece) if value is None or value.cancel() else value.result()
        self._submit(1)
        return result

    def close(self) -> None:
        """Forget all values and stop the threads; each ends the piece that it is at."""
        self._values = {}
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> "Ahead[Piece, Value]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
