"""What an attacker can achieve against a privacy profile: the maths, free of accountants.

An attacker sees the released model and decides whether one record was among the training data. P is the law of the
release with the record, Q without it. A profile bounds the two hockey-stick divergences

    remove(eps) >= sup_S P(S) - e^eps Q(S)        add(eps) >= sup_S Q(S) - e^eps P(S)        eps >= 0

and everything here follows from these inequalities, at any finite set of epsilons: fewer points make a bound larger,
never too small. "Found" is P(S), the share of members that the attack S finds; "false alarms" is Q(S).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr

ROUNDING = 1e-12  # more than what floating point may have taken from a sum of probabilities
LARGEST = 700.0  # exp of it is finite


def hockey_stick(losses: np.ndarray, probabilities: np.ndarray, infinite: float, epsilons: np.ndarray) -> np.ndarray:
    """E[(1 - e^(eps - loss))_+] at each of `epsilons`, rounded up; they may be negative.

    Args:
        losses: possible privacy losses, ascending, shape (points,).
        probabilities: of these losses, shape (points,). An FFT leaves some just below 0: they count as 0.
        infinite: probability of an infinite loss.
        epsilons: any order, shape (epsilons,), at most `LARGEST`.

    >>> hockey_stick(np.array([-1.0, 1.0]), np.array([0.25, 0.75]), 0.0, np.array([0.0])).round(6).tolist()
    [0.47409]
    """
    probabilities = np.maximum(probabilities, 0)
    weighted = probabilities * np.exp(-np.minimum(losses, LARGEST))
    # sums from each loss on and beyond the last, (points + 1,): the smallest terms first
    upper, lower = (np.append(np.cumsum(terms[::-1])[::-1], 0) for terms in (probabilities, weighted))
    beyond = np.searchsorted(losses, epsilons, side="right")
    return infinite + upper[beyond] - np.exp(epsilons) * lower[beyond] + ROUNDING


def gaussian_profile(mu: float, epsilons: np.ndarray, tests: np.ndarray | None = None) -> np.ndarray:
    """delta(eps) of telling N(mu, 1) from N(0, 1): P(S) - e^eps Q(S) of the best test S.

    Args:
        tests: for each epsilon, use the test that is best at this epsilon instead: a lower bound, linear in e^eps.

    >>> float(gaussian_profile(1.0, np.array([0.0]))[0].round(6))
    0.382925
    """
    tests = epsilons if tests is None else tests
    found, alarms = log_ndtr(mu / 2 - tests / mu), log_ndtr(-mu / 2 - tests / mu)
    return np.exp(found) * -np.expm1(np.minimum(epsilons + alarms - found, 0))


@dataclass(frozen=True, eq=False)
class Profile:
    """Upper bounds of both divergences at ascending `epsilons` from 0 on; all three have the shape (points,).

    >>> nothing = Profile(np.zeros(1), np.zeros(1), np.zeros(1))
    >>> nothing.advantage, nothing.bayes_accuracy(0.3), nothing.found([0.01])
    (0.0, 0.7, (0.01,))
    """

    epsilons: np.ndarray
    remove: np.ndarray
    add: np.ndarray

    def __post_init__(self) -> None:
        for name in ("remove", "add"):  # a divergence lies in [0, 1] and does not grow with epsilon
            values = np.minimum.accumulate(np.clip(getattr(self, name), 0, 1))
            values.flags.writeable = False
            object.__setattr__(self, name, values)

    @property
    def advantage(self) -> float:
        """Upper bound of the total variation distance between P and Q, to which both divergences come at 0."""
        return float(min(self.remove[0], self.add[0]))

    def found(self, false_alarms: Sequence[float] | np.ndarray) -> tuple[float, ...]:
        """Largest share of members that an attack finds at each rate of false alarms.

        P(S) <= e^eps Q(S) + remove(eps). And Q(not S) <= e^eps P(not S) + add(eps), so that
        P(S) <= 1 - e^-eps (1 - Q(S) - add(eps)).
        """
        growth, alarms = np.exp(self.epsilons), np.asarray(false_alarms, float)[:, None]
        by_remove = growth * alarms + self.remove
        by_add = 1 - (1 - alarms - self.add) / growth
        best = np.minimum(by_remove.min(axis=1), by_add.min(axis=1))
        return tuple(map(float, np.clip(best, alarms[:, 0], 1)))

    def bayes_accuracy(self, prior: float) -> float:
        """Largest probability of a right guess if the record is a member with probability `prior`.

        A guess is right with probability 1 - prior + (prior P(S) - (1 - prior) Q(S)), a hockey-stick divergence at
        eps = log((1 - prior) / prior); where that is negative, the roles of P and Q change.
        """
        rare, deltas = (prior, self.remove) if prior <= 0.5 else (1 - prior, self.add)
        # a divergence is convex in e^eps: between two points it stays below the chord
        delta = np.interp((1 - rare) / rare, np.exp(self.epsilons), deltas)
        if prior == 0.5:
            delta = self.advantage
        return min(1.0, float(1 - rare + rare * delta))

    def mu(self, up_to: float) -> float:
        """Smallest mu whose Gaussian profile lies above both divergences at every epsilon in [0, up_to], rounded up.

        Divergences are convex in e^eps: between two points they stay below the chord, and the Gaussian profile above
        each of its tangents. So it is enough that the tangent in the middle lies above the ends.
        """
        inside = self.epsilons <= up_to
        epsilons, deltas = self.epsilons[inside], np.maximum(self.remove, self.add)[inside]
        middles = (epsilons[1:] + epsilons[:-1]) / 2

        def above(mu: float) -> bool:
            if len(epsilons) == 1:
                return bool(gaussian_profile(mu, epsilons)[0] >= deltas[0])
            left, right = (gaussian_profile(mu, ends, middles) for ends in (epsilons[:-1], epsilons[1:]))
            return bool(np.all(left >= deltas[:-1]) and np.all(right >= deltas[1:]))

        if not deltas.any():
            return 0.0
        if deltas[0] >= 1 or math.isinf(up_to):
            return math.inf
        low, high = 0.0, 1.0
        while not above(high):
            low, high = high, 2 * high
            if high > 1e4:
                return math.inf
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if above(middle) else (middle, high)
        return high
