"""Epsilon along the steps of a run, computed once before it starts, so that a progress bar can show it live.

The accountant that enforces the budget takes seconds. Here PLD composes the steps on a coarse grid, at a few numbers
of steps; coarse grids and numbers in between are rounded up.
"""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hf_private._validate import integer_at_least, one_of, probability

from . import accountants
from .accountants import ACCOUNTANTS, AccountantError, Settings, all_at_once
from .budget import enforced_epsilon, settings_of
from .events import Event

POINTS = 80  # numbers of steps at which epsilon is computed; between them it is rounded up
MAX_GRID = 200_000
OTHER_GRID = 1e-3  # what the accountant's own grid may add: both are pessimistic, and either may be more so


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
    epsilons = [_rdp(settings, delta, records_per_unit) for settings in plans]
    before, whole = settings_of(spent), plans[-1]
    if before is not None and whole and (accountant != "rdp" or records_per_unit > 1):
        step, charged = (event.sample_rate, event.noise_multiplier), [n * event.steps for n in numbers]
        with contextlib.suppress(*accountants.FAILURES):
            epsilons = _composed(before, step, charged, delta, records_per_unit)
        if accountant == "prv" and records_per_unit == 1:  # PRV adds its certified error to what is true
            width = accountants.default_eps_error(whole, delta)
            epsilons = [eps + width for eps in epsilons]
        epsilons = [eps if settings else 0.0 for settings, eps in zip(plans, epsilons, strict=True)]
    climbing = np.minimum(np.maximum.accumulate(epsilons), last)
    return Schedule(tuple(numbers), (*map(float, climbing[:-1]), last))


def _rdp(settings: Settings | None, delta: float, records: int) -> float:
    if not settings:
        return 0.0 if settings is not None else math.inf
    return accountants.rdp_epsilon(all_at_once(settings, records), delta)


def _composed(
    spent: Settings, step: tuple[float, float], numbers: list[int], delta: float, records: int
) -> list[float]:
    """Epsilon of what is spent and each number of steps (sample rate, noise multiplier), pessimistic on any grid.

    Raises:
        AccountantError: if the grid would be large.
    """
    worst = all_at_once((*spent, (*step, numbers[-1])), records)
    interval = min(1e-2, 0.2 / math.sqrt(sum(n for *_, n in worst)))
    widest = max(1 / sigma**2 + 20 / sigma for _, sigma, _ in worst)  # losses of one step
    if not widest / interval <= MAX_GRID:
        raise AccountantError(f"needs a grid that reaches {widest:.3g}")
    before = accountants.composed_losses(spent, records, interval)
    together = (
        before.compose(accountants.composed_losses(((*step, n),) if n else (), records, interval)) for n in numbers
    )
    return [float(losses.get_epsilon_for_delta(delta)) + OTHER_GRID for losses in together]
