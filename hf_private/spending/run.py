"""One run: a plan that is fixed when its ledger is opened, and the charge of each step."""

import math
from typing import NamedTuple

from hf_private.accounting.budget import BudgetExceeded
from hf_private.accounting.events import Event

from .ledger import PrivacyLedger


class Plan(NamedTuple):
    """What a run may do.

    Attributes:
        event: What each step costs.
        noise_multiplier: The noise of each step.
        steps: How many steps may be taken; None if there is no budget.
        bound: Upper bound on epsilon after all of them.
    """

    event: Event
    noise_multiplier: float
    steps: int | None = None
    bound: float = math.inf


class Run:
    """One run of `Spending.open`: its plan, the steps that it may still take, and how each is charged.

    Args:
        ledger: Open for writing; None on ranks that only count along.
        number: Of the run in its ledger.
    """

    def __init__(self, plan: Plan, ledger: PrivacyLedger | None = None, number: int = 0) -> None:
        self.plan = plan
        self.steps_left = plan.steps
        self.ledger = ledger
        self.number = number

    def charge(self, event: Event) -> None:
        """Write one step to the ledger, before anything of it is released; raise if the budget does not permit it."""
        if event != self.plan.event:
            raise RuntimeError(f"The step is not the one that was planned: {event} instead of {self.plan.event}.")
        if self.steps_left is not None:
            if self.steps_left < event.steps:
                raise BudgetExceeded("The privacy budget permits no further step. Nothing was released.")
            self.steps_left -= event.steps
        if self.ledger is not None:
            self.ledger.charge(event, phase=f"run {self.number}")
