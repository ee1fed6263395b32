"""What the subspace methods share: orthonormal bases, and public randomness for their starts."""

import hashlib

import torch
from torch import Tensor


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
