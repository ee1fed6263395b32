"""GEP and B-GEP: gradients embedded in a subspace that public data spans, and their residuals.

GEP (Yu et al. 2021, Algorithm 1) takes anchor gradients G of m public records and finds an orthonormal basis B (k, p)
of their principal directions by power iteration. Of each private gradient g it releases

    w = B g            the embedding, clipped to S1: k noised numbers, most of the gradient
    r = g - B^T w      the residual, clipped to S2, which can be small

so that B^T w + r = g. B-GEP releases only w, and is biased by r. Parameters are split into groups, each with its own
basis (the paper's parameter grouping).

Neither B x p private gradients nor m x p anchor gradients exist here. Embeddings are computed inside the backward
pass; the norm of r follows from those of g and w, and its clipped sum is sum_n c_n g_n - B^T sum_n c_n w_n. Where
gradients of a parameter must be formed, at most k of them exist at a time, as many as there are basis vectors.

Index letters as in persample.py, and j for basis vectors.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_private.gradients.method import Clip, Method
from hf_private.gradients.persample import (
    Dense,
    Outer,
    PerSample,
    Rows,
    Tied,
    may_remove,
    sq_norms,
    weighted_sum,
    widen,
)
from hf_private.gradients.tensors import accumulation_dtype
from hf_private.methods.subspace import Books, broadcast_first, orthonormal, public_start

# Slack s of the residual's norm^2, which is taken as |g|^2 - |w|^2 + s|g|^2. It covers rounding, which is relative to
# |g| and not to |r|, and by bounding c|g| <= S2 / sqrt(s) it keeps small the rounding of the two sums that cancel.
SLACK = {torch.float32: 1e-4, torch.float64: 1e-12}
LARGEST_DEFECT = 1e-3  # of |B B^T - I|: above, B is not a basis
COPIES = 2  # the basis and the product that becomes the next one; the largest group twice more while orthonormalising


class Group(NamedTuple):
    """Parameters that share a basis of `k` vectors."""

    names: tuple[str, ...]
    k: int


def formed(value: PerSample, at_most: int) -> Iterator[Tensor]:
    """The gradients themselves (n, p), `at_most` records at a time."""
    if isinstance(value, Outer):
        for left, right in zip(value.left.split(at_most), value.right.split(at_most), strict=True):
            yield Outer(left, right).dense().flatten(1)
    else:
        yield from value.dense().flatten(1).split(at_most)


def embed(value: PerSample, basis: Tensor) -> Tensor:
    """`<g_n, B_j>` (N, k) of each record's gradient with each basis vector of one parameter, `basis` (k, *shape).

    >>> embed(Dense(torch.tensor([[3.0, 4.0]])), torch.eye(2))
    tensor([[3., 4.]])
    """
    if isinstance(value, Tied):
        return embed(value.outer, basis) + embed(value.rows, basis)
    if isinstance(value, Rows):  # only the rows that a record names
        ds = widen(value.ds).to(basis.dtype)
        return torch.stack([(vector[value.index] * ds).sum((1, 2)) for vector in basis], 1)
    columns = basis.flatten(1).t()
    return torch.cat([g.to(basis.dtype) @ columns for g in formed(value, len(basis))])


def combine(value: PerSample, weights: Tensor) -> Tensor:
    """`sum_n A_nj g_n` (k, *shape) for `weights` A (N, k): the power iteration's A^T G for one parameter.

    >>> combine(Dense(torch.tensor([[3.0, 4.0]])), torch.tensor([[1.0, 2.0]]))
    tensor([[3., 4.], [6., 8.]])
    """
    if isinstance(value, Tied):
        return combine(value.outer, weights) + combine(value.rows, weights)
    if isinstance(value, Rows):
        return torch.stack([value.weighted_sum(c) for c in weights.t()])
    k = weights.shape[1]
    parts = zip(weights.split(k), formed(value, k), strict=True)
    total = reduce(add, (a.t() @ g.to(a.dtype) for a, g in parts))
    shape = value.shape if isinstance(value, Outer) else value.dense().shape[1:]
    return total.view(k, *shape)


def defect(basis: Iterable[Tensor]) -> Tensor:
    """|B B^T - I| (Frobenius, a scalar) of a basis in slices (k, ...), in float64: how far it is from orthonormal."""
    slices = (columns.double() for part in basis for columns in part.flatten(1).split(1 << 16, dim=1))
    gram = reduce(add, (columns @ columns.t() for columns in slices))
    return torch.linalg.matrix_norm(gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device))


def memory_limit(device: torch.device) -> int:
    """Bytes that a basis may take: half of what the device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 2
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class Anchors(Method):
    """GEP on all trainable parameters, or B-GEP if `residual` is False.

    Args:
        groups: Parameters that share a basis, and its size, by name of the group; every parameter is in one group.
        books: Public gradients: `books(step, method)` yields the entries that `method` makes for the public
            micro-batches of a step. May be set later, before the first step.
        power_iterations: Iterations t of Algorithm 1; each reads the public records once.
        refresh: Steps between two computations of the basis.
        residual: Release the residual too (GEP), with S2 = `residual_clip_norm`, by default a fifth of S1. S1 is the
            clip norm of the run.
        seed: Public; the start of the power iteration depends on the seed, the step and the name of the parameter.

    Guarantee: the sum of embeddings has sensitivity S1 and that of residuals S2, whatever the gradients are. Both are
    releases on one sample, so each gets sqrt(2) of the effective noise multiplier.

    >>> method = Anchors({"head": Group(("weight", "bias"), k=3)})
    >>> method.attach(dict(nn.Linear(6, 5).named_parameters()))
    >>> method.blocks
    {'@head': torch.Size([3]), 'weight': torch.Size([5, 6]), 'bias': torch.Size([5])}
    >>> [round(s, 3) for s in method.releases(1.0)]
    [1.414, 1.414]
    """

    CLIPPING = ("flat", "automatic")  # as a whole: sensitivities S1 and S2 either way

    def __init__(
        self,
        groups: Mapping[str, Group],
        books: Books | None = None,
        *,
        power_iterations: int = 1,
        refresh: int = 1,
        residual: bool = True,
        residual_clip_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        self.groups = dict(groups)
        self.books = books
        self.power_iterations = power_iterations
        self.refresh = refresh
        self.residual = residual
        self.residual_clip_norm = residual_clip_norm
        self.seed = seed
        self.group_of = {name: group for group, (names, _) in self.groups.items() for name in names}
        self.basis: dict[str, Tensor] = {}  # (k, *shape) by parameter: its columns of the group's B
        self.slack = math.nan

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().attach(parameters)
        wrong = sorted(self.group_of.keys() ^ parameters.keys())
        if wrong:
            got = "in no group" if wrong[0] in parameters else "in a group, but frozen or absent"
            raise ValueError(f"`groups` must hold the trainable parameters, each once, got `{wrong[0]}` {got}.")
        self._check_memory()
        self.basis = {}
        embeddings = {f"@{group}": torch.Size((k,)) for group, (_, k) in self.groups.items()}
        self.blocks = embeddings | (self.blocks if self.residual else {})

    # ---- what is released

    def read(self, name: str, value: PerSample) -> dict[str, PerSample]:
        """The entries for one use of a parameter: its gradients, and their share of the embedding of its group."""
        entries = super().observe(name, value)
        return entries | {f"@{self.group_of[name]}": Dense(embed(entries[name], self.basis[name]))}

    def observe(self, name: str, value: PerSample) -> dict[str, PerSample]:
        entries = self.read(name, value)
        if not self.residual:  # then the gradients are dropped inside the backward pass
            del entries[name]
        return entries

    def add_clipped_sums(self, entries: dict[str, PerSample], clipping: Clip, sums: dict[str, Tensor]) -> None:
        if clipping.mode not in self.CLIPPING:
            raise ValueError(
                f"`clipping` must be one of {self.CLIPPING} with `anchors`, got {clipping.mode!r}: GEP clips"
                " embeddings and residuals as a whole."
            )
        embeddings = {block: entries.pop(block).dense() for block in list(entries) if block not in self.parameters}
        sq_embedding = reduce(add, (w.double().square().sum(1) for w in embeddings.values()))
        dtype = next(iter(embeddings.values())).dtype  # clip factors leave room for the rounding of this type
        factor = clipping.factors({"w": sq_embedding.to(dtype)})["w"]
        for block, w in embeddings.items():
            _accumulate(sums, block, weighted_sum(Dense(w), factor))
        if not self.residual:
            return

        sq_norm = reduce(add, (value.double() for value in sq_norms(entries).values()))
        sq_residual = (sq_norm - sq_embedding).clamp_min(0) + self.slack * sq_norm
        second = clipping.with_norm(self._second_clip_norm(clipping.clip_norm))
        factor = second.factors({"r": sq_residual.to(dtype)})["r"]
        for block, w in embeddings.items():
            embedded = weighted_sum(Dense(w), factor)
            # A parameter that no record reached has a residual too, if its group has an embedding.
            for name in self.groups[block[1:]].names:
                residual = -torch.tensordot(embedded, self.basis[name], 1)
                if name in entries:
                    residual += weighted_sum(entries.pop(name), factor)
                _accumulate(sums, name, residual)

    def _second_clip_norm(self, clip_norm: float) -> float:
        """S2, from S1."""
        return clip_norm / 5 if self.residual_clip_norm is None else self.residual_clip_norm

    def stds(self, noise_multiplier: float, clip_norm: float) -> dict[str, float]:
        if not noise_multiplier:  # the non-private twin has clip_norm = inf
            return dict.fromkeys(self.blocks, 0.0)
        part = self.releases(noise_multiplier)[0]
        second = part * self._second_clip_norm(clip_norm)
        return {block: second if block in self.parameters else part * clip_norm for block in self.blocks}

    def releases(self, noise_multiplier: float) -> tuple[float, ...]:
        """Two releases on one sample, together worth `noise_multiplier`: (1/s^2 + 1/s^2)^(-1/2) = s / sqrt(2)."""
        return (noise_multiplier * math.sqrt(2),) * 2 if self.residual else (noise_multiplier,)

    def gradient(self, name: str, sums: Mapping[str, Tensor]) -> Tensor:
        embedded = torch.tensordot(sums[f"@{self.group_of[name]}"], self.basis[name], 1)
        return embedded.add_(sums[name]) if self.residual else embedded

    # ---- public quantities: the anchor subspace

    def begin_step(self, step: int) -> None:
        if not self.basis or step % self.refresh == 0:
            self._find_subspace(step)

    def _find_subspace(self, step: int) -> None:
        """First stage of Algorithm 1, streaming over public micro-batches: A = G B^T and B = A^T G."""
        if self.books is None:
            raise ValueError(
                "`anchor_dataset` must be given with `anchors`, got None. It may be public data without labels."
            )
        self.basis = {}  # frees the previous one
        self.basis = {name: self._start(name, step) for name in self.parameters}
        for _ in range(self.power_iterations):
            product = {name: torch.zeros_like(basis) for name, basis in self.basis.items()}
            for entries in self.books(step, _PublicBook(self)):
                self._add(product, entries)
            for group in self.groups.values():
                self._orthonormalise(group, product)
        broadcast_first(self.basis.values())
        defects = [defect([self.basis[name] for name in group.names]) for group in self.groups.values()]
        worst = torch.stack(defects).max().item()  # of a NaN, too
        if not worst <= LARGEST_DEFECT:
            raise RuntimeError(f"`basis` must be orthonormal, got |BB^T - I| = {worst}. Use another dtype.")
        self.slack = SLACK[next(iter(self.basis.values())).dtype] + worst

    def _add(self, product: dict[str, Tensor], entries: Mapping[str, PerSample]) -> None:
        """Add a micro-batch to B = A^T G, without public records whose gradient is not finite."""
        for group, (names, _) in self.groups.items():
            if f"@{group}" not in entries:
                continue
            a = entries[f"@{group}"].dense()
            keep = a.isfinite().all(1)
            removes = may_remove(keep)
            for name in names:
                if name in entries:
                    value = entries[name].masked(keep) if removes else entries[name]
                    product[name] += combine(value, a.where(keep.unsqueeze(1), 0))

    def _orthonormalise(self, group: Group, product: dict[str, Tensor]) -> None:
        rows = torch.cat([product.pop(name).flatten(1) for name in group.names], 1)
        sizes = [self.parameters[name].numel() for name in group.names]
        unreached = rows.any().logical_not_().to(rows.dtype)
        for name, part in zip(group.names, rows.split(sizes, 1), strict=True):
            # Zero gradients have no principal directions: keep the start.
            part.addcmul_(self.basis[name].flatten(1), unreached)
        for name, part in zip(group.names, orthonormal(rows.t()).t().split(sizes, 1), strict=True):
            self.basis[name] = part.reshape(group.k, *self.parameters[name].shape)

    def _start(self, name: str, step: int) -> Tensor:
        """Start of the power iteration (k, *shape): equal on every rank and in every run with this seed."""
        p = self.parameters[name]
        k = self.groups[self.group_of[name]].k
        return public_start((k, *p.shape), accumulation_dtype(p), p.device, self.seed, step, name)

    @property
    def basis_bytes(self) -> int:
        """Peak memory of the bases: COPIES of sum_g k_g p_g, and as many of the largest group."""
        sizes = [
            sum(k * p.numel() * accumulation_dtype(p).itemsize for p in map(self.parameters.__getitem__, names))
            for names, k in self.groups.values()
        ]
        return COPIES * sum(sizes) + COPIES * max(sizes)

    def _check_memory(self) -> None:
        limit = memory_limit(next(iter(self.parameters.values())).device)
        if self.basis_bytes > limit:
            vectors = sum(group.k for group in self.groups.values())
            raise ValueError(
                f"`k` must leave the basis below {limit / 2**30:.1f} GiB, half of the device's memory, got {vectors}"
                f" vectors in {len(self.groups)} groups: {self.basis_bytes / 2**30:.1f} GiB. Lower `k`, use smaller"
                " `groups` ('layer'), or target fewer modules."
            )


def _accumulate(sums: dict[str, Tensor], block: str, value: Tensor) -> None:
    """Add a micro-batch's part to a block; the first part becomes the sum."""
    sums[block] = sums[block].add_(value) if block in sums else value


class _PublicBook(Method):
    """Reads gradients and embeddings of public records, for B-GEP too."""

    def __init__(self, anchors: Anchors) -> None:
        self.anchors = anchors

    def observe(self, name: str, value: PerSample) -> dict[str, PerSample]:
        return self.anchors.read(name, value)
