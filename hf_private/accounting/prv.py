"""The PRV accountant of prv-accountant 0.2.0 (Gopi et al. 2021, arXiv:2106.02848), hardened.

The package composes privacy random variables (PRVs) by FFT and returns certified bounds, but it has three defects. Its
mean integral has fixed breakpoints and is wrong for many sample rates above 0.1, sometimes silently. It allocates
any grid that its input implies. It hangs or fails with an unclear error on unusual input. This module uses its
discretisation and composition, computes the mean itself, and bounds the grid before allocating it. The classes it uses
are internals of the package, so the version is pinned. Importing it takes 0.4 seconds (scipy.signal).
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
from prv_accountant import composers, discretisers
from prv_accountant.discrete_privacy_random_variable import DiscretePrivacyRandomVariable
from prv_accountant.domain import Domain
from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism, PrivacyRandomVariableTruncated
from scipy.fft import next_fast_len

from .grid import MAX_POINTS, AccountantError, grid_points, mesh, privacy_loss


class Truncated(PrivacyRandomVariableTruncated):
    """PRV of one Poisson-subsampled Gaussian release, conditioned on [t_min, t_max], with an exact mean."""

    def probability(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The mass of adjacent cells [a, b]: each begins where the last one ends, so each edge is computed once."""
        edges = np.clip(np.append(a, b[-1]), self.t_min, self.t_max)
        return np.diff(self.prv.cdf(edges)) / self.remaining_mass

    def mean(self) -> float:
        """Integrate the privacy loss over the noise x; the package integrates over the loss.

        The loss Y(x) = log(1 - q + q exp((2x - 1) / 2s^2)), x ~ (1 - q) N(0, s^2) + q N(1, s^2), is analytic for
        |Im x| < pi s^2, so the trapezoid rule converges exponentially and needs no breakpoints.
        """
        q, sigma = float(self.prv.p), float(self.prv.sigma)
        left, right = _noise_at(float(self.t_min), q, sigma), _noise_at(float(self.t_max), q, sigma)
        x = _grid(max(left, -14 * sigma), min(right, 1 + 14 * sigma), sigma)
        absent = np.exp(-(x**2) / (2 * sigma**2))
        present = np.exp(-((x - 1) ** 2) / (2 * sigma**2))
        density = ((1 - q) * absent + q * present) / (sigma * math.sqrt(2 * math.pi))
        return float(np.trapezoid(privacy_loss(x, q, sigma) * density, x) / self.remaining_mass)


def _noise_at(t: float, q: float, sigma: float) -> float:
    """The x whose privacy loss is t; -inf below the smallest possible loss log(1 - q)."""
    ratio = (math.expm1(t) + q) / q if t < 700 else math.inf
    if ratio <= 0:
        return -math.inf
    log_ratio = math.log(ratio) if ratio < math.inf else t - math.log(q)
    return sigma**2 * log_ratio + 0.5


def _grid(left: float, right: float, sigma: float) -> np.ndarray:
    step = min(sigma / 40, sigma**2 / 2)
    return np.linspace(left, right, max(math.ceil((right - left) / step), 1) + 1)


def compose(
    settings: Sequence[tuple[float, float, int]], delta: float, eps_error: float, domain: float, quick: bool = False
) -> DiscretePrivacyRandomVariable:
    """The composed privacy losses of removing a record, on a grid.

    Args:
        settings: (sample rate, noise multiplier, steps) of each distinct release; rate in (0, 1], the rest > 0.
        delta: of the guarantee; delta / 1000 of it covers numerical error.
        eps_error: certified half-width of the interval.
        domain: privacy losses beyond +-domain must have a mass below the numerical error (from RDP).
        quick: widen the domain a little, to a grid whose length has a fast FFT. It moves epsilon by up to 1e-6, so it
            is for searches: what is stated and enforced keeps the package's grid.

    Raises:
        AccountantError: if the grid would be too large, or the package fails.
    """
    total_steps = sum(n for *_, n in settings)
    points = grid_points(total_steps, delta, eps_error, domain)
    if not points <= MAX_POINTS:
        raise AccountantError(f"PRV needs a grid of {points:.3g} points, more than {MAX_POINTS}")
    width = mesh(total_steps, delta, eps_error)
    if quick:  # the grid has 2 * (ceil(domain / width) + 1) points
        domain = (next_fast_len(math.ceil(domain / width) + 1) - 1.5) * width
    grid = Domain.create_aligned(-domain, domain, width)
    with _package_errors():
        truncated = [
            Truncated(PoissonSubsampledGaussianMechanism(q, sigma), grid.t_min(), grid.t_max())
            for q, sigma, _ in settings
        ]
        discretise = discretisers.CellCentred().discretise
        # pyrefly: ignore[bad-argument-type]  the package's truncated variable lacks its own base class
        discrete = [discretise(prv, grid) for prv in truncated]
        return composers.Heterogeneous(discrete).compute_composition([int(n) for *_, n in settings])


def prv_bounds(
    settings: Sequence[tuple[float, float, int]], delta: float, eps_error: float, domain: float, quick: bool = False
) -> tuple[float, float, float]:
    """Certified (lower, estimate, upper) of epsilon at `delta`. Arguments and errors are those of `compose`; numbers
    that cannot be trusted are an `AccountantError` too."""
    composed = compose(settings, delta, eps_error, domain, quick)
    with _package_errors():
        bounds = composed.compute_epsilon(delta, delta / 1000, eps_error)
    if not all(map(math.isfinite, bounds)) or not bounds[0] <= bounds[1] <= bounds[2]:
        raise AccountantError(f"PRV returned {bounds}, which is not an interval")
    return bounds


@contextlib.contextmanager
def _package_errors() -> Iterator[None]:
    """Turn whatever the package raises into an `AccountantError`."""
    try:
        with np.errstate(all="ignore"):
            yield
    except (ArithmeticError, AssertionError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise AccountantError(f"PRV failed ({type(error).__name__}: {error})") from error
