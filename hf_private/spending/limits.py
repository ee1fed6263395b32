"""The budget of a run: the largest epsilon, or the largest advantage of an attacker, that its steps may cost."""

from collections.abc import Iterable
from dataclasses import dataclass

from tqdm.auto import tqdm

from hf_private.accounting import budget
from hf_private.accounting.events import Event
from hf_private.accounting.risk import risk
from hf_private.accounting.risk_budget import calibrate_risk

PATIENCE = 2.0  # seconds of calibration without a progress bar


@dataclass(frozen=True)
class EpsilonLimit:
    """`DPConfig(target_epsilon=...)`: epsilon at `delta`, as `accountant` enforces it."""

    target: float
    delta: float
    accountant: str = "prv"
    records_per_unit: int = 1

    name = "target_epsilon"

    def noise(self, sample_rate: float, steps: int, spent: Iterable[Event] = ()) -> float:
        """Smallest noise multiplier for `steps` more steps; raises `BudgetExceeded` if there is none."""
        plan = self.target, self.delta, sample_rate, steps, self.accountant
        with _progress() as bar:
            return budget.calibrate(*plan, spent=spent, records_per_unit=self.records_per_unit, tick=bar.update)

    def allows(self, event: Event, spent: Iterable[Event] = ()) -> bool:
        """Whether `event` fits after all that is `spent`."""
        after = (*spent, event)
        return budget.enforced_epsilon(after, self.delta, self.accountant, self.records_per_unit) <= self.target

    def spent(self, events: Iterable[Event]) -> str:
        """How much of the budget `events` take, in words."""
        epsilon = budget.enforced_epsilon(events, self.delta, self.accountant, self.records_per_unit)
        return f"epsilon {epsilon:.4g} of `{self.name}` {self.target:g}"


@dataclass(frozen=True)
class RiskLimit:
    """`DPConfig(target_risk=...)`: the advantage of the best attack, true minus false positive rate."""

    target: float
    records_per_unit: int = 1

    name = "target_risk"

    def noise(self, sample_rate: float, steps: int, spent: Iterable[Event] = ()) -> float:
        """Smallest noise multiplier for `steps` more steps; raises `BudgetExceeded` if there is none."""
        with _progress() as bar:
            return calibrate_risk(self.target, sample_rate, steps, spent, self.records_per_unit, tick=bar.update)

    def allows(self, event: Event, spent: Iterable[Event] = ()) -> bool:
        """Whether `event` fits after all that is `spent`."""
        return risk((*spent, event), None, self.records_per_unit).advantage <= self.target

    def spent(self, events: Iterable[Event]) -> str:
        """How much of the budget `events` take, in words."""
        advantage = risk(events, None, self.records_per_unit).advantage
        return f"an advantage of {advantage:.4g} of `{self.name}` {self.target:g}"


Limit = EpsilonLimit | RiskLimit


def _progress() -> tqdm:
    return tqdm(desc="Calibrating the noise", unit=" trials", leave=False, delay=PATIENCE)


def limit_of(
    target_epsilon: float | None, target_risk: float | None, delta: float, accountant: str, records_per_unit: int
) -> Limit | None:
    """The budget that the settings name; None without one, where the noise is given instead.

    >>> limit_of(None, 0.1, 1e-5, "prv", 1)
    RiskLimit(target=0.1, records_per_unit=1)
    """
    if target_epsilon is not None and target_risk is not None:
        raise ValueError(
            f"Only one of `target_epsilon` and `target_risk` may be set, got {target_epsilon!r} and {target_risk!r}."
        )
    if target_epsilon is not None:
        return EpsilonLimit(target_epsilon, delta, accountant, records_per_unit)
    return None if target_risk is None else RiskLimit(target_risk, records_per_unit)
