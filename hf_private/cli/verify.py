"""Check that the privacy claim of a model follows from its own statement.

Reads privacy.json from a folder or from a repository on the Hub, recomputes epsilon from the recorded
steps with two independent accountants, and compares the statement with the card, the ledger (if
present) and the weights. Unpickles nothing. Exit code: 0 the claim holds, 1 it does not,
2 cannot tell.

example:
  hf-private verify path/to/model
"""

import argparse

from .arguments import positive
from .output import print_json, print_table

NAME = "verify"
ANSWERS = {0: "the claim holds.", 1: "the claim does not hold.", 2: "cannot tell."}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="PATH_OR_REPO", help="folder of a saved model, or its name on the Hub")
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument(
        "--time-limit",
        type=positive,
        default=4.0,
        help="seconds of processor time to hash the weights and recompute epsilon; large models and long runs need"
        " more (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from hf_private.publishing.verify import HOLDS, SCOPE, verify

    verdict = verify(args.model, args.revision, args.time_limit)
    guarantee = verdict.statement["guarantee"] if verdict.statement else {}
    if args.json:
        claim = {name: guarantee.get(name) for name in ("epsilon", "delta")}
        findings = [asdict(finding) for finding in verdict.findings]
        print_json({"status": verdict.status, "code": verdict.code, **claim, "findings": findings, "scope": SCOPE})
        return verdict.code
    rows = [(finding.check, finding.status, finding.message) for finding in verdict.findings]
    print_table(args.model, ("check", "result", "finding"), rows)
    answer = ANSWERS[verdict.code]
    if verdict.statement and not verdict.statement["private"]:
        answer = "NOT PRIVATE, as its statement says. It makes no claim that could hold."
    elif guarantee:
        answer = f"epsilon = {guarantee['epsilon']}, delta = {guarantee['delta']}: {answer}"
    print(f"{answer} {SCOPE}" if verdict.status == HOLDS else answer)
    return verdict.code
