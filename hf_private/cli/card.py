"""Write a model's card again, from its privacy.json.

All claims are computed again from the recorded facts, in the words of this version: in privacy.json, and in the card's
privacy section, metadata and curve; the rest of README.md stays. Facts and hashes are not touched. With --tuning-runs
the record is charged for the runs that were tried before this one: all of them if their number was fixed in advance,
or by Papernot and Steinke's theorem if it was drawn at random (a geometric or logarithmic law) and only the best run
is published.

example:
  hf-private card path/to/model
  hf-private card path/to/model --tuning-runs 10 --law geometric
"""

import argparse
import math

from .arguments import UsageError, whole
from .output import print_json

NAME = "card"
LAWS = ("fixed", "geometric", "logarithmic")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="PATH", help="folder of a saved model, with privacy.json")
    parser.add_argument(
        "--tuning-runs", type=whole(1), help="runs tried on these records, this one included; the mean if random"
    )
    parser.add_argument("--law", choices=LAWS, default="fixed", help="law of that number (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    from hf_private.publishing.card import write_files
    from hf_private.publishing.schema import violations
    from hf_private.spending.statement import read_record, rebuild, schema

    try:
        record = read_record(args.model)
    except ValueError as error:
        raise UsageError(f"PATH must hold a privacy.json, got {args.model!r}: {error}") from error
    if record is None:
        raise UsageError(f"PATH must hold a privacy.json, got {args.model!r}")
    if broken := next(violations(record, schema()), None):
        raise UsageError(f"PATH must hold a valid privacy.json, got {args.model!r}: {broken}")
    if args.tuning_runs:
        # of a law with mean 1 there is only one run
        law = args.law if args.tuning_runs > 1 else "fixed"
        record["tuning"] = {"runs": args.tuning_runs, "law": law}
    record = rebuild(record)
    write_files(args.model, record)
    guarantee = record["guarantee"]
    if args.json:
        print_json({"epsilon": guarantee["epsilon"], "delta": guarantee["delta"], "tuning": record["tuning"]})
    else:
        private = math.isfinite(float(guarantee["epsilon"]))
        claim = f"epsilon = {guarantee['epsilon']}, delta = {guarantee['delta']}" if private else "NOT PRIVATE"
        print(f"{args.model}: card written, {claim}.")
    return 0
