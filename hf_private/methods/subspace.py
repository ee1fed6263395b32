"""Shared parts of the subspace methods: orthonormal bases, public randomness for their starts, public gradients."""

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from hf_private.gradients.method import Method
from hf_private.gradients.persample import PerSample

# books(step, method): the entries that `method` makes for the public micro-batches of a step; equal at every call.
Books = Callable[[int, Method], Iterable[Mapping[str, PerSample]]]


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns with the same span, completed if the given ones are dependent, by Householder QR."""
    return torch.linalg.qr(columns).Q


def public_generator(*label: str | int) -> torch.Generator:
    """A CPU generator that is a function of its label: equal on every rank, and public.

    >>> public_generator(0, 7, "w").initial_seed() == public_generator(0, 7, "w").initial_seed()
    True
    """
    digest = hashlib.sha256("/".join(map(str, label)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def broadcast_first(tensors: Iterable[Tensor]) -> None:
    """Give all ranks the tensors of the first: different rounding would turn directions of little weight."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for tensor in tensors:
            torch.distributed.broadcast(tensor, src=0)
