"""Compute the joint privacy cost of several releases on the same records.

A release is a folder of a saved model, or a repository on the Hub, with privacy.json. Checkpoints of
one run share their steps: pass the last one only. Releases on disjoint records need no composition.

example:
  hf-private compose first/model second/model --delta 1e-5
"""

import argparse
from typing import Any

from .arguments import UsageError, probability
from .output import print_json, print_table

NAME = "compose"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", metavar="PATH_OR_REPO", nargs="+", help="folders or repositories with privacy.json")
    parser.add_argument(
        "--delta", type=probability, help="delta of the joint guarantee (default: the largest of the releases)"
    )


def run(args: argparse.Namespace) -> int:
    from hf_private.accounting.composition import joint_epsilon
    from hf_private.accounting.events import Event
    from hf_private.spending.statement import round_up

    statements = _read(args.models)
    releases = []
    for statement in statements.values():
        events = [Event.from_dict(event) for event in statement["ledger"]["events"]]
        releases.append(events * int(statement["tuning"]["runs"] or 1))
    delta = args.delta or max(statement["guarantee"]["delta"] for statement in statements.values())
    private = all(statement["private"] for statement in statements.values())
    report = joint_epsilon(releases, delta)
    epsilon = round_up(report.epsilon) if private else float("inf")
    guarantees = {model: statement["guarantee"] for model, statement in statements.items()}
    if args.json:
        singles = {model: {"epsilon": own["epsilon"], "delta": own["delta"]} for model, own in guarantees.items()}
        print_json({"epsilon": epsilon, "delta": delta, "prv": report.prv, "pld": report.pld, "releases": singles})
        return 0
    rows = [
        (model, own["epsilon"], own["delta"], statements[model]["mechanism"]["steps"])
        for model, own in guarantees.items()
    ]
    print_table("Releases on the same records", ("release", "epsilon", "delta", "steps"), rows)
    print(f"Together: epsilon = {epsilon}, delta = {delta}." if private else "Together: NOT PRIVATE.")
    return 0


def _read(models: list[str]) -> dict[str, dict[str, Any]]:
    """The statements by model; refuses releases that cannot be composed, or that would be counted twice."""
    from hf_private.publishing.verify import read

    statements: dict[str, dict[str, Any]] = {}
    ledgers: dict[str, str] = {}
    for model in models:
        statement, problem = read(model)
        if statement is None or problem is not None:
            reason = f": {problem.message}" if problem else ""
            raise UsageError(f"argument PATH_OR_REPO: must hold a valid privacy.json, got {model!r}{reason}")
        if model in statements:
            raise UsageError(f"argument PATH_OR_REPO: must name each release once, got {model!r} twice")
        head = statement["ledger"]["head"]
        if head and head in ledgers:
            raise UsageError(
                f"argument PATH_OR_REPO: {ledgers[head]!r} and {model!r} share one ledger: pass one of them"
            )
        if statement["privacy_unit"]["unit"] != "record":
            raise UsageError(f"argument PATH_OR_REPO: must be releases whose unit is one record, got {model!r}")
        if statement["tuning"]["law"] not in (None, "fixed"):
            raise UsageError(
                f"argument PATH_OR_REPO: must not be charged for a random number of runs, which cannot be composed,"
                f" got {model!r}"
            )
        statements[model] = statement
        ledgers[head] = model
    return statements
