"""Norms and sums in full precision, whatever else the process has asked for.

A ghost norm cancels: it is the small difference of large products. With operands rounded to ten bits (TF32) or eight
(bfloat16) it can come out far below the norm of what is then summed, and a record would weigh more than the clipping
norm. The model's own passes may be coarse, as mixed precision makes them; what is computed from them may not.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

# Where torch may round float32 operands of matrix products. Convolutions only make activations and their gradients.
PRODUCTS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products of float32 operands as they are, and no autocast but the one that Accelerate puts around the model.

    >>> torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    >>> with full_precision(torch.device("cpu")):
    ...     torch.backends.mkldnn.matmul.fp32_precision
    'ieee'
    >>> torch.backends.mkldnn.matmul.fp32_precision
    'bf16'
    >>> torch.backends.mkldnn.matmul.fp32_precision = "none"
    """
    before = [place.fp32_precision for place in PRODUCTS]
    try:
        for place in PRODUCTS:
            place.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for place, precision in zip(PRODUCTS, before, strict=True):
            place.fp32_precision = precision


def accumulation_dtype(p: Tensor) -> torch.dtype:
    """The type in which sums are made: float32, or float64 where the weights are."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def unsharded(weight: Tensor) -> Tensor:
    """The whole of a weight that FSDP2 has spread over the ranks (a collective); any other as it is."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def like(value: Tensor, weight: Tensor) -> Tensor:
    """A whole tensor in the type, on the device and, under FSDP2, in the shards of a weight."""
    if isinstance(weight, DTensor):
        value = value.to(weight.device_mesh.device_type, weight.dtype)
        return distribute_tensor(value, weight.device_mesh, weight.placements)
    return value.to(weight)
