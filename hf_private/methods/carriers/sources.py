"""Directions for carriers that are better than those of the weight, and cost no privacy.

`Momentum` averages gradients that were released with noise: whatever is computed from them is post-processing.
`public_gradients` reads public records.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from hf_private.gradients.method import Method
from hf_private.gradients.persample import PerSample, weighted_sum
from hf_private.methods.subspace import Books, broadcast_first

from .lowrank import Elements, LowRank, Submatrix, truncated

MEMORY = 0.99  # weight of a step's gradient in the average, per later step: a memory of about a hundred steps


class Momentum:
    """An average of the noised gradients of one weight, as thin matrices; it needs no memory of the weight's size.

    Between two refreshes the carriers L and R stay, so the noised dL and dR add up as they are (`recent`). At a
    refresh they join the average of before, of which the first 2 r directions are kept: `left` (rows, 2 r) and `right`
    (2 r, columns). dL = g R^T spans directions of g outside of L, so taking the next L from it is a power iteration on
    g. W_t - W_0 is such a sum too, but of updates whose elements Adam has rescaled, which destroys their low rank.
    """

    def __init__(self) -> None:
        self.recent: dict[str, Tensor] = {}
        self.left: Tensor | None = None
        self.right: Tensor | None = None

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Add the noised dL^T (r, rows) and dR (r, columns) of a step."""
        for side, part in parts.items():
            self.recent[side] = self.recent[side].mul(MEMORY).add_(part) if side in self.recent else part.clone()

    def join(self, carriers: LowRank | Submatrix | Elements, steps: int) -> tuple[Tensor, Tensor] | None:
        """The average with what is recent, at a refresh after so many `steps`, as a product; None without such."""
        assert isinstance(carriers, LowRank), "only weights with carriers have an average"
        if not self.recent:
            return None
        left, right = carriers.factors(self.recent)
        if self.left is not None and self.right is not None:
            left = torch.cat([self.left * MEMORY**steps, left], 1)
            right = torch.cat([self.right, right])
        self.recent = {}
        return left, right

    def directions(self, rank: int) -> tuple[Tensor, Tensor]:
        """Orthonormal L (rows, r) and R (r, columns) of the average."""
        assert self.left is not None and self.right is not None, "`add` comes before the first refresh"
        return torch.linalg.qr(self.left).Q[:, :rank], self.right[:rank]


def refresh_averages(
    averages: Sequence[tuple[Momentum, LowRank | Submatrix | Elements]], rank: int, steps: int
) -> None:
    """Let averages take in what is recent, and keep their first 2 r directions; all of one rank r together."""
    joined = [(average, average.join(carriers, steps)) for average, carriers in averages]
    recent = [(average, product) for average, product in joined if product is not None]
    kept = truncated([product for _, product in recent], 2 * rank)
    for (average, _), (left, right) in zip(recent, kept, strict=True):
        average.left, average.right = left, right


def public_gradients(books: Books | None, step: int, targets: Collection[str]) -> dict[str, Tensor]:
    """The gradient of each targeted weight, summed over the public records of a step."""
    if books is None:
        raise ValueError(
            "`anchor_dataset` must be given with source='public', got None. It holds public records like the private"
            " ones; without labels, random ones are drawn."
        )
    total: dict[str, Tensor] = {}
    for entries in books(step, _TargetsOnly(targets)):
        for name, value in entries.items():
            finite = value.sq_norm().isfinite()
            total[name] = weighted_sum(value, finite.to(torch.float32), total.get(name))
    broadcast_first(total.values())
    return total


class _TargetsOnly(Method):
    """Reads the gradients of targeted weights, and drops the others inside the backward pass."""

    def __init__(self, targets: Collection[str]) -> None:
        self.targets = targets

    def observe(self, name: str, value: PerSample) -> dict[str, PerSample]:
        return super().observe(name, value) if name in self.targets else {}
