"""Rewrite a model's card from its privacy.json.

Recomputes all claims from the recorded facts, and rewrites them in privacy.json and in the privacy
section, metadata and curve of the card. The rest of README.md, the facts and the hashes do not change.
--tuning-runs also charges the runs that were tried on the same records: all of them if their number
was fixed in advance (--law fixed), or by the theorem of Papernot and Steinke if the number was drawn at
random and only the best run is published (--law geometric or logarithmic).

examples:
  hf-private card path/to/model
  hf-private card path/to/model --tuning-runs 10 --law geometric
"""

import argparse
import math

from hf_private.accounting import LAWS

from .arguments import whole
from .output import print_json
from .statements import read_statement

NAME = "card"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="PATH", help="folder of a saved model, with privacy.json")
    parser.add_argument(
        "--tuning-runs",
        type=whole(1),
        help="number of training runs on these records, this one included (its mean, if the number was random)",
    )
    parser.add_argument(
        "--law", choices=LAWS, default="fixed", help="how the number of runs was chosen (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    from hf_private.publishing.card import write_files
    from hf_private.spending.statement import rebuild

    statement = read_statement(args.model, "PATH")
    if args.tuning_runs:
        law = args.law if args.tuning_runs > 1 else "fixed"  # a random number with mean 1 is always 1
        statement["tuning"] = {"runs": args.tuning_runs, "law": law}
    statement = rebuild(statement)
    write_files(args.model, statement)
    epsilon, delta = statement["guarantee"]["epsilon"], statement["guarantee"]["delta"]
    if args.json:
        print_json({"epsilon": epsilon, "delta": delta, "tuning": statement["tuning"]})
    else:
        claim = f"epsilon = {epsilon}, delta = {delta}" if math.isfinite(float(epsilon)) else "NOT PRIVATE"
        print(f"{args.model}: card written, {claim}.")
    return 0
