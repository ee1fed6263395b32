"""The unit of a run's guarantee, as its settings say: a record, a person with up to k records, a value of a column."""

from collections.abc import Iterable, Mapping
from typing import Any

from .ledger import LedgerError

Unit = tuple[Any, ...]


def group_size(settings: Mapping[str, Any]) -> int:
    """Records of one unit that the accountant counts as a group.

    It is 1 where units are drawn, because a unit is then clipped as one.

    >>> group_size({"records_per_unit": 8, "unit_column": "patient", "unit_sampling": "units"})
    1
    >>> group_size({"records_per_unit": 8})
    8
    """
    return 1 if draws_units(settings) else settings["records_per_unit"]


def draws_units(settings: Mapping[str, Any]) -> bool:
    """Whether units are drawn, not records."""
    return settings.get("unit_column") is not None and settings.get("unit_sampling") == "units"


def unit_of(settings: Mapping[str, Any]) -> Unit | None:
    """The unit that must be equal for spending to add up; None for records, and for groups that a user declares.

    Where units are drawn, `records_per_unit` may change: the sensitivity to a unit does not depend on it.
    """
    if settings.get("unit_column") is None:
        return None
    if draws_units(settings):
        return settings["unit_column"], "units"
    return settings["unit_column"], "records", settings["records_per_unit"]


def unit_of_statement(statement: Mapping[str, Any]) -> Unit | None:
    """The unit of the steps that a statement's own runs have taken."""
    return unit_of([statement.get("settings") or {}, *(statement.get("runs") or ())][-1])


def refuse_other_units(
    settings: Mapping[str, Any], statements: Iterable[Mapping[str, Any]], disjoint_data: bool = False
) -> None:
    """Refuse a run whose unit is not that of earlier spending: epsilons of different units do not add up.

    Args:
        settings: Those of the run.
        statements: The ledger that the run continues, and what it takes over.
        disjoint_data: Whether costs that earlier runs have left out stay left out.
    """
    own = unit_of(settings)
    for statement in statements:
        runs = statement.get("runs") or ()
        costs = [*(statement["ledger"].get("continues") or ())]
        if not disjoint_data:
            costs += [cost for run in runs for cost in run.get("set_aside") or () if not cost.get("unknown")]
        units = [unit_of(run) for run in runs] + [tuple(cost["unit"]) if "unit" in cost else None for cost in costs]
        if statement["ledger"]["events"] and not units:
            units = [unit_of_statement(statement)]
        for other in units:
            if other != own:
                raise LedgerError(
                    f"`unit_column` must stay what it was for earlier spending, {_name(other)}, got {_name(own)}: the"
                    " epsilons of different units do not add up. Keep the unit, start from the base model in a new"
                    " output_dir, or set `disjoint_data=True` if the model was trained on other people's records."
                )


def _name(unit: Unit | None) -> str:
    if unit is None:
        return "no column (the unit is a record)"
    column, sampling, *k = unit
    return f"{column!r} with unit_sampling={sampling!r}" + (f" and records_per_unit={k[0]}" if k else "")
