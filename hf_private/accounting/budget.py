"""What a run has spent, and how much noise a budget allows.

The privacy unit is one record (or a person with up to `records_per_unit` records), neighbouring datasets differ by
adding or removing one unit, and sampling is Poisson. Other sampling, and any release without noise, has an infinite
epsilon. The accountants are in accountants.py.
"""

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hf_private._html import table
from hf_private._validate import integer_at_least, non_negative, one_of, positive, probability

from . import accountants
from .accountants import ACCOUNTANTS, SECOND_OPINIONS, Bounds, Settings, all_at_once, bounds_by
from .events import Event

if TYPE_CHECKING:
    from .risk import Risk


class BudgetExceeded(RuntimeError):
    """The privacy budget does not allow what was asked."""


def settings_of(events: Iterable[Event]) -> Settings | None:
    """Distinct settings in a fixed order, so that one history has one epsilon; None if its epsilon is infinite."""
    steps: dict[tuple[float, float], int] = {}
    for event in events:
        if event.steps == 0:
            continue
        if event.sampling != "poisson" or event.noise_multiplier == 0:
            return None
        key = (event.sample_rate, event.noise_multiplier)
        steps[key] = steps.get(key, 0) + event.steps
    return tuple((*key, n) for key, n in sorted(steps.items()))


def _upper(
    name: str,
    settings: Settings | None,
    delta: float,
    eps_error: float | None = None,
    records: int = 1,
    quick: bool = False,
) -> float:
    """Upper bound by one accountant, or the largest bound of the others if it fails."""
    if settings is None:
        return math.inf
    if not settings:
        return 0.0
    if records > 1:
        return accountants.group_epsilon(settings, delta, records)
    eps_error = eps_error or accountants.default_eps_error(settings, delta)
    bounds = bounds_by(name, settings, delta, eps_error, quick)
    if not isinstance(bounds, str):
        return bounds[2]
    others = [bounds_by(other, settings, delta, eps_error) for other in ACCOUNTANTS if other != name]
    return max((other[2] for other in others if not isinstance(other, str)), default=math.inf)


@dataclass(frozen=True)
class EpsilonReport:
    """Epsilon by every accountant. `epsilon` is the number to publish and to enforce; `note` says what failed, and
    `risk`, where it is known, how often an attacker can be right."""

    delta: float
    epsilon: float
    accountant: str
    eps_error: float
    delta_error: float
    bounds: dict[str, Bounds] = field(default_factory=dict)
    note: str = ""
    risk: "Risk | None" = None

    def __str__(self) -> str:
        uppers = ", ".join(f"{name.upper()} {bounds[2]:.3f}" for name, bounds in self.bounds.items())
        note = f"; {self.note}" if self.note else ""
        meaning = f"\n{self.risk}" if self.risk is not None else ""
        return f"epsilon {self.epsilon:.3f} at delta {self.delta:g} (upper bounds: {uppers}){note}{meaning}"

    def _repr_html_(self) -> str:
        """The same as a table, for Jupyter."""
        rows = [("epsilon", f"{self.epsilon:.3f}"), ("delta", f"{self.delta:g}")]
        rows += [(f"upper bound by {name.upper()}", f"{bounds[2]:.3f}") for name, bounds in self.bounds.items()]
        rows += [("note", self.note)] if self.note else []
        rows += [("what it means", str(self.risk))] if self.risk is not None else []
        return table("Privacy spent", rows)

    @property
    def prv(self) -> Bounds | None:
        """PRV's certified (lower, estimate, upper)."""
        return self.bounds.get("prv")

    @property
    def pld(self) -> float | None:
        """PLD's upper bound."""
        return self.bounds["pld"][2] if "pld" in self.bounds else None

    @property
    def rdp(self) -> float | None:
        """RDP's upper bound."""
        return self.bounds["rdp"][2] if "rdp" in self.bounds else None


def epsilon(
    events: Iterable[Event], delta: float, accountant: str = "prv", eps_error: float | None = None
) -> EpsilonReport:
    """Epsilon of everything in `events`, by all accountants.

    The number to publish is the chosen accountant's upper bound; for "prv" it is the larger of PRV's and PLD's upper
    bounds. If the chosen accountant fails, it is the largest bound of the others, and `note` says so.

    >>> report = epsilon([Event(0.01, (1.0,), steps=1000)], delta=1e-5)
    >>> print(report)
    epsilon 1.838 at delta 1e-05 (upper bounds: PRV 1.838, PLD 1.828, RDP 2.101)
    """
    _check(delta, accountant, eps_error)
    settings = settings_of(events)
    if not settings:
        value = math.inf if settings is None else 0.0
        note = "a step without noise, or of unknown sampling" if settings is None else ""
        return EpsilonReport(delta, value, accountant, 0.0, 0.0, dict.fromkeys(ACCOUNTANTS, (value,) * 3), note)
    width = eps_error or accountants.default_eps_error(settings, delta)
    results = {name: bounds_by(name, settings, delta, width) for name in ACCOUNTANTS}
    bounds = {name: result for name, result in results.items() if not isinstance(result, str)}
    notes = [result for result in results.values() if isinstance(result, str)]
    if not bounds:
        notes.append("epsilon is infinite because every accountant failed")
    elif not bounds.keys() >= set(_enforced(accountant)):
        notes.append(f"epsilon is the largest bound by {', '.join(bounds)}")
    value = max(_upper(name, settings, delta, width) for name in _enforced(accountant))
    return EpsilonReport(delta, value, accountant, width, delta / 1000, bounds, "; ".join(notes))


def enforced_epsilon(
    events: Iterable[Event], delta: float, accountant: str = "prv", records_per_unit: int = 1
) -> float:
    """Epsilon as the budget is enforced: the largest bound of the accountant and its second opinion, per person.

    >>> run = [Event(0.01, (1.0,), steps=1000)]
    >>> enforced_epsilon(run, 1e-5) == epsilon(run, 1e-5).epsilon
    True
    """
    _check(delta, accountant)
    integer_at_least(1, records_per_unit=records_per_unit)
    settings = settings_of(events)
    return max(_upper(n, settings, delta, records=records_per_unit) for n in _enforced(accountant, records_per_unit))


def delta_curve(events: Iterable[Event], epsilons: Iterable[float]) -> list[tuple[float, float]]:
    """Upper bound of delta at each epsilon, by PLD (by RDP if PLD fails).

    >>> [(eps, f"{delta:.1e}") for eps, delta in delta_curve([Event(1.0, (1.0,))], [1.0, 4.0])]
    [(1.0, '1.3e-01'), (4.0, '4.7e-05')]
    """
    epsilons = [float(eps) for eps in epsilons]
    non_negative(**{f"epsilons[{i}]": eps for i, eps in enumerate(epsilons)})
    settings = settings_of(events)
    if not settings:
        return [(eps, 1.0 if settings is None else 0.0) for eps in epsilons]
    try:
        distribution = accountants.loss_distribution(settings)
        return [(eps, float(distribution.get_delta_for_epsilon(eps))) for eps in epsilons]
    except accountants.FAILURES:
        deltas = accountants.rdp_to_delta(accountants.composed_rdp(settings), np.array(epsilons))
        return list(zip(epsilons, map(float, deltas), strict=True))


def calibrate(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "prv",
    spent: Iterable[Event] = (),
    records_per_unit: int = 1,
    tick: Callable[[], object] = lambda: None,
) -> float:
    """Smallest noise multiplier, rounded up to 6 decimals, that keeps `spent` and `steps` more steps within budget.

    `tick` is called before each use of an accountant, each of which may take seconds, to show progress.

    >>> calibrate(3.0, 1e-5, sample_rate=0.01, steps=1000, accountant="rdp")
    0.864603
    """
    _check(target_delta, accountant)
    positive(target_epsilon=target_epsilon)
    integer_at_least(1, steps=steps, records_per_unit=records_per_unit)
    if target_epsilon == math.inf:
        raise ValueError(
            "`target_epsilon` must be finite, got inf. Set `noise_multiplier=0` to train without privacy."
        )
    spent = tuple(spent)
    goal = target_epsilon * (1 - 1e-7)  # rounding on another machine must not lift the claim above the target

    def plan(sigma: float) -> Settings:
        settings = settings_of((*spent, Event(sample_rate, (sigma,), steps)))
        assert settings is not None  # `spent` is finite, as checked below, and sigma > 0
        return settings

    def excess(name: str, settings: Settings | None) -> float:
        tick()
        return _upper(name, settings, target_delta, records=records_per_unit) - goal

    def about(sigma: float, coarse: int) -> float:
        """PRV's excess on a grid whose FFT is quick, and `coarse` times as wide: close, but not what is enforced."""
        tick()
        fine = accountants.default_eps_error(plan(sigma), target_delta)
        return _upper("prv", plan(sigma), target_delta, coarse * fine, quick=True) - (coarse - 1) * fine - goal

    first, *others = _enforced(accountant, records_per_unit)
    already = max(excess(name, settings_of(spent)) for name in (first, *others))
    if already >= 0:
        raise BudgetExceeded(
            f"no noise multiplier fits: epsilon {already + goal:.6g} of `target_epsilon` {target_epsilon:g} is "
            "already spent. Raise `target_epsilon`, or stop here."
        )
    guess, spread, slope = 1.0, 0.5, 0.0
    # RDP is fast and close, but it may find no solution where the other accountants do.
    with contextlib.suppress(BudgetExceeded):

        def by_rdp(sigma: float) -> float:
            return accountants.rdp_epsilon(all_at_once(plan(sigma), records_per_unit), target_delta) - goal

        guess = _smallest(by_rdp, xtol=1e-3)
        spread, slope = 0.1, (by_rdp(1.001 * guess) - by_rdp(guess)) / (0.001 * guess)
    if first == "prv":  # a coarse grid comes close in a twentieth of the time, a quick one closer in a third
        guess, slope = _near(lambda s: about(s, coarse=10), guess, spread, slope)
        guess, slope = _near(lambda s: about(s, coarse=1), guess, 2e-4, slope, close=1e-4)
        spread = 2e-6
    sigma = _smallest_rounded(lambda s: excess(first, plan(s)), guess, spread, slope)
    for name in others:
        if excess(name, plan(sigma)) > 0:
            sigma = _up(_smallest(lambda s, name=name: excess(name, plan(s)), sigma, spread))
    more = 1e-6
    while any(excess(name, plan(sigma)) > 0 for name in (first, *others)):
        sigma, more = round(sigma + more, 6), 2 * more
    return sigma


def _enforced(accountant: str, records_per_unit: int = 1) -> tuple[str, ...]:
    """Accountants whose bounds must all stay within the budget."""
    return (accountant, *SECOND_OPINIONS.get(accountant, ())) if records_per_unit == 1 else ("pld",)


def _near(
    excess: Callable[[float], float], start: float, spread: float, slope: float, close: float = 1e-5
) -> tuple[float, float]:
    """Noise multiplier where the decreasing function `excess` crosses 0, and its slope there, from a guess of both.

    By secants, which take three or four values, until a step is shorter than `close`; as `_smallest` does, should they
    lead elsewhere.
    """
    sigma, value, found = start, excess(start), slope
    for _ in range(8):
        if not (math.isfinite(value) and found < 0):
            break
        after = sigma - value / found
        if not start / 2 < after < 2 * start:
            break
        if abs(after - sigma) < close:  # its error: this step's times the last one's
            return after, found
        last, value = value, excess(after)
        found, sigma = (value - last) / (after - sigma), after
    return _smallest(excess, start, spread), slope


def _smallest_rounded(excess: Callable[[float], float], start: float, spread: float, slope: float) -> float:
    """Smallest number of 6 decimals where the decreasing `excess` is at most 0, from a good guess and the slope there.

    One or two values, each of which may take a second, if both are right.
    """
    sigma, value = _up(start), excess(_up(start))
    for _ in range(8):
        if value <= 0 < value - 1e-6 * slope:  # one step of 1e-6 less would be too little
            return sigma
        if not (math.isfinite(value) and slope < 0 and abs(value / slope) < start / 2):
            break
        after = _up(sigma - value / slope)
        if after == sigma:
            break
        last, value = value, excess(after)
        slope, sigma = (value - last) / (after - sigma), after
    return _up(_smallest(excess, start, spread))


def _up(sigma: float) -> float:
    """Rounded up to 6 decimals."""
    return math.ceil(round(sigma * 1e6, 3)) / 1e6


def root(function: Callable[[float], float], low: float, high: float, **tolerance: float) -> float:
    """Where `function` crosses 0 between `low` and `high`, by Brent's method."""
    from scipy.optimize import root_scalar  # late, as the accountants

    return root_scalar(function, bracket=(low, high), method="brentq", **tolerance).root


def _smallest(excess: Callable[[float], float], start: float = 1.0, spread: float = 0.5, xtol: float = 1e-7) -> float:
    """Noise multiplier where the decreasing function `excess` crosses 0, near `start` (relative distance `spread`)."""
    low = high = start
    while excess(high) > 0:
        low, high, spread = high, high * (1 + spread), 4 * spread
        if high > 1e7:
            raise BudgetExceeded(
                "no noise multiplier below 1e7 keeps epsilon within the remaining budget. Raise `target_epsilon`."
            )
    while excess(low) <= 0 and low > 1e-2:
        low, high, spread = low / (1 + spread), low, 4 * spread
    if excess(low) <= 0:
        return low  # a budget so large that almost no noise is needed
    return root(lambda sigma: min(excess(sigma), 1e6), low, high, xtol=xtol, rtol=1e-9)


def _check(delta: float, accountant: str = "prv", eps_error: float | None = None) -> None:
    probability(delta=delta)
    one_of(ACCOUNTANTS, accountant=accountant)
    if eps_error is not None:
        positive(eps_error=eps_error)
