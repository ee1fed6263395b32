"""What the best possible attacker can learn about one record's membership: bounds from the privacy profile.

Epsilon at one delta says little about that. The whole profile delta(epsilon) says everything: it is equivalent to the
trade-off curve between an attack's false alarms and the members that it finds (arXiv:1905.02383, 2.4). All numbers
are upper bounds over every attack, with any side knowledge, on any dataset.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from hf_private._validate import integer_at_least, one_of, probability

from . import LAWS, accountants
from .accountants import ORDERS, Settings, all_at_once
from .budget import settings_of
from .composition import best_of_rdp, expected_power
from .events import Event
from .tradeoff import LARGEST, Profile, hockey_stick

FALSE_ALARMS = (0.1, 0.01, 0.001)  # at which `Risk.tpr` is given
CURVE = tuple(float(f"{rate:.3g}") for rate in np.logspace(-5, 0, 101))
POINTS = 4000  # epsilons up to the one at the target delta
DEFAULT_DELTA = 1e-6  # where the grid becomes coarser, if there is no target


@dataclass(frozen=True)
class Risk:
    """Upper bounds on every membership attack against one record (or one person's records).

    Guarantee: no attack does better, whatever it knows besides; both adding and removing are covered.

    Attributes:
        advantage: TPR - FPR of the best attack: total variation, delta at epsilon 0. 0 is chance, 1 is certainty.
        accuracy: of the best guess if members and others are equally likely; 0.5 is chance.
        tpr: {false positive rate: largest true positive rate}.
        mu: smallest mu whose Gaussian profile lies above this one's at every epsilon from 0 to `mu_up_to_epsilon`. It
            says nothing beyond: a subsampled Gaussian has heavier tails than any Gaussian of a useful mu.
        mu_up_to_epsilon: epsilon at the target delta, rounded up to 3 decimals; both are None without a target.
        curve: (FPR, TPR) points of the trade-off curve.
        accountant: whose profile it is.
        note: what is not exact.
    """

    advantage: float
    accuracy: float
    tpr: dict[float, float]
    mu: float | None
    mu_up_to_epsilon: float | None
    curve: tuple[tuple[float, float], ...] = field(repr=False)
    accountant: str
    note: str
    profile: Profile = field(repr=False, compare=False)

    def bayes_accuracy(self, prior: float) -> float:
        """Accuracy of the best guess if the record is a member with probability `prior`.

        Without any release it is max(prior, 1 - prior).

        >>> f"{risk([Event(1.0, (0.5,))], 1e-5).bayes_accuracy(0.1):.3f}"
        '0.930'
        """
        probability(prior=prior)
        return self.profile.bayes_accuracy(prior)

    @property
    def gaussian(self) -> str:
        """mu together with the range in which it holds."""
        if self.mu is None or self.mu_up_to_epsilon is None:
            return "no mu, because there is no target delta"
        return f"mu {_up(self.mu, 2):.2f} (for epsilon from 0 to {self.mu_up_to_epsilon:.3f})"

    def to_dict(self) -> dict[str, Any]:
        """JSON form, rounded up to 4 decimals; infinity is the string "inf"."""
        mu = None if self.mu is None else _up(self.mu, 4)
        return {
            "advantage": _up(self.advantage, 4),
            "accuracy": _up(self.accuracy, 4),
            "tpr_at_fpr": {f"{rate:g}": _up(found, 4) for rate, found in self.tpr.items()},
            "mu": "inf" if mu == math.inf else mu,
            "mu_up_to_epsilon": "inf" if self.mu_up_to_epsilon == math.inf else self.mu_up_to_epsilon,
            "accountant": self.accountant,
            "note": self.note,
        }

    def __str__(self) -> str:
        return (
            f"The best possible attacker guesses membership correctly at most {_percent(self.accuracy)} of the time"
            f" (50 % is chance); at 1 % false alarms it finds at most {_percent(self.tpr[0.01])} of the members."
        )


def risk(
    events: Iterable[Event],
    target_delta: float | None,
    records_per_unit: int = 1,
    *,
    runs: float = 1,
    law: str = "fixed",
) -> Risk:
    """Bound what any attacker can learn from everything in `events`.

    Args:
        events: all private steps, of any number of phases.
        target_delta: `mu` covers every epsilon up to the one at this delta. None: no `mu`.
        records_per_unit: the attacker looks for a person with up to this many records, each sampled on its own. Exact
            where PLD can price it.
        runs: number of runs that were tried, each of which costs `events`.
        law: how that number was chosen, as in `composition`. "fixed" is exact. The others are priced by RDP, a bound
            that is valid and loose; `note` says so.

    >>> print(risk([Event(0.014848, (0.539915,), steps=204)], target_delta=1e-5))
    The best possible attacker guesses membership correctly at most 65.2 % of the time (50 % is chance); at 1 % false alarms it finds at most 10.3 % of the members.
    """  # noqa: E501
    if target_delta is not None:
        probability(target_delta=target_delta)
    integer_at_least(1, records_per_unit=records_per_unit)
    one_of(LAWS, law=law)
    events = tuple(events)
    if law == "fixed":
        integer_at_least(1, runs=runs)
        events = tuple(replace(event, steps=int(runs) * event.steps) for event in events)
    settings = settings_of(events)
    delta = target_delta or DEFAULT_DELTA
    accountant = "pld"
    if not settings:
        level = np.array([0.0 if settings is not None else 1.0])
        note = "" if settings is not None else "a step without noise, or of unknown sampling"
        # nothing was released, or nothing was hidden: either is the same at every epsilon
        profile, up_to = Profile(np.zeros(1), level, level), math.inf
    elif law != "fixed":
        accountant, note = "rdp", f"the best of a random number of runs ({law}): a bound by RDP, which is loose"
        profile, up_to = _best_of(settings, delta, records_per_unit, runs, law)
    else:
        accountant, note, profile, up_to = _profile(settings, delta, records_per_unit)
    tpr = profile.found(FALSE_ALARMS)
    return Risk(
        advantage=profile.advantage,
        accuracy=(1 + profile.advantage) / 2,
        tpr=dict(zip(FALSE_ALARMS, tpr, strict=True)),
        mu=None if target_delta is None else profile.mu(up_to),
        mu_up_to_epsilon=None if target_delta is None else up_to,
        curve=tuple(zip(CURVE, profile.found(CURVE), strict=True)),
        accountant=accountant,
        note=note,
        profile=profile,
    )


# ---- profiles: (settings, delta, records) -> profile, epsilon at delta


def _pld(settings: Settings, delta: float, records: int) -> tuple[Profile, float]:
    remove, add = accountants.pld_losses(settings, records)
    top = max(remove.values[-1], add.values[-1])
    return _on_a_grid(lambda eps: (hockey_stick(*remove, eps), hockey_stick(*add, eps)), delta, float(top))


def _rdp(settings: Settings, delta: float, records: int) -> tuple[Profile, float]:
    return _of_rdp(accountants.composed_rdp(all_at_once(settings, records)), delta)


@lru_cache(maxsize=16)
def _profile(settings: Settings, delta: float, records: int) -> tuple[str, str, Profile, float]:
    """Profile by PLD, or by RDP where that fails: (accountant, note, profile, epsilon at delta)."""
    try:
        return "pld", "", *_pld(settings, delta, records)
    except accountants.FAILURES as error:
        return "rdp", f"pld failed: {error}; a bound by RDP, which is loose", *_rdp(settings, delta, records)


@lru_cache(maxsize=16)
def _best_of(settings: Settings, delta: float, records: int, runs: float, law: str) -> tuple[Profile, float]:
    """By RDP; and a run with and one without the record can be coupled to agree unless it shows their difference, so
    that all runs do with probability E[(1 - advantage)^K]."""
    *_, single, _ = _profile(settings, delta, records)
    events = [Event(q, (sigma,), steps) for q, sigma, steps in all_at_once(settings, records)]
    coupled = 1 - expected_power(1 - single.advantage, runs, law)
    return _of_rdp(best_of_rdp(events, runs, law), delta, coupled)


def _of_rdp(curve: np.ndarray, delta: float, advantage: float = 1.0) -> tuple[Profile, float]:
    """RDP bounds both directions. At epsilon 0 the bounds of Pinsker and of Bretagnolle and Huber are better."""
    divergence = float(curve.min())  # at any order it is above the KL divergence
    distance = min(advantage, math.sqrt(divergence / 2), math.sqrt(-math.expm1(-divergence)))

    def both(eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        deltas = np.minimum(accountants.rdp_to_delta(curve, eps), distance)
        return deltas, deltas

    top = float(np.min(curve - np.log(1e-15 * ORDERS) / (ORDERS - 1) + np.log1p(-1 / ORDERS)))
    return _on_a_grid(both, delta, top)


def _on_a_grid(
    both: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], delta: float, top: float
) -> tuple[Profile, float]:
    """Profile on a grid that is fine up to epsilon at `delta`, and that epsilon, rounded up to 3 decimals."""
    low, up_to = 0.0, min(max(top, 1e-3), LARGEST)
    for _ in range(2):  # the larger of two falling functions falls: find where it reaches delta, then look closer
        grid = np.linspace(low, up_to, POINTS + 1)
        reached = np.maximum(*both(grid)) <= delta
        first = int(np.argmax(reached)) if reached.any() else POINTS
        low, up_to = float(grid[max(first - 1, 0)]), float(grid[first])
    enough, up_to = bool(reached.any()), math.ceil(up_to * 1000) / 1000
    beyond = np.linspace(up_to, min(max(top, up_to), LARGEST), POINTS // 4)
    grid = np.unique(np.append(np.linspace(0, up_to, POINTS + 1), beyond))
    return Profile(grid, *both(grid)), up_to if enough else math.inf


def _up(value: float, digits: int) -> float:
    """Round up: a risk must never look smaller than it is."""
    return math.ceil(value * 10**digits) / 10**digits if math.isfinite(value) else value


def _percent(share: float) -> str:
    return f"{_up(100 * share, 1):.1f} %"
