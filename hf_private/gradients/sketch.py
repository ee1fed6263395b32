"""Short projections of per-sample gradients, to compare two runs without forming a gradient.

The norms of two gradients may agree where their directions do not. `u^T g v` with random signs u and v has the
expected square |g|^2, so a few of them show how far two gradients are apart; and of a gradient that is kept as
`left^T right` it costs no more than reading its factors.
"""

from functools import lru_cache

import torch
from torch import Tensor

from .persample import Dense, Outer, PerSample, Rows, Tied, widen

PROBES = 8


@lru_cache(maxsize=64)  # a model has few widths
def _signs(length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (length, PROBES), generator=generator).mul_(2).sub_(1).float()


def sketch(value: PerSample) -> Tensor:
    """Projections (N, PROBES) of the gradients of one parameter; the same ones in every run.

    >>> left, right = torch.randn(3, 5, 7), torch.randn(3, 5, 6)
    >>> formed = sketch(Dense(Outer(left, right).dense()))
    >>> torch.allclose(sketch(Outer(left, right)), formed, atol=1e-4)
    True
    """
    if isinstance(value, Tied):
        return sketch(value.outer) + sketch(value.rows)
    if isinstance(value, Dense):
        matrix = value.g.flatten(2) if value.g.dim() > 2 else value.g.view(len(value.g), -1, 1)
        u, v = _probes(matrix.shape[1], matrix.shape[2], matrix)
        return torch.einsum("nik,ik->nk", matrix @ v, u)
    if isinstance(value, Outer):
        left, right = widen(value.left), widen(value.right)
        u, v = _probes(left.shape[2], right.shape[2], left)
        return ((left @ u) * (right @ v)).sum(1)
    if isinstance(value, Rows):
        ds = widen(value.ds)
        u, v = _probes(value.shape[0], ds.shape[2], ds)
        return (u[value.index] * (ds @ v)).sum(1)
    return sketch(Dense(value.dense()))


def _probes(rows: int, columns: int, like: Tensor) -> tuple[Tensor, Tensor]:
    return _signs(rows, 0).to(like), _signs(columns, 1).to(like)


def distances(one: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
    """Estimated distance (N,) between two runs' gradients over all parameters, from their sketches."""
    squares = [(one[name].double() - other[name].double()).square().mean(1) for name in one]
    return torch.stack(squares).sum(0).sqrt()
