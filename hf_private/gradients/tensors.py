"""Norms and sums in full precision under all settings of torch, and helpers for dtypes and shards.

A ghost norm cancels: it is the small difference of large products. With operands rounded to ten bits (TF32) or eight
(bfloat16) it can be far below the true norm, and a record would weigh more than the clip norm. The forward and
backward pass of the model may use low precision; norms and sums of their results may not.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Where torch may round float32 operands of matrix products. Convolutions only compute activations and their gradients.
PRODUCTS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # pyrefly: ignore[missing-attribute]  # stubs

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer types by bytes of an element


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute products of float32 operands in float32, without autocast except Accelerate's own around the model.

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
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set through `fp32_precision` alone
        older = None
    try:
        torch.set_float32_matmul_precision("highest")  # both ways to set it: otherwise models cannot read `allow_tf32`
        for place in PRODUCTS:
            place.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for place, precision in zip(PRODUCTS, before, strict=True):
            place.fp32_precision = precision


def accumulation_dtype(p: Tensor) -> torch.dtype:
    """The dtype of sums over records: float32, or float64 for float64 weights."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def is_quantised(weight: Tensor) -> bool:
    """Whether a weight is integers and scales that pass for floating point (torchao's): few operations know it."""
    return is_traceable_wrapper_subclass(weight.data) and not isinstance(weight.data, DTensor)


def parts(x: Tensor) -> list[Tensor]:
    """The tensors that a tensor consists of: itself, or the integers and scales of a quantised weight.

    >>> len(parts(torch.zeros(2)))
    1
    """
    if not is_quantised(x):
        return [x]
    names, _ = x.__tensor_flatten__()  # pyrefly: ignore[missing-attribute]  torch's protocol of tensor subclasses
    return [part for name in names for part in parts(getattr(x, name))]


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting for the device; nobody may write to `x` afterwards.

    CUDA copies asynchronously from pinned memory only; torch keeps that memory until the copy is done.
    """
    if device.type == "cuda" and not x.is_cuda:
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def local(x: Tensor) -> Tensor:
    """The tensor, or under FSDP2 this rank's shard of it."""
    return x.to_local() if isinstance(x, DTensor) else x


def unsharded(weight: Tensor) -> Tensor:
    """The whole weight, gathered if FSDP2 has sharded it (a collective)."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def like(value: Tensor, weight: Tensor) -> Tensor:
    """A whole tensor with the dtype, the device and, under FSDP2, the sharding of a weight."""
    if isinstance(weight, DTensor):
        value = value.to(weight.device_mesh.device_type, weight.dtype)
        return distribute_tensor(value, weight.device_mesh, weight.placements)
    return value.to(weight)
