"""Two gradient methods that recipes/ablation.py tries: a clip norm that follows the norms, and public preconditioning.

Both change what is clipped and get noise by quantities that are public or already have their noise, and clip exactly.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.method import Clip, Full
from hf_private.gradients.persample import Dense, Outer, PerSample, sq_norms


class QuantileClip(Full):
    """BK whose clip norm follows a quantile of the gradients' norms (Andrew et al. 2021).

    The clip norm R of the settings stays: gradients are multiplied by a public scale s before the clip, and divided by
    it after the noise, which clips them at R / s. A step also releases how many records were below, as a sum of
    +1/2 and -1/2 with noise of `count_std`. Then log s grows by `rate` times the excess of that share over `target`.

    Guarantee: One record changes the count by 1/2. Both releases of a step are on one sample, and together they cost
    the effective noise multiplier sigma: the gradients get (sigma^-2 - (2 count_std)^-2)^-1/2.

    Args:
        count_std: Standard deviation of the noise on the count, about a twentieth of the expected batch.
        expected_batch_size: Divisor of the count.
    """

    takes_shards = False
    COUNT = "clip:count"

    def __init__(
        self, count_std: float, expected_batch_size: float, target: float = 0.5, rate: float = 0.2, scale: float = 1.0
    ) -> None:
        self.count_std, self.expected_batch_size = count_std, expected_batch_size
        self.target, self.rate, self.scale = target, rate, scale
        self.share: float | None = None  # of records below the clip norm in the last step, noised

    def describe(self) -> str:
        return f"BK with a clip norm at the {self.target:g} quantile (rate {self.rate:g}, count {self.count_std:g})"

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().attach(parameters)
        self.blocks = {**self.blocks, self.COUNT: torch.Size([1])}
        self.scales = dict.fromkeys(parameters, self.scale)

    def begin_run(self, folder: str | Path, resumes: bool = False, *_: Any, **__: Any) -> None:
        if resumes:
            raise ValueError("`resume_from_checkpoint` must be None with QuantileClip: its scale is not saved.")

    def begin_step(self, step: int) -> None:
        if self.share is not None:
            self.scale *= math.exp(self.rate * (self.share - self.target))
            self.scales, self.share = dict.fromkeys(self.parameters, self.scale), None

    def add_clipped_sums(self, entries: dict[str, PerSample], clipping: Clip, sums: dict[str, Tensor]) -> None:
        norms = torch.stack([*self.scaled_sq_norms(sq_norms(entries)).values()]).sum(0)
        below = norms <= clipping.clip_norm**2  # of a norm that is no number: False
        count = (below.to(norms.dtype) - 0.5).sum().view(1)
        sums[self.COUNT] = sums[self.COUNT] + count if self.COUNT in sums else count
        super().add_clipped_sums(entries, clipping, sums)

    def _gradient_multiplier(self, noise_multiplier: float) -> float:
        rest = noise_multiplier**-2 - (2 * self.count_std) ** -2
        if rest <= 0:
            raise ValueError(f"`count_std` must be above {noise_multiplier / 2:g}, got {self.count_std:g}.")
        return rest**-0.5

    def stds(self, noise_multiplier: float, clip_norm: float) -> dict[str, float]:
        if not noise_multiplier:
            return dict.fromkeys(self.blocks, 0.0)
        std = self._gradient_multiplier(noise_multiplier) * clip_norm
        return {**dict.fromkeys(self.blocks, std), self.COUNT: self.count_std}

    def releases(self, noise_multiplier: float) -> tuple[float, ...]:
        if not noise_multiplier:
            return (0.0,)
        return self._gradient_multiplier(noise_multiplier), 2 * self.count_std

    def gradient(self, name: str, sums: Mapping[str, Tensor]) -> Tensor:
        self.share = 0.5 + float(sums[self.COUNT])  # `sums` are divided by the expected batch size
        return super().gradient(name, sums)


class Side(NamedTuple):
    """The symmetric matrix `scale (I + V diag(weights - 1) V^T)`, V (n, k) orthonormal: k directions are rescaled."""

    directions: Tensor
    weights: Tensor
    scale: float

    def __rmatmul__(self, x: Tensor) -> Tensor:
        """x times this matrix, at the cost of two thin products."""
        v = self.directions.to(x.dtype)
        return (x + ((x @ v) * (self.weights.to(x.dtype) - 1)) @ v.T) * self.scale

    def inverse(self) -> "Side":
        return Side(self.directions, 1 / self.weights, 1 / self.scale)


class Preconditioned(Full):
    """BK on gradients `G g A` of linear layers, with public matrices of `public_sides`: scale, clip, noise, unscale.

    Book-keeping on the transformed output gradient and input, (ds G, a A), needs no per-sample gradients for that.
    Whole matrices would cost (p^2 + d^2) / 3pd of a step; a few directions cost 2k (p + d) / 3pd.

    Args:
        sides: By name of a weight: G for its rows, A for its columns.
    """

    takes_shards = False

    def __init__(self, sides: Mapping[str, tuple[Side, Side]]) -> None:
        self.sides = sides

    def describe(self) -> str:
        return "BK in units of public gradients (Kronecker factors)"

    def observe(self, name: str, value: PerSample) -> dict[str, PerSample]:
        if name in self.sides:
            rows, columns = self.sides[name]
            if isinstance(value, Outer):
                value = Outer(value.left @ rows, value.right @ columns, value.shape)
            else:
                value = Dense(((value.dense() @ columns).mT @ rows).mT)
        return super().observe(name, value)

    def gradient(self, name: str, sums: Mapping[str, Tensor]) -> Tensor:
        if name not in self.sides:
            return sums[name]
        rows, columns = (side.inverse() for side in self.sides[name])
        return ((sums[name] @ columns).T @ rows).T


class _Moments(Full):
    """Second moments of the inputs and output gradients of linear layers, in place of gradients."""

    drops_inputs = False

    def __init__(self) -> None:
        self.found: dict[str, tuple[Tensor, Tensor]] = {}

    def observe(self, name: str, value: PerSample) -> dict[str, PerSample]:
        if isinstance(value, Outer) and len(value.shape) == 2:
            sides = tuple(x.double().flatten(0, 1).T @ x.double().flatten(0, 1) for x in (value.left, value.right))
            old = self.found.get(name)
            self.found[name] = sides if old is None else (old[0] + sides[0], old[1] + sides[1])
        return {}


def public_sides(
    model: nn.Module, losses: Callable[[Any], Tensor], batches: Iterable[Any], k: int = 16, power: float = 0.25
) -> dict[str, tuple[Side, Side]]:
    """For each linear weight: the k largest directions of its public second moments, scaled to those of the others.

    A direction of second moment m gets the weight (rest / m)^power, where `rest` is the mean of the others. `scale`
    keeps the mean square of public inputs and of output gradients.

    Args:
        losses: fn(batch) -> (N,), which calls the model.
        batches: Public records.
    """
    method = _Moments()
    for batch in batches:
        with BookKeeper(model, method) as book:
            book.backward(losses(batch))
            book.pop_entries()
    return {name: (_side(rows, k, power), _side(columns, k, power)) for name, (rows, columns) in method.found.items()}


def _side(moment: Tensor, k: int, power: float) -> Side:
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp(min=0)
    k = min(k, len(values) - 1)
    top, rest = values[-k:], values[:-k]
    floor = rest.mean().clamp(min=1e-6 * values[-1])
    weights = (floor / top.clamp(min=float(floor))) ** power
    after = (top * weights**2).sum() + rest.sum()
    return Side(vectors[:, -k:], weights, float((values.sum() / after) ** 0.5))
