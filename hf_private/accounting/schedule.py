"""Epsilon along the steps of a run, computed once before it starts, so that a progress bar can show it live.

The accountant that enforces the budget takes seconds. Here the privacy losses of a step are composed on a coarse grid,
at a few numbers of steps, with one FFT each; coarse grids and numbers in between are rounded up.
"""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import logsumexp

from hf_private._validate import integer_at_least, one_of, probability

from . import accountants
from .accountants import ACCOUNTANTS, AccountantError, Losses, Settings, all_at_once
from .budget import enforced_epsilon, settings_of
from .events import Event
from .tradeoff import epsilon_at

POINTS = 80  # numbers of steps at which epsilon is computed; between them it is rounded up
MAX_GRID = 200_000
ORDERS = 2.0 ** np.arange(-4, 8)  # of the moments that say how far losses reach


@dataclass(frozen=True)
class Schedule:
    """Epsilon after each of the planned steps: call it with their number.

    Guarantee: never below the true epsilon, never falling, and after the last step what the accountant says.

    >>> schedule = epsilon_schedule(Event(0.01, (1.0,)), steps=1000, delta=1e-5)
    >>> round(schedule(0), 2), round(schedule(500), 2), round(schedule(1000), 2)
    (0.0, 1.36, 1.84)
    """

    steps: tuple[int, ...]
    epsilons: tuple[float, ...]

    def __call__(self, step: int) -> float:
        """Epsilon after `step` of the planned steps; infinity after more than were planned."""
        integer_at_least(0, step=step)
        index = int(np.searchsorted(self.steps, step))
        return self.epsilons[index] if index < len(self.epsilons) else math.inf


def epsilon_schedule(
    event: Event,
    steps: int,
    spent: Iterable[Event] = (),
    *,
    delta: float,
    accountant: str = "prv",
    records_per_unit: int = 1,
) -> Schedule:
    """Epsilon after 0, 1, ..., `steps` further charges of `event` on top of what is `spent`.

    Besides the accountant's own value after the last step, which calibration has computed and kept, this costs tenths
    of a second.

    Args:
        delta, accountant, records_per_unit: as the budget is enforced.
    """
    probability(delta=delta)
    one_of(ACCOUNTANTS, accountant=accountant)
    integer_at_least(0, steps=steps)
    integer_at_least(1, records_per_unit=records_per_unit)
    spent = tuple(spent)
    # epsilon grows like a square root at first: these numbers are about equally far apart in epsilon
    numbers = sorted({math.ceil(steps * (i / POINTS) ** 2) for i in range(POINTS + 1)})

    def plan(charges: int) -> tuple[Event, ...]:
        return (*spent, Event(event.sample_rate, event.releases, charges * event.steps, event.sampling))

    last = enforced_epsilon(plan(steps), delta, accountant, records_per_unit)
    plans = [settings_of(plan(n)) for n in numbers]
    priced = [settings for settings in plans if settings is not None]
    epsilons = [_rdp(settings, delta, records_per_unit) for settings in plans]
    if len(priced) == len(plans) and (accountant != "rdp" or records_per_unit > 1):
        with contextlib.suppress(*accountants.FAILURES):
            epsilons = _composed(priced, delta, records_per_unit)
        if (
            accountant == "prv" and records_per_unit == 1 and priced[-1]
        ):  # PRV adds its certified error to what is true
            width = accountants.default_eps_error(priced[-1], delta) + 1e-3
            epsilons = [eps + width if settings else 0.0 for settings, eps in zip(priced, epsilons, strict=True)]
    climbing = np.minimum(np.maximum.accumulate(epsilons), last)
    return Schedule(tuple(numbers), (*map(float, climbing[:-1]), last))


def _rdp(settings: Settings | None, delta: float, records: int) -> float:
    if not settings:
        return 0.0 if settings is not None else math.inf
    return accountants.rdp_epsilon(all_at_once(settings, records), delta)


def _composed(plans: list[Settings], delta: float, records: int) -> list[float]:
    """Epsilon of each plan, from pessimistic losses on one grid that is wide enough for the last plan.

    Raises:
        AccountantError: if the grid would be large.
    """
    if not plans[-1]:
        return [0.0] * len(plans)
    interval = min(1e-2, 0.2 / math.sqrt(sum(n for *_, n in plans[-1])))
    widest = max(1 / sigma**2 + 20 / sigma for _, sigma, _ in all_at_once(plans[-1], records))  # losses of one step
    if not widest / interval <= MAX_GRID:
        raise AccountantError(f"needs a grid that reaches {widest:.3g}")
    steps = {(q, sigma): accountants.one_step_losses(q, sigma, interval, records) for q, sigma, _ in plans[-1]}
    by_direction = [
        _in_direction({key: both[i] for key, both in steps.items()}, plans, interval, delta) for i in (0, 1)
    ]
    return [max(pair) for pair in zip(*by_direction, strict=True)]


def _in_direction(
    steps: dict[tuple[float, float], Losses], plans: list[Settings], interval: float, delta: float
) -> list[float]:
    """The same when a record is removed, or when it is added."""
    missed = delta / 1e4  # of the losses' mass on either side of the grid
    low, high = (_reach(steps, plans[-1], orders, missed) for orders in (np.array([-1.0]), ORDERS))
    start, points = math.floor(low / interval), next_fast_len(math.ceil((high - low) / interval) + 2, real=True)
    if not points <= MAX_GRID:
        raise AccountantError(f"needs a grid of {points} points, more than {MAX_GRID}")
    losses = (start + np.arange(points)) * interval
    transforms = {}
    for key, (values, probabilities, _) in steps.items():
        places = np.round(values / interval).astype(int) % points  # sums of losses are found modulo the grid
        transforms[key] = rfft(np.bincount(places, probabilities, points))
    epsilons = []
    for plan in plans:
        if not plan:
            epsilons.append(0.0)
            continue
        spectrum = math.prod((transforms[q, sigma] ** n for q, sigma, n in plan), start=1.0)
        infinite = -math.expm1(sum(n * math.log1p(-steps[q, sigma].infinite) for q, sigma, n in plan))
        probabilities = np.roll(irfft(spectrum, points), -start)
        epsilons.append(epsilon_at(losses, probabilities, infinite + 2 * missed, delta))
    return epsilons


def _reach(steps: dict[tuple[float, float], Losses], plan: Settings, orders: np.ndarray, missed: float) -> float:
    """How far the plan's losses reach, up or down, except for a mass of `missed`: Chernoff's bound, the best order.

    Plans with fewer steps reach no farther: the moment of order -1 is at most 1, of a positive order at least 1.
    """
    moments = np.zeros(len(orders))
    for q, sigma, n in plan:
        values, probabilities, _ = steps[q, sigma]
        moments += n * np.maximum(logsumexp(orders[:, None] * values, b=probabilities, axis=1), 0)
    bounds = (moments - math.log(missed)) / orders
    return float(bounds.min() if orders[0] > 0 else bounds.max())
