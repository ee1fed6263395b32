"""Add up what several releases on the same records cost together.

Each release is a folder of a saved model, or a repository on the Hub, with privacy.json. Two checkpoints of one run
share their steps: give the last one only. Releases on disjoint records do not add up.

example:
  hf-private compose first/model second/model --delta 1e-5
"""

import argparse

from .arguments import UsageError, probability
from .output import print_json, print_table

NAME = "compose"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", metavar="PATH_OR_REPO", nargs="+", help="folders or repositories with privacy.json")
    parser.add_argument("--delta", type=probability, help="delta of the joint guarantee (default: the largest of all)")


def run(args: argparse.Namespace) -> int:
    from hf_private.accounting.composition import joint_epsilon
    from hf_private.accounting.events import Event
    from hf_private.publishing.verify import read
    from hf_private.spending.statement import round_up

    records = {}
    for model in args.models:
        records[model], problem = read(model)
        if problem:
            raise UsageError(f"PATH_OR_REPO must hold a valid privacy.json, got {model!r}: {problem.message}")
    if len(records) < len(args.models):
        raise UsageError("PATH_OR_REPO must name each release once")
    _refuse_shared_steps(records)
    delta = args.delta or max(record["guarantee"]["delta"] for record in records.values())
    private = all(record["private"] for record in records.values())
    several = [model for model, record in records.items() if record["privacy_unit"]["records_per_unit"] > 1]
    if several:
        raise UsageError(f"PATH_OR_REPO must be releases whose unit is one record, got {several[0]!r}")
    releases = []
    for record in records.values():
        events = [Event.from_dict(event) for event in record["ledger"]["events"]]
        if record["tuning"]["law"] not in (None, "fixed"):
            raise UsageError("releases that were charged for a random number of runs cannot be added up here")
        releases.append(events * int(record["tuning"]["runs"] or 1))
    report = joint_epsilon(releases, delta)
    epsilon = round_up(report.epsilon) if private else float("inf")
    if args.json:
        rows = {model: record["guarantee"] for model, record in records.items()}
        singles = {model: {"epsilon": row["epsilon"], "delta": row["delta"]} for model, row in rows.items()}
        print_json({"epsilon": epsilon, "delta": delta, "prv": report.prv, "pld": report.pld, "releases": singles})
        return 0
    rows = [
        (model, record["guarantee"]["epsilon"], record["guarantee"]["delta"], record["mechanism"]["steps"])
        for model, record in records.items()
    ]
    print_table("releases on the same records", ("release", "epsilon", "delta", "steps"), rows)
    print(f"Together: epsilon = {epsilon}, delta = {delta}." if private else "Together: NOT PRIVATE.")
    return 0


def _refuse_shared_steps(records: dict[str, dict]) -> None:
    """Releases with one ledger would be counted twice: harmless for privacy, and still wrong."""
    heads = {}
    for model, record in records.items():
        head = record["ledger"]["head"]
        if head and head in heads:
            raise UsageError(f"{heads[head]!r} and {model!r} come from one ledger: give one of them")
        heads[head] = model
