"""Shared parts of the subspace methods: orthonormal bases, public randomness for their starts, public gradients."""

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from hf_private.gradients.method import Method
from hf_private.gradients.persample import PerSample

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # constants of SplitMix64 as signed numbers
MIXING = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))

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


def public_start(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *label: str | int) -> Tensor:
    """Numbers between -1 and 1, uniform, that are a function of their label: made on the device, equal on all devices.

    Each is a hash of its index (the finalizer of SplitMix64) and of its label, in whole numbers, which no device
    rounds. Rows (the first axis) are made one after the other, so that their hashes take little memory.

    >>> public_start((2, 3), torch.float32, torch.device("cpu"), 0, "w").abs().max() < 1
    tensor(True)
    """
    found = torch.empty(shape, dtype=dtype, device=device)
    for row, part in enumerate(found):
        digest = hashlib.sha256("/".join(map(str, (*label, row))).encode()).digest()
        first = int.from_bytes(digest[:8], "big", signed=True)
        x = torch.arange(part.numel(), device=device)
        x.mul_(GOLDEN).add_(first)  # int64 wraps around
        for shift, factor in MIXING:
            x.bitwise_xor_(x.bitwise_right_shift(shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
        x.bitwise_right_shift_(40)  # of 64 bits the upper 24, with their sign: float32 holds them
        part.copy_(x.view(part.shape)).add_(0.5).mul_(2.0**-23)
    return found


def broadcast_first(tensors: Iterable[Tensor]) -> None:
    """Give all ranks the tensors of the first: different rounding would turn directions of little weight."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for tensor in tensors:
            torch.distributed.broadcast(tensor, src=0)
