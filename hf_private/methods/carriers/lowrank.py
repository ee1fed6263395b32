"""The thin matrices of RGP and LSG: the carriers, the projection of a gradient on them, and its reconstruction.

RGP (Yu et al. 2021) takes carriers L (rows, r) and R (r, columns), both orthonormal. Of the gradient g of a weight W
(rows, columns) it releases only

    dL = g R^T,    dR = L^T g,

from which dL R + L dR - L S R is g projected on the carriers: r (rows + columns) noised numbers instead of
rows * columns. For a linear layer g = left^T right, so dL = left^T (right R^T) and dR = (left L)^T right: g itself is
never formed. LSG (Ito et al. 2023) also drops the rows of dL and the columns of dR that belong to unimportant neurons:
those with a small sum of |W| over their row or column.

The middle term S is L^T g R^T, which both parts contain: as L^T dL and as dR R^T. They differ by noise and by LSG's
masks. The papers take L^T dL, so that transposing a layer (Linear against Conv1D) changes its update. Here S is the
mean of both: no layout is preferred, and the r x r numbers in question get half the noise variance.

LSG's paper says that the update of W_ij is 0 if and only if row i of dL and column j of dR are. Neither direction
holds: L S R reaches masked rows and columns too, and terms may cancel. Masks reduce the noise; they freeze no weight.
LSG's Algorithm 3 clips each matrix by itself, and so spends a clip norm for each. Here, as in RGP, all blocks of a
record are clipped together: one clip norm is the sensitivity of the whole step.

Rows and columns are those of the stored weight: (out, in) for Linear, (in, out) for Hugging Face's Conv1D, (out, in *
kernel) for convolutions. Index letters as in persample.py, and r for the rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hf_private.gradients.persample import Dense, Outer, PerSample, Rows
from hf_private.methods.subspace import orthonormal


def power_method(
    matrices: list[Callable[[], Tensor]], starts: list[tuple[Tensor, Tensor]], iterations: int
) -> tuple[Tensor, Tensor]:
    """Algorithm 2 of RGP for matrices (m, n) of equal shape, from Gaussian starts (m, r) and (r, n) for each.

    Returns L (k, m, r) with orthonormal columns and R (k, r, n) with orthonormal rows, for k matrices. For a zero
    matrix, and for all with `iterations=0`, these are the orthonormalised starts.
    """
    left, right = (torch.stack(side) for side in zip(*starts, strict=True))
    for _ in range(iterations):
        product = torch.stack([read() @ r.t() for read, r in zip(matrices, right, strict=True)])
        left = orthonormal(_or_else(product, left))
        product = torch.stack([part.t() @ read() for read, part in zip(matrices, left, strict=True)])
        right = _or_else(product, right)
    return left if iterations else orthonormal(left), orthonormal(right.mT).mT


def _or_else(products: Tensor, others: Tensor) -> Tensor:
    """Each matrix of `products` (k, ...), replaced by that of `others` if it is zero."""
    alive = products.flatten(1).any(1)
    return torch.where(alive.view(-1, 1, 1), products, others)


def truncated(products: Sequence[tuple[Tensor, Tensor]], rank: int) -> list[tuple[Tensor, Tensor]]:
    """The best approximations of `left right`, (rows, k) and (k, columns), of at most this rank r.

    Returns U S (rows, r) and V^T (r, columns) of each. By QR of both thin factors, so the products are never formed.
    A CUDA device is waited for in an SVD, so those of equal size are one.
    """
    outer = [torch.linalg.qr(left) for left, _ in products]
    inner = [torch.linalg.qr(right.t()) for _, right in products]
    cores = [a.R @ b.R.t() for a, b in zip(outer, inner, strict=True)]
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for shape in dict.fromkeys(core.shape for core in cores):
        alike = [place for place, core in enumerate(cores) if core.shape == shape]
        svd = torch.linalg.svd(torch.stack([cores[place] for place in alike]), full_matrices=False)
        for place, u, s, vh in zip(alike, *svd, strict=True):
            left, right = outer[place].Q @ u, vh @ inner[place].Q.t()
            found[place] = left[:, :rank] * s[:rank], right[:rank]
    return [found[place] for place in range(len(cores))]


def kept(size: int, sparsity: float) -> int:
    """How many of `size` neurons are kept: a share of 1 - p, at least one."""
    return max(1, round((1 - sparsity) * size))


def important(weight: Tensor, sparsity: float) -> tuple[Tensor, Tensor]:
    """Indices of the rows and of the columns that LSG keeps, by sums of |W|.

    `weight` (rows, channels, kernel positions...); columns are channels * kernel positions, and all kernel positions
    of a channel are kept or dropped together.
    """
    size = weight.detach().abs().flatten(2) if weight.dim() > 2 else weight.detach().abs().unsqueeze(2)
    rows = size.sum((1, 2)).topk(kept(size.shape[0], sparsity)).indices.sort().values
    channels = size.sum((0, 2)).topk(kept(size.shape[1], sparsity)).indices.sort().values
    positions = torch.arange(size.shape[2], device=channels.device)
    return rows, (channels.unsqueeze(1) * size.shape[2] + positions).flatten()


class LowRank:
    """The carriers of one weight: L (rows, r) and R (r, columns), orthonormal, and the neurons that LSG keeps.

    The gradients of both have r first, so dL is transposed: (r, kept rows) and (r, kept columns).
    """

    def __init__(
        self, left: Tensor, right: Tensor, sides: tuple[str, ...] = ("L", "R"), kept: tuple[Tensor, ...] = ()
    ) -> None:
        self.left = left
        self.right = right
        self.sides = sides
        self.kept: dict[str, Tensor] = dict(zip("LR", kept, strict=True)) if kept else {}

    @property
    def sparse(self) -> bool:
        """Whether a part of the gradient is left out by LSG."""
        return bool(self.kept)

    def project(self, value: PerSample) -> Iterator[tuple[str, PerSample]]:
        """Theorem 2.1: each record's dL^T (N, r, kept rows) and dR (N, r, kept columns) from its gradient g."""
        for side in self.sides:
            g = self._left(value) if side == "L" else self._right(value)
            if self.kept:
                # Selecting from ds or a would save a part of these products, but copy much more.
                g = _columns(g, self.kept[side])
            yield side, Dense(g)

    def _left(self, value: PerSample) -> Tensor:
        """(g R^T)^T: (N, r, rows)."""
        if isinstance(value, Outer):
            return _outer(_thin(self.right, value.right), value.left)
        if isinstance(value, Rows):
            shape = torch.Size((value.shape[0], len(self.right)))
            return Rows(value.index, _thin(self.right, value.ds).mT, shape).dense().mT
        return _thin(self.right, value.dense().flatten(2))

    def _right(self, value: PerSample) -> Tensor:
        """L^T g: (N, r, columns)."""
        if isinstance(value, Outer):
            return _outer(_thin(self.left.t(), value.left), value.right)
        if isinstance(value, Rows):
            return _outer(self.left[value.index].mT, value.ds)
        g = value.dense().flatten(2)
        return torch.matmul(self.left.t().to(g.dtype), g)

    def reconstruct(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Corollary 2.1.1: the weight's gradient (rows, columns) from dL^T and dR, zero where they were not kept."""
        if self.sides == ("L",):
            return self._spread("L", parts["L"]).t() @ self.right
        if self.sides == ("R",):
            return self.left @ self._spread("R", parts["R"])
        left, right = self.factors(parts)
        return left @ right

    def factors(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The same as a product (rows, 2 r) (2 r, columns): [dL - L L^T dL / 2, L] [R; dR - dR R^T R / 2]."""
        d_left, d_right = (self._spread(side, parts[side]) for side in "LR")
        d_left = d_left - (d_left @ self.left) @ self.left.t() / 2
        d_right = d_right - (d_right @ self.right.t()) @ self.right / 2
        return torch.cat([d_left, self.left.t()]).t(), torch.cat([self.right, d_right])

    def _spread(self, side: str, part: Tensor) -> Tensor:
        if not self.kept:
            return part
        size = self.left.shape[0] if side == "L" else self.right.shape[1]
        return part.new_zeros(len(part), size).index_copy_(1, self.kept[side], part)


def _thin(carrier: Tensor, big: Tensor) -> Tensor:
    """A carrier (r, size) times each position of `big` (N, T, size): (N, r, T), as a view.

    With r in front this product takes half the time of `big` times the transposed carrier. The large factor is never
    copied to another dtype.
    """
    product = torch.mm(carrier.to(big.dtype), big.flatten(0, 1).t())
    return product.unflatten(1, big.shape[:2]).transpose(0, 1)


def _outer(thin: Tensor, big: Tensor) -> Tensor:
    """`thin_n big_n` of (N, r, T) and (N, T, size): (N, r, size). With r in front it reads `big` in memory order."""
    return torch.bmm(thin.to(big.dtype), big)


def _columns(x: Tensor, index: Tensor) -> Tensor:
    """Features `index` of `x` (N, k, size). As a matrix: along a third axis torch takes four to nine times as long."""
    return x.flatten(0, 1).index_select(1, index).unflatten(0, x.shape[:2])


class Submatrix:
    """Sparse DP-SGD by neurons: no carriers, only the kept rows and columns of the gradient, as one block "S"."""

    def __init__(self, rows: Tensor, columns: Tensor, shape: torch.Size) -> None:
        self.rows = rows
        self.columns = columns
        self.shape = shape

    @property
    def sparse(self) -> bool:
        """Whether a part of the gradient is left out."""
        return len(self.rows) < self.shape[0]

    def project(self, value: PerSample) -> Iterator[tuple[str, PerSample]]:
        """The kept part of each record's gradient."""
        if isinstance(value, Outer):
            part = Outer(_columns(value.left, self.rows), _columns(value.right, self.columns))
            yield "S", Dense(part.dense()) if part.instantiating_is_smaller() else part
        else:
            yield "S", Dense(_columns(value.dense().flatten(2).index_select(1, self.rows), self.columns))

    def reconstruct(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight's gradient (rows, columns), zero where it was not kept."""
        full = parts["S"].new_zeros(self.shape[0], self.shape[1:].numel())
        full[self.rows.unsqueeze(1), self.columns] = parts["S"]
        return full


class Elements:
    """Sparse DP-SGD as in the LSG paper: the elements of the gradient where |W| is largest, as one block "S" (k,).

    Which elements these are has no structure, so the gradients of a micro-batch are formed, layer by layer.
    """

    def __init__(self, index: Tensor, shape: torch.Size) -> None:
        self.index = index
        self.shape = shape

    @classmethod
    def largest(cls, weight: Tensor, sparsity: float) -> "Elements":
        """The elements of a weight that are kept."""
        count = kept(weight.numel(), sparsity)
        return cls(weight.detach().abs().flatten().topk(count).indices.sort().values, weight.shape)

    @property
    def sparse(self) -> bool:
        """Whether a part of the gradient is left out."""
        return len(self.index) < self.shape.numel()

    def project(self, value: PerSample) -> Iterator[tuple[str, PerSample]]:
        """The kept elements of each record's gradient: (N, k)."""
        yield "S", Dense(value.dense().flatten(1).index_select(1, self.index))

    def reconstruct(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight's gradient (rows, columns), zero where it was not kept."""
        full = parts["S"].new_zeros(self.shape.numel())
        return full.index_copy_(0, self.index, parts["S"]).view(self.shape[0], -1)
