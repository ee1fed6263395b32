"""Epsilon by a single accountant, to compare accountants with each other and with golden values."""

from collections.abc import Iterable

from hf_private.accounting import budget
from hf_private.accounting.events import Event


def epsilon_of(
    events: Iterable[Event], delta: float, accountant: str = "prv", eps_error: float | None = None
) -> float:
    """Upper bound of epsilon by one accountant alone (by the others if it fails)."""
    return budget._upper(accountant, budget.settings_of(events), delta, eps_error)
