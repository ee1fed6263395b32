"""Per-sample gradients as values: a norm and a weighted sum, without the gradients themselves.

A layer whose output gradient is `ds` and whose input is `a` has, for each record n, the gradient `ds_n^T a_n`.
Clipping needs two things of it only: its norm, and a weighted sum over the records. Both can be had from
`(a, ds)` at a fraction of the memory (ghost norm and book-keeping, Bu et al. 2022). Every gradient method of
this library is a change of such a value, not of the engine.

Index letters: n record, t and s position, i and j rows and columns of the parameter, v vocabulary row.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor
from torch.linalg import vecdot, vector_norm

from . import onednn
from .products import is_half, operands, product, weighted_product, widen

# The Gram form of a norm can cancel: its rounding error is relative to (sum_t |a_t||ds_t|)^2, not to the norm.
# `sq_norm` adds this many units of the dtype's epsilon times that bound, so that it never rounds down.
ROUNDING_UNITS = 32

# Records whose largest entries lie in this range have Gram matrices far from underflow and overflow in float32.
SAFE = (2.0**-25, 2.0**8)

# Numbers that torch may square and add up one after another in float32. Of millions it loses more than the slack.
SUMMED = 4096


def per_record(c: Tensor, like: Tensor) -> Tensor:
    """View one number per record (N,) so that it broadcasts over the other axes of `like` (N, ...)."""
    return c.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent, exactly."""
    return torch.pow(2.0, exponent.double()).to(dtype)


def rescaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """`(y, e)` with x_n = 2^e_n y_n for `x` (N, T, features), exactly, where y's entries are at most 1."""
    least, most = torch.aminmax(x.flatten(1), dim=1)
    largest = torch.maximum(-least, most)
    usual = torch.isfinite(largest) & (largest > 0)  # the others need no scale
    exponent = torch.frexp(largest.where(usual, 1)).exponent.clamp(-120, 120)
    return x * per_record(power_of_two(-exponent, x.dtype), x), exponent


class Gram:
    """`x x^T` (N, T, T) of `x` (N, T, features), kept as strips of its upper half: the lower one is the same.

    A square may underflow where the gradient, a product with something large, does not. Then each record is scaled by
    a power of two, 2^-exponent. On a CPU, where a search for the largest entry takes longer than the product, the
    lengths on the diagonal show first whether it is needed; on other devices, that look would cost more.

    The seam for a kernel: one that gives `dot` of two inputs without their Gram matrices replaces this class.
    """

    STRIP = 32  # positions; narrower strips save more operations and run less well
    WIDE_STRIP = 64  # by oneDNN, which is called once for each record

    strips: list[Tensor]
    lengths: Tensor  # |x_t|: (N, T), as they were scaled

    def __init__(self, x: Tensor, half: bool = False) -> None:
        wide = widen(x.to(torch.bfloat16) if half else x)
        self.half = half  # x is rounded to bfloat16, and products of it may be those of `products.product`
        self.exponent: Tensor | None = None
        if x.device.type not in ("cpu", "meta"):
            wide, self.exponent = rescaled(wide)
        self._multiply(wide)
        if x.device.type == "cpu" and not self._is_safe(features=x.shape[2]):
            wide, self.exponent = rescaled(wide)
            self._multiply(wide)

    def _multiply(self, x: Tensor) -> None:
        length = x.shape[1]
        # oneDNN, which multiplies bfloat16, would copy each strip to make it contiguous.
        columns = x.mT
        if self.half:
            width = length
        elif length >= self.WIDE_STRIP and onednn.fits(x, columns):
            width = self.WIDE_STRIP
        else:
            width = min(self.STRIP, max(self.STRIP // 2, length // 2))
        self.strips = [product(x[:, t : t + width], columns[:, :, t:], self.half) for t in range(0, length, width)]
        diagonals = [strip.diagonal(dim1=1, dim2=2) for strip in self.strips]
        self.lengths = torch.cat(diagonals, 1).clamp_(min=0).sqrt_()
        for strip in self.strips[:-1]:  # beyond its diagonal block, a strip stands for its mirror image too:
            strip[:, :, width:].mul_(math.sqrt(2))  # 2 = sqrt(2) sqrt(2), a half for each side of `dot`

    def _is_safe(self, features: int) -> bool:
        """Whether each record's largest entry is at least SAFE[0], and no product of rows exceeds features SAFE[1]^2.

        The longest row of a record tells: an entry is at least its length divided by sqrt(features). A length of 0 may
        be one that underflowed, and one that is not finite may be one that overflowed, so neither is safe.
        """
        shortest, longest = (x.item() for x in self.lengths.amax(1).aminmax())  # of the records; NaN is not safe
        least, most = (limit * math.sqrt(features) for limit in SAFE)
        return least <= shortest and longest <= most

    def dot(self, other: "Gram") -> Tensor:
        """Sum over all t, s of the products of both matrices, as they were scaled: (N,)."""
        # By vecdot: as a product of matrices it would round down.
        pairs = zip(self.strips, other.strips, strict=True)
        return reduce(Tensor.add_, (vecdot(mine.flatten(1), others.flatten(1)) for mine, others in pairs))


class Grams:
    """Gram matrices of layer inputs, computed once for layers that share an input (q, k, v; gate, up)."""

    KEPT = 32  # more than a layer needs; all of them would cost memory for nothing

    def __init__(self) -> None:
        self._known: dict[tuple, tuple[Tensor, Gram]] = {}

    def __call__(self, x: Tensor, half: bool = False) -> Gram:
        key = (x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version, half)
        # Holding x keeps its address from being given to another tensor while the entry lives.
        entry = self._known.pop(key, None) or (x, Gram(x, half))
        self._known[key] = entry
        if len(self._known) > self.KEPT:
            self._known.pop(next(iter(self._known)))
        return entry[1]


def sq_norms(records: Mapping[str, "PerSample"]) -> dict[str, Tensor]:
    """Squared norms (N,) by block; the Gram matrix of an input that layers share is computed once.

    From the last entry, which a processor's cache may still hold, to the first, whose sum follows.
    """
    grams = Grams()
    norms = {block: value.sq_norm(grams) for block, value in reversed([*records.items()])}
    return {block: norms[block] for block in records}


class PerSample(ABC):
    """The gradients of one parameter, one for each of N records, kept in whatever form is cheapest.

    Guarantee: `sq_norm` is never below the exact value by more than float rounding of the stated slack, and
    `weighted_sum(c)` equals `sum_n c_n g_n`, both as a loop of plain autograd over the records would give.
    """

    @abstractmethod
    def sq_norm(self, grams: Grams | None = None) -> Tensor:
        """Squared L2 norm of each record's gradient: (N,), float32 or better; `grams` remembers shared inputs."""

    @abstractmethod
    def weighted_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        """`sum_n c_n g_n` in the parameter's shape, for weights `c` (N,); added in place to `into`, if it is given."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The gradients themselves: (N, *parameter shape)."""

    @abstractmethod
    def masked(self, keep: Tensor) -> "PerSample":
        """The same with the rows of records where `keep` (N,) is False set to 0 (0 * NaN would stay NaN)."""

    def __add__(self, other: "PerSample") -> "PerSample":
        """Both uses of one parameter together: gradients add *before* the norm, cross terms included."""
        return Dense(self.dense() + other.dense())


def may_remove(c: Tensor) -> bool:
    """Whether a weight may be 0. Only a CPU looks: another device would keep the host waiting for longer than it takes
    to mask."""
    return c.device.type != "cpu" or not c.all()


def weighted_sum(value: PerSample, c: Tensor, into: Tensor | None = None, removes: bool | None = None) -> Tensor:
    """`value.weighted_sum(c)`, where a weight of 0 removes the record for good: its rows may hold NaN or infinity.

    `removes` is `may_remove(c)`, if the caller has asked already.
    """
    if removes is None:
        removes = may_remove(c)
    return (value.masked(c != 0) if removes else value).weighted_sum(c, into)


class Dense(PerSample):
    """Gradients that were formed: `g` (N, *shape). For biases, norms and wherever this is the smaller form."""

    def __init__(self, g: Tensor) -> None:
        self.g = widen(g.detach())

    def sq_norm(self, grams: Grams | None = None) -> Tensor:
        g = self.g.reshape(len(self.g), -1)
        whole = g.shape[1] // SUMMED * SUMMED
        rest = vector_norm(g[:, whole:] if whole else g, dim=1).square_()
        if not whole:
            return rest
        parts = vector_norm(g[:, :whole].unflatten(1, (-1, SUMMED)), dim=2)
        return (parts.double().square().sum(1) + rest).to(rest.dtype)

    def weighted_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        g, c = self.g.reshape(len(self.g), -1).t(), c.to(self.g.dtype)
        if into is None:
            return torch.mv(g, c).view(self.g.shape[1:])
        into.view(-1).addmv_(g, c)
        return into

    def dense(self) -> Tensor:
        return self.g

    def masked(self, keep: Tensor) -> "Dense":
        return Dense(self.g.where(per_record(keep, self.g).bool(), 0))

    def __add__(self, other: PerSample) -> PerSample:
        if isinstance(other, Rows):  # never form (N, vocabulary, d) twice
            return Dense(other.add_to(self.g.clone()))
        return Dense(self.g + other.dense())


FORMED_MAY_BE = 1.6  # times as large as the (a, ds) that they replace


def forming_is_smaller(positions: int, rows: int, columns: int) -> bool:
    """Whether gradients (N, rows, columns) replace their factors: see `Outer.instantiating_is_smaller`."""
    return FORMED_MAY_BE * positions * (rows + columns) >= rows * columns


class Outer(PerSample):
    """`g_n = left_n^T right_n`, with `left` (N, T, rows) and `right` (N, T, columns): a linear layer's weight.

    For a torch Linear (weight out x in) left is the output gradient ds and right the input a; for Hugging Face's
    Conv1D (weight in x out) it is the other way round. `shape` is the parameter's shape (convolutions flatten
    theirs to rows x columns).
    """

    def __init__(self, left: Tensor, right: Tensor, shape: torch.Size | None = None) -> None:
        self.left, self.right = left.detach(), right.detach()  # the input may still carry its graph
        self.shape = shape or torch.Size((left.shape[2], right.shape[2]))

    def instantiating_is_smaller(self) -> bool:
        """BK-MixOpt's choice: form the gradients once 1.6 T (rows + columns) >= rows * columns.

        This compares what stays in the book until the sum: (a, ds), or the gradients that replace them. These may take
        more, at most that much: the norm then needs no Gram matrices, and the sum no second product. That counts most
        for units, whose T is that of all their rows (GPT-2, one unit of 4 x 100 tokens: 0.99 of the speed of records
        instead of 0.92, with the same memory). The paper's rule, 2 T^2 >= rows * columns, compares the
        scratch of the norm and forms them later. recipes/bk_complexity.py has both.
        """
        return forming_is_smaller(self.left.shape[1], self.left.shape[2], self.right.shape[2])

    @property
    def half(self) -> bool:
        """Whether this is the gradient of operands in bfloat16: see products.py."""
        return is_half(self.left, self.right)

    def sq_norm(self, grams: Grams | None = None) -> Tensor:
        half = self.half
        if self.left.shape[1] == 1:
            left, right = operands(self.left, self.right)
            squares = [x.double().square().sum((1, 2)) for x in (left, right)]  # no underflow
            return (squares[0] * squares[1]).to(widen(left).dtype)
        grams = grams or Grams()
        left, right = grams(self.left, half), grams(self.right, half)
        bound = vecdot(left.lengths, right.lengths)
        exact = left.dot(right)
        limits, (_, positions, rows), columns = torch.finfo(exact.dtype), self.left.shape, self.right.shape[2]
        lost = limits.tiny * SAFE[1] ** 2 * positions**2 * (rows + columns)  # by squares that underflow
        total = exact.clamp_(min=0).add_(bound.square(), alpha=ROUNDING_UNITS * limits.eps).add_(lost)
        exponents = [gram.exponent for gram in (left, right) if gram.exponent is not None]
        if exponents:
            exponent = torch.stack(exponents).sum(0)
            total = (total.double() * power_of_two(2 * exponent, torch.float64)).to(total.dtype)
        return total

    def weighted_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        if into is None:
            return weighted_product(self.left, self.right, c).view(self.shape)
        weighted_product(self.left, self.right, c, into.view(self.left.shape[2], -1))
        return into

    def dense(self) -> Tensor:
        left, right = operands(self.left, self.right)
        if right.shape[2] < min(left.shape[2], 16):  # few columns (LoRA's B): several times as slow as few rows
            formed = product(right.transpose(1, 2), left, self.half).transpose(1, 2).contiguous()
        else:
            formed = product(left.transpose(1, 2), right, self.half)
        return formed.view(len(formed), *self.shape)

    def masked(self, keep: Tensor) -> "Outer":
        left, right = (x.where(per_record(keep, x).bool(), 0) for x in (self.left, self.right))
        return Outer(left, right, self.shape)

    def inner(self, other: "Rows") -> Tensor:
        """`<self_n, other_n>` (N,) for a weight used as projection and as embedding (tied LM heads).

        sum_{t,s} left[s, v_t] * (right_s . ds_t), by gathering: no (N, vocabulary, d) tensor.
        """
        left, right = (widen(x) for x in operands(self.left, self.right))
        picked = left.gather(2, other.index.unsqueeze(1).expand(-1, left.shape[1], -1))
        return (picked * torch.bmm(right, widen(other.ds).transpose(1, 2))).sum((1, 2))

    def __add__(self, other: PerSample) -> PerSample:
        if isinstance(other, Outer):
            together = Outer(
                torch.cat([self.left, other.left], 1), torch.cat([self.right, other.right], 1), self.shape
            )
            return Dense(together.dense()) if together.instantiating_is_smaller() else together
        if isinstance(other, Rows):
            return Tied(self, other)
        return other + self


class Rows(PerSample):
    """An embedding's gradients: row `index[n, t]` of record n's gradient gets `ds[n, t]`.

    `index` (N, T), `ds` (N, T, d), `shape` (vocabulary, d).
    """

    def __init__(self, index: Tensor, ds: Tensor, shape: torch.Size) -> None:
        self.index, self.ds, self.shape = index, ds.detach(), shape

    def sq_norm(self, grams: Grams | None = None) -> Tensor:
        # Positions of one record that name the same row add up before the square. A record of T positions gets T
        # rows, used or not: to count those that are used, the host would have to wait for the device.
        records, positions = self.index.shape
        ordered, order = self.index.sort(1)
        place = torch.zeros_like(order)
        place[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
        place += torch.arange(records, device=place.device).unsqueeze(1) * positions
        place = torch.empty_like(order).scatter_(1, order, place)
        ds = widen(self.ds).flatten(0, 1)
        rows = torch.zeros_like(ds).index_add_(0, place.flatten(), ds)
        sq_rows = vector_norm(rows, dim=1).double().square()
        return sq_rows.view(records, positions).sum(1).to(ds.dtype)

    def weighted_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        ds = widen(self.ds)
        scaled = (ds * per_record(c, ds)).flatten(0, 1)
        total = scaled.new_zeros(self.shape) if into is None else into
        return total.index_add_(0, self.index.flatten(), scaled)

    def add_to(self, g: Tensor) -> Tensor:
        """Add these gradients to formed ones `g` (N, vocabulary, d), in place."""
        records = torch.arange(len(g), device=g.device).unsqueeze(1).expand_as(self.index)
        return g.index_put_((records, self.index), widen(self.ds).to(g.dtype), accumulate=True)

    def dense(self) -> Tensor:
        ds = widen(self.ds)
        return self.add_to(ds.new_zeros(len(ds), *self.shape))

    def masked(self, keep: Tensor) -> "Rows":
        return Rows(self.index, self.ds.where(per_record(keep, self.ds).bool(), 0), self.shape)

    def joined(self, other: "Rows") -> "Rows":
        """Both uses of one table."""
        return Rows(torch.cat([self.index, other.index], 1), torch.cat([self.ds, other.ds], 1), self.shape)

    def __add__(self, other: PerSample) -> PerSample:
        return self.joined(other) if isinstance(other, Rows) else other + self


class Tied(PerSample):
    """One weight used as a projection and as an embedding: |outer + rows|^2 with its cross term, neither formed."""

    def __init__(self, outer: Outer, rows: Rows) -> None:
        self.outer, self.rows = outer, rows

    def sq_norm(self, grams: Grams | None = None) -> Tensor:
        outer, rows = self.outer.sq_norm(grams), self.rows.sq_norm()
        exact = outer + rows + 2 * self.outer.inner(self.rows)
        # The cross term may cancel; its rounding is relative to the parts.
        return exact.clamp_min(0) + (outer + rows) * (ROUNDING_UNITS * torch.finfo(exact.dtype).eps)

    def weighted_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        return self.rows.weighted_sum(c, self.outer.weighted_sum(c, into))

    def dense(self) -> Tensor:
        return self.rows.add_to(self.outer.dense())

    def masked(self, keep: Tensor) -> "Tied":
        return Tied(self.outer.masked(keep), self.rows.masked(keep))

    def __add__(self, other: PerSample) -> PerSample:
        if isinstance(other, Outer):
            together = self.outer + other
            return Tied(together, self.rows) if isinstance(together, Outer) else together + self.rows
        if isinstance(other, Rows):
            return Tied(self.outer, self.rows.joined(other))
        return other + self if isinstance(other, Dense) else Dense(self.dense() + other.dense())
