"""Epsilon along the steps of a statement."""

from dataclasses import dataclass
from typing import Any

from hf_private.accounting.events import Event
from hf_private.accounting.schedule import epsilon_schedule
from hf_private.spending.stated_unit import group_size

MOST_PHASES = 12  # each takes an accountant's time


@dataclass(frozen=True)
class Phase:
    """Equal steps. `points` are (steps so far, epsilon so far); `epsilon` is the one after all of them."""

    event: Event
    points: tuple[tuple[int, float], ...]

    @property
    def epsilon(self) -> float:
        return self.points[-1][1]


def history(statement: dict[str, Any]) -> tuple[Phase, ...]:
    """Epsilon over the phases of a private statement, per privacy unit; empty if there are too many phases."""
    events = [Event.from_dict(event) for event in statement["ledger"]["events"]]
    events = [event for event in events if event.steps]
    if len(events) > MOST_PHASES:
        return ()
    delta, k = statement["guarantee"]["delta"], group_size(statement["settings"])
    phases: list[Phase] = []
    for index, event in enumerate(events):
        one = Event(event.sample_rate, event.releases, 1, event.sampling)
        schedule = epsilon_schedule(one, event.steps, events[:index], delta=delta, records_per_unit=k)
        before = sum(earlier.steps for earlier in events[:index])
        points = zip(schedule.steps, schedule.epsilons, strict=True)
        phases.append(Phase(event, tuple((before + step, epsilon) for step, epsilon in points)))
    return tuple(phases)
