"""The accountants: each is a function from settings to bounds on epsilon, and a row in `ACCOUNTANTS`.

All of them bound the epsilon of Poisson-sampled Gaussian releases when one record is added or removed. RDP is fast and
loose, PLD is tight and covers both directions, PRV is tight with a certified error. To add an accountant, write one
function and one row: reports then include it.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.special import gammaln, logsumexp

from .grid import MAX_POINTS, AccountantError, grid_points, privacy_loss

if TYPE_CHECKING:  # imported late: they take 0.4 seconds
    from dp_accounting.pld.pld_pmf import DensePLDPmf

    from .pld import PrivacyLossDistribution

Settings = tuple[tuple[float, float, int], ...]  # (sample rate, noise multiplier, steps), distinct, sorted, all > 0
Bounds = tuple[float, float, float]  # (lower, estimate, upper) of epsilon


class Losses(NamedTuple):
    """A discrete privacy loss distribution: ascending losses, their probabilities (points,), and the mass beyond."""

    values: np.ndarray
    probabilities: np.ndarray
    infinite: float


MAX_DEFAULT_POINTS = 2_000_000  # points of a PRV grid that takes about ten seconds
FAILURES = (AccountantError, ArithmeticError, MemoryError, ValueError)


# ---- RDP: Mironov, Talwar, Zhang 2019 (arXiv:1908.10530). Removing a record costs at least as much as adding one.

FRACTIONS = np.array([1 + x / 10 for x in range(1, 100) if x % 10])
WHOLES = np.array([*range(2, 65), 72, 96, 128, 192, 256, 384, 512, 1024, 4096, 16384])
ORDERS = np.concatenate([FRACTIONS, WHOLES])


@cache
def _terms() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The terms i = 0, ..., order of the sums at all whole orders, one after the other (terms,).

    Returns i, order - i and the logarithm of their binomial coefficient, and where each sum begins (orders,).
    """
    i = np.concatenate([np.arange(order + 1) for order in WHOLES])
    order = np.repeat(WHOLES, WHOLES + 1)
    log_binomial = gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
    return i, order - i, log_binomial, np.cumsum(WHOLES + 1) - (WHOLES + 1)


@lru_cache(maxsize=4096)
def rdp_curve(q: float, sigma: float) -> np.ndarray:
    """RDP of one step at `ORDERS`, shape (orders,): exact sums at whole orders, quadrature to ~1e-12 at the others."""
    if q == 1 or sigma < 0.05:  # without amplification: a valid bound, and so little noise is not used in practice
        with np.errstate(divide="ignore", over="ignore"):
            curve = ORDERS / np.float64(2 * sigma**2)
    else:
        # The mean of exp(order * loss(x)) over x ~ N(0, s^2). Its mass lies around x <= order, tails beyond 14 s are
        # below 1e-42, and the trapezoid rule converges exponentially at this step (see prv.Truncated.mean).
        step = min(sigma / 20, sigma**2 / 2)
        x = np.arange(-14 * sigma, FRACTIONS[-1] + 14 * sigma, step)
        exponents = FRACTIONS[:, None] * privacy_loss(x, q, sigma) - x**2 / (2 * sigma**2)
        of_fractions = logsumexp(exponents, axis=1) + math.log(step / (sigma * math.sqrt(2 * math.pi)))
        i, rest, log_binomial, first = _terms()
        terms = log_binomial + i * math.log(q) + rest * math.log1p(-q) + (i * i - i) / (2 * sigma**2)
        largest = np.maximum.reduceat(terms, first)
        sums = np.add.reduceat(np.exp(terms - np.repeat(largest, WHOLES + 1)), first)
        curve = np.maximum(np.concatenate([of_fractions, np.log(sums) + largest]), 0) / (ORDERS - 1)
    curve.flags.writeable = False  # the cache shares it
    return curve


def composed_rdp(settings: Settings) -> np.ndarray:
    """RDP of all steps together at `ORDERS`, shape (orders,)."""
    return sum((n * rdp_curve(q, sigma) for q, sigma, n in settings), np.zeros_like(ORDERS))


def rdp_to_epsilon(rdp: np.ndarray, delta: float) -> float:
    """Conversion at the best order: Proposition 12 of Canonne, Kamath, Steinke 2020 (arXiv:2004.00010)."""
    slack = np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1)
    return max(0.0, float(np.min(rdp + slack)))


def rdp_epsilon(settings: Settings, delta: float) -> float:
    """Upper bound of epsilon by RDP."""
    return rdp_to_epsilon(composed_rdp(settings), delta)


def rdp_to_delta(curve: np.ndarray, epsilons: np.ndarray) -> np.ndarray:
    """Upper bound of delta at each epsilon, shape (epsilons,): the same conversion, solved for delta."""
    with np.errstate(invalid="ignore"):
        logs = (ORDERS - 1) * (curve - epsilons[:, None] + np.log1p(-1 / ORDERS)) - np.log(ORDERS)
    return np.exp(np.minimum(0.0, logs.min(axis=1)))


# ---- PLD by dp-accounting: pessimistic, the larger of both directions


@lru_cache(maxsize=2)
def loss_distribution(settings: Settings, records: int = 1, coarse: int = 1) -> "PrivacyLossDistribution":
    """Composed privacy loss when a person's `records` records, each sampled independently, are added or removed.

    A sample holds Binomial(k, q) of k records, so the sum moves by 0..k: a mixture of Gaussians (arXiv:2310.15526,
    section 4.7). A grid that is `coarse` times as wide is quicker, and the losses are pessimistic on any grid.
    """
    worst = all_at_once(settings, records)
    reach = max(rdp_epsilon(worst, 1e-15), *(1 / (2 * sigma**2) + 10 / sigma for _, sigma, _ in worst))
    # The loss of a mixture is inverted point by point, which is slow: its grid is only as fine as the steps require.
    interval = 1e-4 if records == 1 else min(1e-2, 0.05 / math.sqrt(sum(n for *_, n in settings)))
    interval = max(min(coarse * interval, 1e-2), 2 * reach / MAX_POINTS)
    if not interval <= 1e-2:
        raise AccountantError(f"needs a grid that reaches {reach:.3g}")
    return composed_losses(settings, records, interval)


def composed_losses(settings: Settings, records: int, interval: float) -> "PrivacyLossDistribution":
    """The same on a given grid, of multiples of `interval`."""
    from .pld import identity

    composed = identity(value_discretization_interval=interval)
    for q, sigma, n in settings:
        if q == 1 and records == 1:  # n Gaussian releases are exactly one release with less noise
            phase = _one_step(1.0, sigma / math.sqrt(n), interval, records)
        else:
            phase = _one_step(q, sigma, interval, records).self_compose(n)
        composed = composed.compose(phase)
    return composed


@lru_cache(maxsize=8)
def _one_step(q: float, sigma: float, interval: float, records: int) -> "PrivacyLossDistribution":
    """Privacy loss of one step, cached because a run asks again with more steps at every save."""
    from .pld import one_step

    return one_step(q, sigma, interval, records)


def pld_losses(settings: Settings, records: int = 1, coarse: int = 1) -> tuple[Losses, Losses]:
    """The composed losses of removing and of adding a person's records.

    dp-accounting keeps them to itself: its public answer is the larger delta of both, one epsilon at a time.
    """
    distribution = loss_distribution(settings, records, coarse)
    remove, add = (pmf.to_dense_pmf() for pmf in (distribution._pmf_remove, distribution._pmf_add))
    return _losses(remove), _losses(add)


def _losses(pmf: "DensePLDPmf") -> Losses:
    values = (np.arange(pmf.size) + pmf._lower_loss) * pmf._discretization
    return Losses(values, np.asarray(pmf._probs), float(pmf._infinity_mass))


def all_at_once(settings: Settings, records: int) -> Settings:
    """Settings that cost at least as much as `records` records per person: all are in the sample, or none."""
    return tuple((min(1.0, records * q), sigma / records, n) for q, sigma, n in settings)


@lru_cache(maxsize=1024)
def group_epsilon(settings: Settings, delta: float, records: int) -> float:
    """Upper bound of epsilon for a person with `records` records, by PLD; by RDP of the worst case if PLD fails."""
    try:
        return float(loss_distribution(settings, records).get_epsilon_for_delta(delta))
    except FAILURES:
        return rdp_epsilon(all_at_once(settings, records), delta)


# ---- PRV: the range and resolution of its grid; prv.py does the computation


def _domain(settings: Settings, delta: float, eps_error: float) -> float:
    """Privacy loss beyond which the mass is below PRV's numerical error (Remark 5.6 of the PRV paper)."""
    error = delta / 1000
    steps = sum(n for *_, n in settings)
    singles = (rdp_epsilon(((q, sigma, 1),), error / 8 / steps) for q, sigma, _ in settings)
    return max(rdp_epsilon(settings, error / 4), *singles, eps_error) + 3


def default_eps_error(settings: Settings, delta: float) -> float:
    """PRV's half-width: 1 % of epsilon up to 0.01, then 0.1 %; coarser only where the grid would take too long."""
    percent = rdp_epsilon(settings, delta) / 100
    eps_error = max(0.002, min(percent, max(0.01, percent / 10)))
    steps = sum(n for *_, n in settings)
    domain = _domain(settings, delta, eps_error)
    while grid_points(steps, delta, eps_error, domain) > MAX_DEFAULT_POINTS and eps_error < max(0.1, percent):
        eps_error *= 2
    return eps_error


# ---- the table


def _prv(settings: Settings, delta: float, eps_error: float, quick: bool = False) -> Bounds:
    from .prv import prv_bounds

    lower, estimate, upper = prv_bounds(settings, delta, eps_error, _domain(settings, delta, eps_error), quick)
    if lower > rdp_epsilon(settings, delta) + 1e-6:
        raise AccountantError(f"claims epsilon >= {lower:.6g}, above RDP's upper bound")
    return max(lower, 0.0), max(estimate, 0.0), max(upper, 0.0)


def _pld(settings: Settings, delta: float, eps_error: float) -> Bounds:
    value = float(loss_distribution(settings).get_epsilon_for_delta(delta))
    return 0.0, value, value


def _rdp(settings: Settings, delta: float, eps_error: float) -> Bounds:
    value = rdp_epsilon(settings, delta)
    return 0.0, value, value


ACCOUNTANTS: dict[str, Callable[[Settings, float, float], Bounds]] = {"prv": _prv, "pld": _pld, "rdp": _rdp}
SECOND_OPINIONS = {"prv": ("pld",)}  # PRV covers the removal of a record only; PLD covers its addition too


@lru_cache(maxsize=1024)
def bounds_by(name: str, settings: Settings, delta: float, eps_error: float, quick: bool = False) -> Bounds | str:
    """Bounds by one accountant, or the reason why it failed. `quick` is PRV's, for searches: see `prv.compose`."""
    account = partial(_prv, quick=True) if quick else ACCOUNTANTS[name]
    try:
        bounds = account(settings, delta, eps_error)
    except FAILURES as error:
        return f"{name} failed: {error}"
    if any(map(math.isnan, bounds)):
        return f"{name} failed: returned {bounds}"
    return bounds
