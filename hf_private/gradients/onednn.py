"""Products in float32 by oneDNN, on processors where the library behind `torch.mm` runs at half speed.

On CPUs torch multiplies float32 matrices with MKL, which uses AVX2 on processors of AMD. oneDNN, which torch carries
too, uses AVX512 there: it multiplied twice as fast where we measured it (EPYC with AVX512-BF16, one thread). Operands,
sums and rounding are those of float32 in both.

Torch has no public call of it for dense matrices, so this is the operation that `torch.compile` takes. It is tried
once, and only the products of the engine take it. The model's own passes stay as torch runs them.
"""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

SHORTEST = 32  # rows, columns and terms of a sum, at least: MKL is faster for smaller matrices
AGREES = 2.0**-20  # of sum_k |a_k| |b_k|


def fits(left: Tensor, right: Tensor) -> bool:
    """Whether `multiply` takes these matrices, or batches of them, and is faster."""
    if left.device.type != "cpu" or not left.dtype == right.dtype == torch.float32:
        return False
    shortest = min(*left.shape[-2:], right.shape[-1])
    return shortest >= SHORTEST and _is_dense(left) and _is_dense(right) and is_faster()


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """`left right` of matrices (m, k) and (k, n), or of batches of them (N, m, k) and (N, k, n)."""
    if left.dim() == 2:
        return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")
    return torch.stack([multiply(one, other) for one, other in zip(left, right, strict=True)])


@cache
def is_faster() -> bool:
    """Whether this is a processor of AMD with AVX512, and a build of torch with MKL and oneDNN."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    describe = getattr(torch.cpu, "get_capabilities", None)  # torch 2.9 has none
    processor = describe() if describe else {}
    return str(processor.get("cpu_name")).startswith("AMD") and bool(processor.get("avx512_f")) and _agrees()


@torch.no_grad()
def _agrees() -> bool:
    """Whether the operation exists and computes in float32."""
    one, other = ((torch.arange(64 * 96) % period + 1).view(96, 64) / period for period in (97, 89))
    exact = one.t().double() @ other.double()  # of numbers above 0: the sum of absolute values, too
    try:
        found = multiply(one.t(), other)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return bool(((found - exact).abs() <= AGREES * exact).all())


def _is_dense(x: Tensor) -> bool:
    """Whether the rows of each matrix, or its columns, lie one after the other: oneDNN copies others very slowly."""
    rows, columns = x.stride()[-2:]
    return (columns == 1 and rows == x.shape[-1]) or (rows == 1 and columns == x.shape[-2])


def operations() -> dict[Callable, Callable]:
    """How torch's counter counts the floating-point operations of `multiply`."""
    if not is_faster():
        return {}
    return {torch.ops.mkldnn._linear_pointwise: lambda left, right, *_, **__: 2 * math.prod(left) * right[0]}
