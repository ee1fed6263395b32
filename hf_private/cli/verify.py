"""Check that a model's privacy claim follows from its own record.

Reads privacy.json of a folder or of a repository on the Hub, computes epsilon again from the recorded steps with two
independent accountants, and compares the record with the card, the ledger (where it lies) and the weights. Nothing is
unpickled. Exit code: 0 the claim holds, 1 it does not, 2 cannot tell.

example:
  hf-private verify path/to/model
"""

import argparse

from .output import print_json, print_table

NAME = "verify"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="PATH_OR_REPO", help="folder of a saved model, or its name on the Hub")
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")


def run(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from hf_private.publishing.verify import HOLDS, SCOPE, verify

    verdict = verify(args.model, args.revision)
    guarantee = verdict.record["guarantee"] if verdict.record else {}
    if args.json:
        claim = {name: guarantee.get(name) for name in ("epsilon", "delta")}
        findings = [asdict(finding) for finding in verdict.findings]
        print_json({"status": verdict.status, "code": verdict.code, **claim, "findings": findings, "scope": SCOPE})
        return verdict.code
    rows = [(finding.check, finding.status, finding.message) for finding in verdict.findings]
    print_table(args.model, ("check", "result", "what was found"), rows)
    claim = f"epsilon = {guarantee['epsilon']}, delta = {guarantee['delta']}: " if guarantee else ""
    answer = {0: "the claim holds.", 1: "the claim does not hold.", 2: "cannot tell."}[verdict.code]
    if verdict.record and not verdict.record["private"]:
        claim, answer = "", "NOT PRIVATE, as its record says. Nothing is claimed, so nothing can hold."
    print(f"{claim}{answer}{f' {SCOPE}' if verdict.status == HOLDS else ''}")
    return verdict.code
