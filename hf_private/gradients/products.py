"""Products of half-precision matrices, added up in float32: in one place, because clipping depends on how they round.

A Gram matrix or a clipped sum of bfloat16 operands is a sum of products that float32 holds exactly (8 bits times 8
bits). So it may be computed by hardware that multiplies bfloat16 and adds in float32, at several times the speed of
float32. It may not be computed with sums in bfloat16, which lose what is small: the norm of a record could be too low.
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

**Weights.** In a clipped sum `sum_n c_n l_n^T r_n` the weight multiplies one operand before the product, which rounds
again. Let u = 2^-8, the relative error of rounding to bfloat16. The entries of c l_t change by at most u c |l_ti|, the
position's row by at most u c |l_t|, and so the record's part of the sum by at most

    |sum_t (c l_t + e_t)^T r_t - c sum_t l_t^T r_t| <= sum_t |e_t| |r_t| <= u c sum_t |l_t| |r_t| =: u c L

in the Frobenius norm. A norm that is taken as |g| + u L keeps c (|g| + u L) <= clip_norm, hence the part that is
released, rounding included, at most the clip norm. `Outer.sq_norm` does this; its Gram form has the lengths |l_t| and
|r_t| anyway.

CPUs that multiply bfloat16 do so twice as fast where the result is bfloat16, too. So the gradient of each long record
is computed in bfloat16, from sums in float32 that are rounded once, and the weighted gradients of the records are
added up in float32. That changes c g by at most u c |g| <= u c L. What is smaller than bfloat16's least number (1e-38)
may be lost, which only shortens the part.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor

HALF = torch.bfloat16
ROUNDING = 2.0**-8 * (1 + 2.0**-7)  # u, and what float32 rounds when the operand is scaled
BY_RECORDS = 64  # positions: the gradients of shorter records take longer to add up than to compute
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
        return _multiply(left)(widen(left), widen(right))
    return _way(left, right)(left, right)


def weighted_product(
    left: Tensor, right: Tensor, c: Tensor, into: Tensor | None = None, replaces: bool = False
) -> Tensor:
    """`sum_n c_n left_n^T right_n` (p, d) of (N, T, p), (N, T, d) and (N,); added in place to `into`, if given.

    With `replaces`, what is in `into` is overwritten instead.
    """
    if into is not None and replaces and is_half(left, right):
        into.zero_()
    half = is_half(left, right)
    left, right = operands(left, right)
    if half and _by_records(left, right):
        total = torch.zeros(left.shape[2], right.shape[2], device=left.device) if into is None else into
        for one, other, weight in zip(left, right, c.tolist(), strict=True):
            total.add_(torch.mm(one.t(), other), alpha=weight)  # in float32
        return total
    scale = c.to(torch.promote_types(left.dtype, torch.float32)).view(-1, 1, 1)
    if left.shape[2] <= right.shape[2]:  # scale the smaller factor; bfloat16 becomes float32
        left = left * scale
    else:
        right = right * scale
    left, right = left.flatten(0, 1).t(), right.flatten(0, 1)
    if into is None:
        return product(left, right, half)
    way = _way(left, right) if half else _widened
    if way not in (_by_onednn, _widened):
        return into.add_(way(left, right))
    left, right = widen(left), widen(right)
    with _Rounding() if way is _by_onednn else nullcontext():
        if replaces:
            return torch.mm(left, right, out=into)
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


def _by_records(left: Tensor, right: Tensor) -> bool:
    """Whether to sum the gradients of records that were computed in bfloat16."""
    pays = left.shape[1] >= BY_RECORDS and left.shape[2] * right.shape[2] <= IN_CACHE
    return pays and _rounds_once(left.device.type, _class(left), _class(right)[1])


@cache
def _rounds_once(device: str, left: tuple[int, int], columns: int) -> bool:
    """Whether a CPU adds up products of bfloat16 in float32 when the result is bfloat16."""
    if device != "cpu" or not _ways(device):
        return False

    def rounded(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a.t().contiguous().t(), b).float()  # the layout of a sum

    return agrees(rounded, device, 2, (left[1], left[0]), columns, within=ROUNDING)


@torch.no_grad()
def agrees(way: Product, device: str, axes: int, left: tuple[int, int], columns: int, within: float = AGREES) -> bool:
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
    return found.dtype == torch.float32 and bool(((found - exact).abs() <= within * exact).all())
