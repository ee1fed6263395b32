"""Products of half-precision matrices, added up in float32: in one place, because clipping depends on how they round.

A Gram matrix of bfloat16 operands is a sum of products that float32 holds exactly (8 bits times 8 bits). So it may be
computed by hardware that multiplies bfloat16 and adds in float32, at several times the speed of float32. It may not be
computed with sums in bfloat16, which lose what is small: the norm of a record could be too low.
The ways to ask torch for such a product:

    out_dtype    `torch.mm(a, b, out_dtype=torch.float32)`, on CUDA
    oneDNN       float32 operands with `fp32_precision = "bf16"`, on CPUs that multiply bfloat16; it rounds to bfloat16
                 itself, which changes nothing in what was bfloat16
    widened      a product in float32, everywhere

Each way but the last is tried once for each class of shapes (by powers of two) against widened operands, which are
chosen so that sums in less than float32 show, and is used only where it agrees. float16 is always widened: its range
is too small for squares.

**Operands.** If one operand of a product is bfloat16, the other is rounded to bfloat16 too (`operands`). This is a
function of one record, the same for its norm and for its sum, so the gradient that is clipped is the one that is
summed: that of the rounded operands. (Under autocast, it is the gradient of what the model has computed: it has
rounded the same activations.)

**Weights.** In a clipped sum `sum_n c_n l_n^T r_n` the weight multiplies one operand. bfloat16 would round it again,
by up to 2^-8 of it. The record's own norm could leave room for that, but the way to multiply follows from the shapes
of the batch: a record more or less, or a longer one, would change what is rounded in the parts of all others, and so
the sum by more than the clip norm where many records are alike. So sums with weights are products in float32.
"""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from . import onednn

HALF = torch.bfloat16
IN_CACHE = 1 << 22  # elements of a gradient, at most: larger ones do not stay in a CPU's cache
AGREES = 2.0**-16  # of sum_k |a_k| |b_k|: float32 stays far below, sums in bfloat16 or TF32 operands far above

Product = Callable[[Tensor, Tensor], Tensor]


def widen(x: Tensor) -> Tensor:
    """Return `x` in float32 or better: half precision is for the model, never for norms and sums."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def is_half(left: Tensor, right: Tensor) -> bool:
    """Whether a product has bfloat16 operands: one at least, and the other bfloat16 or float32."""
    dtypes = {left.dtype, right.dtype}
    return HALF in dtypes and dtypes <= {HALF, torch.float32}


def operands(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors of a gradient as its norm and its sum take them: both bfloat16, or neither.

    >>> [x.dtype for x in operands(torch.ones(1), torch.ones(1, dtype=torch.bfloat16))]
    [torch.bfloat16, torch.bfloat16]
    >>> [x.dtype for x in operands(torch.ones(1), torch.ones(1, dtype=torch.float16))]
    [torch.float32, torch.float32]
    """
    if is_half(left, right):
        return left.to(HALF), right.to(HALF)
    return widen(left), widen(right)


def product(left: Tensor, right: Tensor, half: bool = False) -> Tensor:
    """`left right` of matrices (m, k) and (k, n), or of batches of them (N, m, k) and (N, k, n), in float32 or better.

    Args:
        half: Whether operands may be rounded to bfloat16, as they are or should be. Sums are in float32 either way.
    """
    if not half:
        left, right = widen(left), widen(right)
        return onednn.multiply(left, right) if onednn.fits(left, right) else _multiply(left)(left, right)
    return _way(left, right)(left, right)


def weighted_product(left: Tensor, right: Tensor, c: Tensor, into: Tensor | None = None) -> Tensor:
    """`sum_n c_n left_n^T right_n` (p, d) of (N, T, p), (N, T, d) and (N,); added in place to `into`, if given."""
    left, right = (widen(x) for x in operands(left, right))  # what the weights make of them is not rounded again
    scale = c.to(left.dtype).view(-1, 1, 1)
    if left.shape[2] <= right.shape[2]:  # scale the smaller factor
        left = left * scale
    else:
        right = right * scale
    left, right = left.flatten(0, 1).t(), right.flatten(0, 1)
    if into is None:
        return product(left, right)
    if into.numel() <= IN_CACHE and onednn.fits(left, right):
        return into.add_(onednn.multiply(left, right))
    return torch.addmm(into, left, right, out=into)  # torch's counter of operations does not know `addmm_`


# ---- ways


def _multiply(left: Tensor) -> Callable[..., Tensor]:
    return torch.mm if left.dim() == 2 else torch.bmm


def _by_out_dtype(left: Tensor, right: Tensor) -> Tensor:
    return _multiply(left)(left.to(HALF), right.to(HALF), out_dtype=torch.float32)


def _by_onednn(left: Tensor, right: Tensor) -> Tensor:
    with _Rounding():
        return _multiply(left)(left.float(), right.float())


def _widened(left: Tensor, right: Tensor) -> Tensor:
    return _multiply(left)(left.float(), right.float())


class _Rounding:
    """Lets oneDNN round float32 operands to bfloat16. The setting is the process's, so it is on for one call only."""

    def __enter__(self) -> None:
        self.place = torch.backends.mkldnn.matmul  # pyrefly: ignore[missing-attribute]  # stubs
        self.before = self.place.fp32_precision
        self.place.fp32_precision = "bf16"

    def __exit__(self, *_: object) -> None:
        self.place.fp32_precision = self.before


def _ways(device: str) -> list[Product]:
    """What may be faster than widened operands on a type of device."""
    if device == "cpu":
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return [_by_onednn] if native and torch.backends.mkldnn.is_available() else []
    return [_by_out_dtype] if device == "cuda" else []


# ---- the choice


def _class(x: Tensor) -> tuple[int, ...]:
    """The class of a matrix's shape: its lengths, rounded down to powers of two, and whether 8 divides them."""
    return tuple(n if n < 8 else (1 << n.bit_length() - 1) + bool(n % 8) for n in x.shape[-2:])


def _way(left: Tensor, right: Tensor) -> Product:
    return _best(left.device.type, left.dim(), _class(left), _class(right)[1])


@cache
def _best(device: str, axes: int, left: tuple[int, int], columns: int) -> Product:
    """The way for a class of shapes: a fast one if it agrees with widened operands."""
    found = [way for way in _ways(device) if agrees(way, device, axes, left, columns)]
    return found[0] if found else _widened


@torch.no_grad()
def agrees(way: Product, device: str, axes: int, left: tuple[int, int], columns: int) -> bool:
    """Whether a way adds up products of bfloat16 in float32, for matrices of this size, in batches if `axes` is 3.

    The first product of each sum is 1, the others are near 2^-10: added to 1 in bfloat16, they are lost.
    """
    rows, length = left

    def pattern(shape: tuple[int, int], period: int) -> Tensor:
        whole = torch.arange(math.prod(shape), device=device).remainder_(period).view(shape)
        return whole.float().div_(period).add_(0.5)

    a = pattern((rows, length), 101).mul_(2.0**-10)
    b = pattern((length, columns), 97)
    a[:, 0], b[0] = 1, 1
    if axes == 3:
        a, b = a.repeat(2, 1, 1), b.repeat(2, 1, 1)
    a, b = a.to(HALF), b.to(HALF)
    try:
        found = way(a, b)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    exact = _widened(a, b)  # of numbers above 0: the sum of absolute values, too
    return found.dtype == torch.float32 and bool(((found - exact).abs() <= AGREES * exact).all())
