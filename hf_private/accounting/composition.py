"""Epsilon of publishing the best of a random number of runs on the same records."""

import math
from collections.abc import Sequence

import numpy as np

from hf_private._validate import one_of, positive, probability

from .accountants import ORDERS, composed_rdp, rdp_to_epsilon
from .budget import settings_of
from .events import Event

# A law says how the number of runs was chosen. "fixed": in advance, and every run is charged. The others draw it at
# random from a truncated negative binomial distribution with this shape, and only the best run is published.
SHAPES = {"geometric": 1.0, "logarithmic": 0.0}


def best_of_epsilon(events: Sequence[Event], delta: float, runs: float, law: str = "geometric") -> float:
    """Epsilon of publishing the best of a random number of runs, each of which costs `events`.

    Theorem 2 of Papernot and Steinke 2022 (arXiv:2110.03620): if K follows a truncated negative binomial law of shape
    eta and parameter gamma, RDP at order a becomes, for every order b,
    e(a) + (1 + eta) ((1 - 1/b) e(b) + log(1/gamma) / b) + log(E[K]) / (a - 1).

    Args:
        runs: Mean number of runs, E[K] > 1. The number must be drawn at random, and all other runs discarded unseen.

    >>> round(best_of_epsilon([Event(2000 / 67349, (1.253827,), steps=680)], 1e-5, runs=10), 1)
    6.7
    """
    probability(delta=delta)
    total = best_of_rdp(events, runs, law)
    return rdp_to_epsilon(total, delta)


def best_of_rdp(events: Sequence[Event], runs: float, law: str = "geometric") -> np.ndarray:
    """RDP at `ORDERS` of publishing the best of a random number of runs: the theorem of `best_of_epsilon`."""
    one_of(tuple(SHAPES), law=law)
    positive(runs=runs)
    if runs <= 1:
        raise ValueError(f"`runs` must be > 1, got {runs!r}. A single run needs no charge for selection.")
    settings = settings_of(events)
    if settings is None:
        return np.full(ORDERS.shape, math.inf)
    shape = SHAPES[law]
    gamma = _gamma(shape, runs)
    rdp = composed_rdp(settings)
    selection = (1 + shape) * np.min((1 - 1 / ORDERS) * rdp - math.log(gamma) / ORDERS)
    return rdp + selection + math.log(runs) / (ORDERS - 1)


def expected_power(base: float, runs: float, law: str) -> float:
    """E[base^K] for the random number K of runs, rounded down.

    >>> round(expected_power(0.5, 2.0, "geometric"), 6)
    0.333333
    """
    gamma = _gamma(SHAPES[law], runs)
    if SHAPES[law] == 1:
        return gamma * base / (1 - (1 - gamma) * base)
    return math.log1p(-(1 - gamma) * base) / math.log(gamma) * (1 - 1e-9)


def _gamma(shape: float, mean: float) -> float:
    """The parameter of the law whose mean is `mean`."""
    if shape == 1:
        return 1 / mean
    low, high = 1e-300, 1 - 1e-9  # the mean (1/gamma - 1) / log(1/gamma) decreases with gamma
    for _ in range(2000):
        middle = math.sqrt(low * high)
        if (1 / middle - 1) / -math.log(middle) > mean:
            low = middle
        else:
            high = middle
    return low  # the side of the larger mean
