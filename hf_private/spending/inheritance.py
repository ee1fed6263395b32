"""What a record hands down to whoever trains its weights on: debts.

A debt is a piece of earlier spending in plain, public values: which ledger it was (`head`, `length`), its `events`,
whether it was `private`, the runs that were tried for it (`tuning`), and whatever its card has to admit. It is owed
once per ledger. What a run has set aside, as other people's, is written down in its settings, for later runs of which
nobody says that.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_private.accounting.events import Event

from .ledger import LedgerError, PrivacyLedger
from .statement import RECORD, admitted, read_record

UNKNOWN = {"unknown": True}  # a debt that was set aside without being found
OF_THE_DEBT = ("events", "private", "tuning")  # the rest of it is noted where it is paid


def debt_of(record: dict[str, Any]) -> dict[str, Any]:
    """What a record's own ledger has spent."""
    debt = {name: record["ledger"][name] for name in ("head", "length", "events")}
    debt["private"] = bool(record.get("private", True))
    if (record.get("tuning") or {}).get("runs"):
        debt["tuning"] = record["tuning"]
    return {**debt, **admitted(record)}


def debts(record: dict[str, Any]) -> list[dict[str, Any]]:
    """All that a run on a record's weights owes: what the record has spent, and what its runs have set aside."""
    return [debt_of(record), *set_aside(record.get("runs") or ())]


def set_aside(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What some runs have set aside."""
    return [debt for run in runs for debt in run.get("set_aside") or ()]


def charges(debt: dict[str, Any], times: int) -> list[Event]:
    """What there is to be charged for a debt."""
    events = [Event.from_dict(event) for event in debt["events"]]
    events = [replace(event, steps=times * event.steps) for event in events]
    return events if debt["private"] else [*events, Event(1.0, (0.0,))]  # whatever it cost, it was not private


def source_of(debt: dict[str, Any], times: int) -> dict[str, Any]:
    """What a ledger that has paid a debt keeps of it."""
    kept = {name: value for name, value in debt.items() if name not in OF_THE_DEBT}
    return {**kept, "times": times} if times > 1 else kept


def times_paid(debt: dict[str, Any], sources: Iterable[dict[str, Any]]) -> int:
    """How many times a debt is among those that were paid."""
    same = (one for one in sources if (one.get("head"), one.get("length")) == (debt["head"], debt["length"]))
    return max((one.get("times", 1) for one in same), default=0)


def times_owed(debt: dict[str, Any]) -> int:
    """How many times a debt's events have to be charged: the runs that were tried for it count like itself."""
    tuning = debt.get("tuning") or {}
    runs, law = tuning.get("runs") or 1, tuning.get("law")
    if runs > 1 and law != "fixed":
        raise LedgerError(
            f"The weights were chosen among a random number of runs ({law}, mean {runs:g}). What that cost is known"
            " for them alone, not together with further training. Charge all runs that were made, with `hf-private"
            " card PATH --tuning-runs N --law fixed` on their folder, or set `disjoint_data=True` if they never saw"
            " your records."
        )
    return math.ceil(runs)


class Heir:
    """The part of `Spending` that takes over what was spent elsewhere, before a run begins."""

    folder: Path
    writes: bool
    ledger: PrivacyLedger | None
    runs: list[dict[str, Any]]
    noted: dict[str, Any] = {}  # what the settings of the run have to say of all this

    def inherit(self, records: Sequence[dict[str, Any]], unchecked: Iterable[str] = (), named: bool = False) -> None:
        """Continue the spending of what the run starts from, unless this ledger has it already.

        What was set aside before, there or here, is charged too: nobody says of this run that it is other people's.

        Args:
            records: Public records of it, with `ledger` and `private` at least.
            unchecked: What could not be looked up (of `record.ADMISSIONS`); the run's settings will say so.
            named: The user has named what could not be found by itself.
        """
        self.noted = dict.fromkeys(unchecked, True)
        if not self.writes:
            return
        owed = [debt for record in records for debt in debts(record)] + set_aside(self.runs)
        if UNKNOWN in owed and not named:
            raise LedgerError(
                "An earlier run was stated to be on other people's records (`disjoint_data`), so it was not found out"
                " what the weights that it began with had cost. Name the folder or repository that has their record"
                " with DPTrainer(continues=...), or set `disjoint_data=True` if it is true of this run, too."
            )
        elsewhere = [source for record in records for source in record["ledger"].get("continues") or ()]
        for debt in owed:
            if debt != UNKNOWN and (times := self.owes(debt, elsewhere)):
                paid = times_paid(debt, self.sources)
                self.ledger.continue_from(charges(debt, times), source_of(debt, paid + times))

    def set_aside(self, records: Iterable[dict[str, Any]] | None, unchecked: Iterable[str] = ()) -> None:
        """Do not continue the spending of what the run starts from, for its records were stated to be other people's.

        It is written down, for later runs of which that is not stated; None if it could not be found.
        """
        self.noted = dict.fromkeys(unchecked, True)
        if not self.writes:
            return
        owed = [UNKNOWN] if records is None else [debt for record in records for debt in debts(record)]
        if owed := [debt for debt in owed if debt == UNKNOWN or not self.has(debt)]:
            self.noted["set_aside"] = owed

    def owes(self, debt: dict[str, Any], elsewhere: Iterable[dict[str, Any]] = ()) -> int:
        """How many times a debt has still to be charged here; what is paid `elsewhere` is charged along with that."""
        if not any(event["steps"] for event in debt["events"]):
            return 0
        ledger = self.ledger
        own = ledger is not None and ledger.contains(debt["length"], debt["head"])
        if own and debt.get("tuning") in (None, self.tuning):  # the card of this folder charges it
            return 0
        return max(times_owed(debt) - max(int(own), times_paid(debt, (*self.sources, *elsewhere))), 0)

    def has(self, debt: dict[str, Any]) -> bool:
        """Whether all of a debt is in this ledger, or in its folder's card."""
        try:
            return not self.owes(debt)
        except LedgerError:  # it cannot be charged at all
            return False

    @property
    def sources(self) -> list[dict[str, Any]]:
        """What was taken over from elsewhere."""
        ledger = self.ledger
        return [past["source"] for past in ledger.records if past["kind"] == "continues"] if ledger else []

    @property
    def tuning(self) -> dict[str, Any] | None:
        """The runs that were tried before, as the folder's card has them; None if that was not recorded."""
        try:
            tuning = (read_record(self.folder) or {}).get("tuning") or {}
        except ValueError as error:
            raise LedgerError(
                f"{RECORD} of {str(self.folder)!r} cannot be read ({error}), so it is not known what tuning has cost."
                " Repair or remove it."
            ) from error
        return tuning if tuning.get("runs") else None
