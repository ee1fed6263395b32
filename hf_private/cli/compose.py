"""Compute the joint privacy cost of several releases on the same records.

A release is a folder of a saved model, or a repository on the Hub, with privacy.json. Checkpoints of
one run share their steps: pass the last one only. Releases on disjoint records need no composition.
Releases per unit (`unit_column`) add up if they draw alike and the column has the same name; equal ids
must mean the same people. The joint epsilon is then per unit. Where records were drawn, it is that of a
group of k records, which must be the same k in all of them.

example:
  hf-private compose first/model second/model --delta 1e-5
"""

import argparse
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .arguments import UsageError, probability
from .output import print_json, print_table
from .statements import read_release

if TYPE_CHECKING:
    from hf_private.accounting.budget import EpsilonReport
    from hf_private.accounting.risk import Risk

NAME = "compose"


@dataclass(frozen=True)
class Together:
    """Cost of several releases together; epsilon is infinite and `risk` None if one of them is not private.

    `group` is the number of records of one person that `epsilon` and `risk` are for; `bounds` are for one record.
    """

    epsilon: float
    delta: float
    bounds: "EpsilonReport"
    risk: "Risk | None"
    group: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", metavar="PATH_OR_REPO", nargs="+", help="folders or repositories with privacy.json")
    parser.add_argument(
        "--delta", type=probability, help="delta of the joint guarantee (default: the largest of the releases)"
    )


def run(args: argparse.Namespace) -> int:
    statements = read_releases(args.models)
    together = compose(statements, args.delta)
    epsilon, delta, bounds, risk = together.epsilon, together.delta, together.bounds, together.risk
    guarantees = {model: statement["guarantee"] for model, statement in statements.items()}
    if args.json:
        singles = {model: {"epsilon": own["epsilon"], "delta": own["delta"]} for model, own in guarantees.items()}
        report = {"epsilon": epsilon, "delta": delta, "records_per_unit": together.group, "releases": singles}
        report |= {"prv": bounds.prv, "pld": bounds.pld}
        print_json(report | {"risk": risk and risk.to_dict()})
        return 0
    rows = [
        (model, own["epsilon"], own["delta"], statements[model]["mechanism"]["steps"])
        for model, own in guarantees.items()
    ]
    per_unit = any(statement["privacy_unit"]["unit"] != "record" for statement in statements.values())
    print_table(
        f"Releases on the same {'units' if per_unit else 'records'}", ("release", "epsilon", "delta", "steps"), rows
    )
    print("Together: NOT PRIVATE." if math.isinf(epsilon) else f"Together: epsilon = {epsilon}, delta = {delta}.")
    if risk:
        print(risk)
    return 0


def compose(statements: dict[str, dict[str, Any]], delta: float | None = None) -> Together:
    """Epsilon and attack rates of all releases together; `delta` is the largest of theirs unless it is given."""
    from hf_private.accounting.budget import enforced_epsilon
    from hf_private.accounting.budget import epsilon as price
    from hf_private.accounting.events import Event
    from hf_private.accounting.risk import risk
    from hf_private.spending.statement import round_up

    events = []
    for statement in statements.values():
        own = [Event.from_dict(event) for event in statement["ledger"]["events"]]
        events += own * int(statement["tuning"]["runs"] or 1)
    delta = delta or max(statement["guarantee"]["delta"] for statement in statements.values())
    private = all(statement["private"] for statement in statements.values())
    bounds, group = price(events, delta), max(map(_group, statements.values()))
    if not private:
        return Together(math.inf, delta, bounds, None, group)
    epsilon = round_up(bounds.epsilon if group == 1 else enforced_epsilon(events, delta, records_per_unit=group))
    return Together(epsilon, delta, bounds, risk(events, delta, group) if math.isfinite(epsilon) else None, group)


def read_releases(models: list[str]) -> dict[str, dict[str, Any]]:
    """The statements by model; refuses releases that cannot be composed, or that would be counted twice."""
    statements: dict[str, dict[str, Any]] = {}
    ledgers: dict[str, str] = {}
    for model in models:
        statement = read_release(model)
        if model in statements:
            raise UsageError(f"argument PATH_OR_REPO: must name each release once, got {model!r} twice")
        head = statement["ledger"]["head"]
        if head and head in ledgers:
            raise UsageError(
                f"argument PATH_OR_REPO: {ledgers[head]!r} and {model!r} share one ledger: pass one of them"
            )
        _check_unit(model, statement, statements)
        if statement["tuning"]["law"] not in (None, "fixed"):
            raise UsageError(
                f"argument PATH_OR_REPO: must not be charged for a random number of runs, which cannot be composed,"
                f" got {model!r}"
            )
        statements[model] = statement
        ledgers[head] = model
    return statements


def _check_unit(model: str, statement: dict[str, Any], others: dict[str, dict[str, Any]]) -> None:
    """Refuse a release whose epsilon is not per the same unit as the others'."""
    from hf_private.spending.stated_unit import unit_of_statement

    for other, known in others.items():
        same = unit_of_statement(known) == unit_of_statement(statement)
        if not same or _group(known) != _group(statement):
            raise UsageError(
                f"argument PATH_OR_REPO: must be releases with the same unit, got {other!r} and {model!r}: epsilons of"
                " different units do not add up"
            )


def _group(statement: dict[str, Any]) -> int:
    """Records of one person that epsilon is for, as a group: 1 where units are drawn, and clipped as one."""
    unit = statement["privacy_unit"]
    return 1 if unit.get("sampling") == "units" else unit["records_per_unit"]
