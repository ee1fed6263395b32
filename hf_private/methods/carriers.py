"""RGP and LSG: each targeted weight is trained through two thin matrices, its gradient carriers.

RGP (Yu et al. 2021) takes carriers L (rows, r) and R (r, columns), both orthonormal, and of the gradient g of a weight
W (rows, columns) it releases only

    dL = g R^T,    dR = L^T g,

from which dL R + L dR - L L^T dL R is g projected on the carriers: r (rows + columns) noised numbers instead of
rows * columns. For a linear layer g = left^T right, so dL = left^T (right R^T) and dR = (left L)^T right: g itself is
never formed, and (left, right) can be dropped inside the backward pass. The forward pass is the plain model's, since
W = L R + (W - L R).

LSG (Ito et al. 2023) also drops the rows of dL and the columns of dR that belong to unimportant neurons: those with a
small sum of |W| over their row or column. Carriers and importance are read off the weights, which are public once
noise was added to every gradient before.

All is stated in the weight's stored layout, rows x columns: (out, in) for Linear, (in, out) for Hugging Face's Conv1D,
(out, in * kernel) for convolutions. Index letters as in persample.py, r the rank.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..persample import Dense, Outer, PerSample, Rows, widen
from .full import Lazily, Method, like, unsharded

SOURCES = ("weight", "history", "random")
START = "start.safetensors"


@dataclass(frozen=True)
class Target:
    """How one weight is trained: `rank` of its carriers (None: no carriers, the kept submatrix itself), and which
    of them get gradients: "L", "R" or both."""

    rank: int | None
    sides: tuple[str, ...] = ("L", "R")


def power_method(matrices: list[Callable[[], Tensor]], starts: list[tuple[Tensor, Tensor]], iterations: int):
    """Algorithm 2 of RGP for matrices (m, n) of equal shape, from Gaussian starts (m, r) and (r, n) for each.

    Returns L (k, m, r) with orthonormal columns and R (k, r, n) with orthonormal rows, for k matrices. Where a matrix
    is zero, nothing is to be found and the starts are orthonormalised. `iterations=0` does that for all.
    """
    left, right = (torch.stack(side) for side in zip(*starts, strict=True))
    for _ in range(iterations):
        product = torch.stack([read() @ r.t() for read, r in zip(matrices, right, strict=True)])
        left = orthonormal(_or_else(product, left))
        product = torch.stack([part.t() @ read() for read, part in zip(matrices, left, strict=True)])
        right = _or_else(product, right)
    return left if iterations else orthonormal(left), orthonormal(right.mT).mT


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns with the same span (completed, where the given ones are dependent), by Householder QR."""
    return torch.linalg.qr(columns).Q


def _or_else(products: Tensor, others: Tensor) -> Tensor:
    """Each (k, ...) of `products` that is not zero throughout; the other one where it is."""
    alive = products.flatten(1).any(1)
    return torch.where(alive.view(-1, 1, 1), products, others)


def kept(size: int, sparsity: float) -> int:
    """How many of `size` neurons stay: the top (1 - p), at least one."""
    return max(1, round((1 - sparsity) * size))


def important(weight: Tensor, sparsity: float) -> tuple[Tensor, Tensor]:
    """Indices of the rows and of the columns that LSG keeps, by sums of |W|; a channel's kernel positions together.

    `weight` (rows, channels, kernel positions...); columns are channels * kernel positions.
    """
    size = weight.detach().abs().flatten(2) if weight.dim() > 2 else weight.detach().abs().unsqueeze(2)
    rows = size.sum((1, 2)).topk(kept(size.shape[0], sparsity)).indices.sort().values
    channels = size.sum((0, 2)).topk(kept(size.shape[1], sparsity)).indices.sort().values
    positions = torch.arange(size.shape[2], device=channels.device)
    return rows, (channels.unsqueeze(1) * size.shape[2] + positions).flatten()


class LowRank:
    """The carriers of one weight: L (rows, r) and R (r, columns), orthonormal, and the neurons that LSG keeps.

    Gradients of both are held with r first, dL transposed: (r, kept rows) and (r, kept columns).
    """

    def __init__(
        self, left: Tensor, right: Tensor, sides: tuple[str, ...] = ("L", "R"), kept: tuple[Tensor, ...] = ()
    ) -> None:
        self.left, self.right, self.sides = left, right, sides
        self.kept = dict(zip("LR", kept, strict=True)) if kept else {}

    def project(self, value: PerSample) -> Iterator[tuple[str, PerSample]]:
        """Theorem 2.1: each record's dL^T (N, r, kept rows) and dR (N, r, kept columns) from its gradient g."""
        for side in self.sides:
            g = self._left(value) if side == "L" else self._right(value)
            if self.kept:
                # Selecting from ds or a instead would save these products' dropped part, but copy much more.
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
        full = {side: self._spread(side, part) for side, part in parts.items()}
        if self.sides == ("L",):
            return full["L"].t() @ self.right
        if self.sides == ("R",):
            return self.left @ full["R"]
        # dL R + L dR - L L^T dL R, in one product of thin matrices: [dL - L L^T dL, L] [R; dR]
        outside = full["L"] - (full["L"] @ self.left) @ self.left.t()
        return torch.cat([outside, self.left.t()]).t() @ torch.cat([self.right, full["R"]])

    def _spread(self, side: str, part: Tensor) -> Tensor:
        if not self.kept:
            return part
        size = self.left.shape[0] if side == "L" else self.right.shape[1]
        return part.new_zeros(len(part), size).index_copy_(1, self.kept[side], part)


def _thin(carrier: Tensor, big: Tensor) -> Tensor:
    """A carrier (r, size) times each position of `big` (N, T, size): (N, r, T), as a view.

    With r in front this product takes half the time of `big` times the carrier's transpose. The large factor is never
    copied to another dtype.
    """
    product = torch.mm(carrier.to(big.dtype), big.flatten(0, 1).t())
    return product.unflatten(1, big.shape[:2]).transpose(0, 1)


def _outer(thin: Tensor, big: Tensor) -> Tensor:
    """`thin_n big_n` of (N, r, T) and (N, T, size): (N, r, size). With r in front it runs along `big`'s memory."""
    return torch.bmm(thin.to(big.dtype), big)


def _columns(x: Tensor, index: Tensor) -> Tensor:
    """Those features of `x` (N, k, size). As a matrix: torch takes four to nine times as long along a third axis."""
    return x.flatten(0, 1).index_select(1, index).unflatten(0, x.shape[:2])


class Submatrix:
    """Sparse DP-SGD: no carriers, but the gradient's kept rows and columns only; it is one block, "S"."""

    def __init__(self, rows: Tensor, columns: Tensor, shape: torch.Size) -> None:
        self.rows, self.columns, self.shape = rows, columns, shape

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


class Carriers(Method):
    """RGP, LSG and their baselines on the weights in `targets`; every other trainable parameter at full rank.

    Args:
        targets: Rank and sides by parameter name.
        source: What the carriers are the principal directions of: the "weight" (LSG), its "history" W_t - W_0 after
            `warmup_steps` on the weight (RGP), or nothing, "random" (RGP-random).
        power_iterations: Iterations of Algorithm 2.
        refresh: Carriers and importance are computed every so many steps.
        sparsity: Part p of the rows of dL and of the columns of dR that is left out (LSG), from step `sparsity_start`
            on. Without carriers (rank None) that part of the weight's elements.
        seed: Public; with the step and the weight's name it gives the power method's start.

    Guarantee: names and shapes of the blocks depend on the step and the settings, carriers and kept neurons on the
    weights besides; nothing here reads a record before it is clipped.

    >>> import torch
    >>> from torch import nn
    >>> method = Carriers({"weight": Target(rank=2)})
    >>> method.attach(dict(nn.Linear(6, 5, bias=False).named_parameters()))
    >>> method.blocks
    {'weight:L': torch.Size([2, 5]), 'weight:R': torch.Size([2, 6])}
    """

    drops_inputs = True
    takes_shards = True

    def __init__(
        self,
        targets: Mapping[str, Target],
        *,
        source: str = "weight",
        power_iterations: int = 1,
        refresh: int = 1,
        warmup_steps: int = 0,
        sparsity: float = 0.0,
        sparsity_start: int = 0,
        seed: int = 0,
    ) -> None:
        self.targets, self.source, self.power_iterations = dict(targets), source, power_iterations
        self.refresh, self.warmup_steps = refresh, warmup_steps
        self.sparsity, self.sparsity_start, self.seed = sparsity, sparsity_start, seed
        self.start: dict[str, Tensor] = {}  # W_0, for source="history"
        self.carriers: dict[str, LowRank | Submatrix] = {}
        self._sparse = False

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().attach(parameters)
        if missing := [name for name in self.targets if name not in self.parameters]:
            raise ValueError(f"`{missing[0]}` must be trainable to have carriers, got a frozen or absent parameter.")
        self.carriers = {}
        self.blocks = self.blocks_at(0)

    # ---- what is released

    def blocks_at(self, step: int) -> dict[str, torch.Size]:
        """Every block of a step, by name: carriers of the targets, then the other parameters."""
        sparsity = self._sparsity(step)
        blocks: dict[str, torch.Size] = {}
        for name, target in self.targets.items():
            shape = self.parameters[name].shape
            p = sparsity if target.rank else 1 - math.sqrt(1 - sparsity)
            rows, columns = kept(shape[0], p), kept(shape[1], p) * shape[2:].numel()
            if target.rank is None:
                blocks[f"{name}:S"] = torch.Size((rows, columns))
            for side, size in (("L", rows), ("R", columns)):
                if target.rank and side in target.sides:
                    blocks[f"{name}:{side}"] = torch.Size((target.rank, size))
        return blocks | {name: p.shape for name, p in self.parameters.items() if name not in self.targets}

    def _sparsity(self, step: int) -> float:
        return self.sparsity if step >= self.sparsity_start else 0.0

    def observe(self, name: str, value: PerSample) -> dict[str, PerSample]:
        if name not in self.targets:
            return super().observe(name, value)
        return {f"{name}:{side}": part for side, part in self.carriers[name].project(value)}

    def gradients(self, sums: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        full = {name: partial(sums.get, name) for name in sums if name in self.parameters}
        return Lazily(full | {name: partial(self._reconstruct, name, sums) for name in self.carriers})

    def _reconstruct(self, name: str, sums: Mapping[str, Tensor]) -> Tensor:
        parts = {side: sums[f"{name}:{side}"] for side in "LRS" if f"{name}:{side}" in sums}
        return self.carriers[name].reconstruct(parts).view(self.parameters[name].shape)

    # ---- public quantities: carriers and importance, from the weights

    @torch.no_grad()
    def begin_step(self, step: int) -> None:
        if self.source == "history" and not self.start:
            self.start = {name: self.parameters[name].detach().clone() for name in self.targets}
        sparse = self._sparsity(step) > 0
        if not self.carriers or step % self.refresh == 0 or sparse != self._sparse:
            self._sparse, self.blocks = sparse, self.blocks_at(step)
            self.carriers = dict(self._compute(step))

    def _compute(self, step: int) -> Iterator[tuple[str, LowRank | Submatrix]]:
        groups: dict[tuple, list[str]] = {}  # weights of one shape share the orthonormalisation
        for name, target in self.targets.items():
            if target.rank is None:
                p = 1 - math.sqrt(1 - self._sparsity(step))
                yield name, Submatrix(*important(unsharded(self.parameters[name]), p), self.parameters[name].shape)
            else:
                weight = self.parameters[name]
                key = (target.rank, weight.shape[0], weight.shape[1:].numel(), weight.dtype, weight.device)
                groups.setdefault(key, []).append(name)
        for (rank, *_), names in groups.items():
            matrices = [self._reader(name, step) for name in names]
            starts = [self._gaussian(name, step, rank) for name in names]
            iterations = 0 if self.source == "random" else self.power_iterations
            for name, left, right in zip(names, *power_method(matrices, starts, iterations), strict=True):
                keep = important(unsharded(self.parameters[name]), self.sparsity) if self._sparse else ()
                yield name, LowRank(left, right, self.targets[name].sides, keep)

    def _matrix(self, name: str) -> Tensor:
        """The weight as (rows, columns), float32 or better."""
        return widen(unsharded(self.parameters[name].detach()).flatten(1))

    def _reader(self, name: str, step: int) -> Callable[[], Tensor]:
        """What a weight's carriers are taken from; read when needed, as a difference is as large as the weight."""
        if self.source != "history" or step < self.warmup_steps:
            return lambda: self._matrix(name)

        def moved() -> Tensor:
            return self._matrix(name) - widen(unsharded(self.start[name]).flatten(1))

        return moved if moved().any() else lambda: self._matrix(name)

    def _gaussian(self, name: str, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Starts (rows, r) and (r, columns), the same on every rank and in every run with this seed."""
        digest = hashlib.sha256(f"{self.seed}/{step}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        weight = self.parameters[name]
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        right = torch.randn(rank, weight.shape[1:].numel(), generator=generator, dtype=dtype)
        left = torch.randn(weight.shape[0], rank, generator=generator, dtype=dtype)
        return left.to(weight.device), right.to(weight.device)

    # ---- W_0, which a resumed run needs again

    @property
    def start_bytes(self) -> int:
        """Memory that W_0 takes: as much as the targeted weights, with source="history" only."""
        weights = [self.parameters[name] for name in self.targets] if self.source == "history" else []
        return sum(p.numel() * p.element_size() for p in weights)

    def begin_run(self, folder: str | Path, resumes: bool = False, writes: bool = True) -> None:
        """With source="history": write W_0 to `folder`, or read it back if the run resumes."""
        if self.source != "history":
            return
        path = Path(folder, START)
        if resumes:
            self.start = self._read_start(path)
            return
        self.start = {name: self.parameters[name].detach().clone().contiguous() for name in self.targets}
        whole = {}
        for name, start in self.start.items():
            start = unsharded(start)  # all ranks take part
            if writes:
                whole[name] = start
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".tmp")
            save_file(whole, unfinished)
            os.replace(unfinished, path)

    def _read_start(self, path: Path) -> dict[str, Tensor]:
        if not path.is_file():
            raise FileNotFoundError(
                f"{str(path)!r} must hold the weights that the run began with, as source='history' takes carriers from"
                " W_t - W_0. Put it back from the folder of that run, or start a new run."
            )
        start = load_file(path)
        for name in self.targets:
            if name not in start or start[name].shape != self.parameters[name].shape:
                raise ValueError(f"{str(path)!r} does not fit this model: `{name}` is missing or of another shape.")
        return {name: like(start[name], self.parameters[name]) for name in self.targets}
