"""Costs of earlier training, and how the ledger of a run takes them over.

A cost is a dict of public values: the ledger that it was charged to (`head`, `length`), its `events`, whether it was
`private`, the runs that were tried for it (`tuning`), and the admissions of its statement. A ledger is charged for it
once. With `disjoint_data=True`, a run lists the costs in its own line (`set_aside`) instead, for later runs.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from hf_private.accounting.events import Event

from .admissions import admitted
from .ledger import LedgerError, PrivacyLedger
from .stated_unit import unit_of_statement

Statement = dict[str, Any]
Cost = dict[str, Any]

UNKNOWN: Cost = {"unknown": True}  # left out without having been found
CHARGED = ("events", "private", "tuning")  # the parts of a cost that become steps; the rest names the source


class Past(NamedTuple):
    """Earlier training of some weights.

    Attributes:
        statements: With `ledger` and `private` at least.
        unchecked: Names of `admissions.ADMISSIONS`, for what could not be looked up.
        named: The user has named one of the statements.
    """

    statements: tuple[Statement, ...] = ()
    unchecked: tuple[str, ...] = ()
    named: bool = False


NO_PAST = Past()


def unknown_cost(reason: str) -> LedgerError:
    """The one refusal of weights whose cost cannot be found."""
    return LedgerError(
        f"It is not known what the weights have cost: {reason}. Name the folder or Hub repository that has their"
        " privacy.json with `DPTrainer(continues=...)`, or set `disjoint_data=True` if they were never trained on your"
        " records."
    )


def cost_of(statement: Statement) -> Cost:
    """The cost that the ledger of a statement records."""
    cost: Cost = {name: statement["ledger"][name] for name in ("head", "length", "events")}
    cost["private"] = bool(statement.get("private", True))
    if (statement.get("tuning") or {}).get("runs"):
        cost["tuning"] = statement["tuning"]
    unit = unit_of_statement(statement)
    if unit is not None:
        cost["unit"] = list(unit)
    return {**cost, **admitted(statement)}


def left_out(runs: Iterable[dict[str, Any]]) -> list[Cost]:
    """The costs that runs have left out because of `disjoint_data=True`."""
    return [cost for run in runs for cost in run.get("set_aside") or ()]


def all_costs(statement: Statement) -> list[Cost]:
    """All costs of weights with this statement: the spending of its ledger, and the costs that it left out."""
    return [cost_of(statement), *left_out(statement.get("runs") or ())]


def events_of(cost: Cost, times: int = 1) -> list[Event]:
    """The events that are charged for a cost."""
    events = [Event.from_dict(event) for event in cost["events"]]
    events = [replace(event, steps=times * event.steps) for event in events]
    return events if cost["private"] else [*events, Event(1.0, (0.0,))]  # training without privacy costs infinity


def times_missing(
    cost: Cost, ledger: PrivacyLedger | None, tuning: dict[str, Any] | None, elsewhere: Iterable[Cost] = ()
) -> int:
    """How many times a ledger still has to be charged for a cost: the runs that were tried count like the last one.

    Args:
        tuning: The runs that the statement in the ledger's folder charges.
        elsewhere: Sources that other statements have taken over; they are charged along with those.
    """
    if not any(event["steps"] for event in cost["events"]):
        return 0
    own = ledger is not None and ledger.contains(cost["length"], cost["head"])
    if own and cost.get("tuning") in (None, tuning):
        return 0
    return max(_times(cost) - max(int(own), _times_charged(cost, (*sources(ledger), *elsewhere))), 0)


def sources(ledger: PrivacyLedger | None) -> list[Cost]:
    """The costs that a ledger has taken over, without their events."""
    return [line["source"] for line in ledger.lines if line["kind"] == "continues"] if ledger else []


def take_over(ledger: PrivacyLedger, past: Past, tuning: dict[str, Any] | None) -> None:
    """Charge a ledger for a past, and for what its own runs have left out, as far as it has not been charged yet."""
    own_runs = [line for line in ledger.lines if line["kind"] == "run"]
    owed = [cost for statement in past.statements for cost in all_costs(statement)] + left_out(own_runs)
    if UNKNOWN in owed and not past.named:
        raise unknown_cost("an earlier run with `disjoint_data=True` did not find what its weights had cost before")
    elsewhere = [source for statement in past.statements for source in statement["ledger"].get("continues") or ()]
    for cost in owed:
        times = 0 if cost == UNKNOWN else times_missing(cost, ledger, tuning, elsewhere)
        if times:
            source = {name: value for name, value in cost.items() if name not in CHARGED}
            total = times + _times_charged(cost, sources(ledger))
            ledger.continue_from(events_of(cost, times), {**source, "times": total} if total > 1 else source)


def _times_charged(cost: Cost, taken_over: Iterable[Cost]) -> int:
    same = (one for one in taken_over if (one.get("head"), one.get("length")) == (cost["head"], cost["length"]))
    return max((one.get("times", 1) for one in same), default=0)


def _times(cost: Cost) -> int:
    tuning = cost.get("tuning") or {}
    runs, law = tuning.get("runs") or 1, tuning.get("law")
    if runs > 1 and law != "fixed":
        raise unknown_cost(
            f"they were chosen among a random number of runs ({law}, mean {runs:g}), whose cost together with further"
            " training has no known bound. Or charge all runs that were made, with `hf-private card PATH --tuning-runs"
            " N --law fixed`"
        )
    return math.ceil(runs)
