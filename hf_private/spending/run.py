"""One run: a plan that is fixed when its ledger is opened, and the charge of each step."""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from hf_private.accounting.budget import BudgetExceeded
from hf_private.accounting.events import Event
from hf_private.accounting.schedule import Schedule

from .ledger import PrivacyLedger


class Plan(NamedTuple):
    """What a run may do.

    Attributes:
        event: What each step costs.
        noise_multiplier: The noise of each step.
        planned: How many steps the run takes.
        steps: How many steps may be taken; None if there is no budget.
    """

    event: Event
    noise_multiplier: float
    planned: int
    steps: int | None = None


class Run:
    """One run of `Spending.open`: its plan, the steps that it may still take, and how each is charged.

    Args:
        ledger: Open for writing; None on ranks that only count along.
        number: Of the run in its ledger.
        schedule: Makes epsilon as a function of the steps taken; called once, when it is first needed.
    """

    def __init__(
        self,
        plan: Plan,
        ledger: PrivacyLedger | None = None,
        number: int = 0,
        schedule: Callable[[], Schedule] | None = None,
    ) -> None:
        self.plan = plan
        self.taken = 0
        self._make_schedule = schedule
        self.steps_left = plan.steps
        self.ledger = ledger
        self.number = number

    def charge(self, event: Event) -> None:
        """Write one step to the ledger, before anything of it is released; raise if the budget does not permit it."""
        if event != self.plan.event:
            raise RuntimeError(f"`event` must be the planned step, {self.plan.event}, got {event}.")
        if self.steps_left is not None:
            if self.steps_left < event.steps:
                raise BudgetExceeded("The privacy budget permits no further step. Nothing was released.")
            self.steps_left -= event.steps
        if self.ledger is not None:
            self.ledger.charge(event, phase=f"run {self.number}")
        self.taken += 1

    @cached_property
    def _schedule(self) -> Schedule | None:
        return self._make_schedule() if self._make_schedule else None

    def epsilon(self) -> float | None:
        """Epsilon after the steps taken so far, with all that was spent before; None if the plan does not say."""
        if self._schedule is None or self.taken > self.plan.planned:
            return None
        return self._schedule(self.taken)
