"""Noise for a budget that is an attacker's advantage instead of an epsilon.

The advantage (true minus false positive rate of the best attack) is what epsilon is meant to limit. Between plans with
the same epsilon it differs: a budget in its terms allows less noise where epsilon is pessimistic.
"""

import math
from collections.abc import Callable, Iterable
from statistics import NormalDist

import numpy as np

from hf_private._validate import integer_at_least, probability

from . import accountants
from .budget import BudgetExceeded, root, settings_of
from .events import Event
from .risk import risk
from .tradeoff import hockey_stick

LEAST_NOISE = 0.3  # with less, a step shows a sampled record nearly in the clear, and accountants take minutes
MOST_NOISE = 1e7
COARSE = 20  # times the width of the grid, for a first answer


def calibrate_risk(
    target_risk: float,
    sample_rate: float,
    steps: int,
    spent: Iterable[Event] = (),
    records_per_unit: int = 1,
    tick: Callable[[], object] = lambda: None,
) -> float:
    """Smallest noise multiplier, rounded up to 6 decimals, that keeps every attack's advantage within `target_risk`.

    It is at least `LEAST_NOISE`, also where sampling alone would hide enough.

    Guarantee: `risk((*spent, Event(sample_rate, (result,), steps)), ...).advantage <= target_risk`.

    Args:
        target_risk: largest advantage allowed, between 0 (chance) and 1 (certainty). An attacker whose advantage is at
            most a is right at most (1 + a) / 2 of the time, if members and others are equally likely.
        spent: earlier steps on the same records.
        records_per_unit: the attacker looks for a person with up to this many records.
        tick: called before each use of the accountant, which may take seconds, to show progress.

    >>> sigma = calibrate_risk(0.1, sample_rate=0.03, steps=680)
    >>> round(sigma, 2), risk([Event(0.03, (sigma,), 680)], 1e-5).advantage <= 0.1
    (3.18, True)
    """
    probability(target_risk=target_risk)
    integer_at_least(1, steps=steps, records_per_unit=records_per_unit)
    spent = tuple(spent)
    already = risk(spent, None, records_per_unit).advantage
    goal = target_risk * (1 - 1e-7)  # rounding on another machine must not lift the advantage above the target
    if already >= goal:
        raise BudgetExceeded(
            f"no noise multiplier fits: an advantage of {already:.6g} of `target_risk` {target_risk:g} is already"
            " spent. Raise `target_risk`, or stop here."
        )

    def plan(sigma: float) -> tuple[Event, ...]:
        return (*spent, Event(sample_rate, (sigma,), steps))

    def excess(sigma: float) -> float:
        tick()
        return risk(plan(sigma), None, records_per_unit).advantage - goal

    def roughly(sigma: float) -> float:  # in a fraction of the time, and almost as tight
        tick()
        return _rough_advantage(plan(sigma), records_per_unit) - goal

    low = high = max(_guess(target_risk, sample_rate * records_per_unit, steps), LEAST_NOISE)
    while roughly(high) > 0:
        low, high = high, 1.3 * high
        if high > MOST_NOISE:
            raise BudgetExceeded(
                f"no noise multiplier below {MOST_NOISE:g} keeps the advantage within `target_risk` {target_risk:g},"
                f" of which {already:.6g} is already spent. Raise `target_risk`."
            )
    while low > LEAST_NOISE and roughly(low) <= 0:
        low, high = max(low / 1.3, LEAST_NOISE), low
    if roughly(low) <= 0:
        return low
    sigma = root(roughly, low, high, xtol=5e-7, rtol=1e-9)
    width = 1e-3 * sigma
    slope, missing = (roughly(sigma + width) - roughly(sigma)) / width, excess(sigma)
    for _ in range(8):  # the secant method from the rough answer to the exact one
        if abs(missing) < 1e-8 or slope >= 0:
            break
        before, sigma = sigma, max(sigma - missing / slope, LEAST_NOISE)
        if abs(sigma - before) < 1e-7:
            break
        last, missing = missing, excess(sigma)
        slope = (missing - last) / (sigma - before)
    sigma, up = math.ceil(sigma * 1e6) / 1e6, 1e-6
    while excess(sigma) > 0:
        sigma, up = round(sigma + up, 6), 2 * up
    return sigma


def _rough_advantage(events: tuple[Event, ...], records: int) -> float:
    """The advantage on a coarse grid: never too small."""
    settings = settings_of(events)
    assert settings, "there is noise, and at least one step"
    try:
        losses = accountants.pld_losses(settings, records, COARSE)
    except accountants.FAILURES:
        return risk(events, None, records).advantage
    return min(float(hockey_stick(*direction, np.zeros(1))[0]) for direction in losses)


def _guess(target_risk: float, sample_rate: float, steps: int) -> float:
    """Noise for which the central limit theorem gives this advantage: mu = q sqrt(steps (e^(1/sigma^2) - 1))."""
    mu = 2 * NormalDist().inv_cdf((1 + target_risk) / 2)
    return 1 / math.sqrt(math.log1p((mu / min(sample_rate, 1.0)) ** 2 / steps))
