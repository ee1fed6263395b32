"""Write a privacy report about a model, for a privacy officer.

Answers the questions of NIST SP 800-226 from privacy.json, with attack rates, the budget over time,
lineage and evidence (what `hf-private verify` finds). Prints Markdown unless --html is given.
--format registry prints a draft entry for the Differential Privacy Deployments Registry (YAML),
--format cyclonedx a CycloneDX 1.6 bill of materials with a model card (JSON). Exit code: 0, or 1 if
the model is not private or its claim is wrong.

examples:
  hf-private report path/to/model --html report.html
  hf-private report path/to/model --also path/to/other --format cyclonedx
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import UsageError
from .output import print_json
from .statements import read_release

if TYPE_CHECKING:
    from hf_private.publishing.report.content import Joint

NAME = "report"
FORMATS = ("md", "registry", "cyclonedx")
NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="PATH_OR_REPO", help="folder of a saved model, or its name on the Hub")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained HTML file")
    parser.add_argument("--format", choices=FORMATS, help="what to print (default: md, or nothing with --html)")
    parser.add_argument(
        "--also", metavar="PATH_OR_REPO", action="append", default=[],
        help="another release on the same records, for the joint cost; may be repeated",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from datetime import date

    from hf_private.publishing.report.content import PRIVATE, build_report
    from hf_private.publishing.report.cyclonedx import to_cyclonedx
    from hf_private.publishing.report.markdown import to_markdown
    from hf_private.publishing.report.page import to_html
    from hf_private.publishing.report.registry import to_registry, to_yaml
    from hf_private.publishing.verify import verify

    statement = read_release(args.model)
    joint = _joint(args.model, args.also) if args.also else None
    try:
        report = build_report(statement, verify(args.model), _name(args.model), date.today().isoformat(), joint)
    except NONSENSE as error:  # the schema leaves some facts open, and anyone may have written them
        raise UsageError(f"argument PATH_OR_REPO: privacy.json of {args.model!r} makes no sense: {error!r}") from error
    if args.html:
        try:
            Path(args.html).write_text(to_html(report), encoding="utf-8")
        except OSError as error:
            must = f"argument --html: must be a file that can be written, got {args.html!r}"
            raise UsageError(f"{must}: {error.strerror}") from error
    chosen = args.format or (None if args.html else "md")
    if chosen == "registry":
        try:
            entry = to_registry(report)
        except ValueError as error:
            raise UsageError(f"argument --format: {error}, got 'registry'") from error
        print_json(entry) if args.json else print(to_yaml(entry), end="")
    elif chosen == "cyclonedx":
        print_json(to_cyclonedx(report))
    elif args.json:
        print_json(report.to_dict() | ({"html": args.html} if args.html else {}))
    elif chosen == "md":
        print(to_markdown(report), end="")
    if args.html and not args.json:
        print(f"{args.html} written. {report.headline}", file=sys.stderr if chosen else sys.stdout)
    return int(report.status != PRIVATE)


def _name(model: str) -> str:
    """Name of the model: a path of this machine stays out of the report."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def _joint(model: str, others: list[str]) -> "Joint":
    from hf_private.publishing.report.content import Joint

    from .compose import compose, read_releases

    statements = read_releases([model, *others])
    together = compose(statements)
    releases = []
    for one, statement in statements.items():
        guarantee, steps = statement["guarantee"], statement["mechanism"]["steps"]
        releases.append((_name(one), str(guarantee["epsilon"]), str(guarantee["delta"]), str(steps)))
    return Joint(tuple(releases), together.epsilon, together.delta, together.risk)
