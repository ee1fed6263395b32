"""Attack a model or a training run of your own: membership inference, canaries, one step under the microscope.

mia tells members of the training set from others by the loss of a saved model. canaries trains once
with records made to be recognised, and bounds epsilon from below. step takes one record after the
other out of a batch and measures what that moves. canaries and step build the run with a function of
yours, f(trainer_class, output_dir) -> trainer, which uses the class it is given instead of DPTrainer;
without one they examine a small run of their own. The exit code is 1 if something was found.

example:
  hf-private audit mia path/to/model --members train.tsv --others test.tsv
  hf-private audit canaries my_run.py:make_trainer --canaries 2000
  hf-private audit step my_run.py:make_trainer --attach path/to/model
"""

import argparse
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .arguments import UsageError, probability, whole
from .output import print_json, print_table

NAME = "audit"
FILES = "with columns text (or sentence), maybe text_pair and label: .tsv, .csv, .json or .jsonl"
RUN_HELP = "FILE.py:FUNCTION that builds the run, f(trainer_class, output_dir) -> trainer (default: a small run)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    attacks = parser.add_subparsers(dest="attack", metavar="ATTACK", required=True)
    again = argparse.ArgumentParser(add_help=False)  # so that --json may come last, too
    again.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document")
    again.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help="show the libraries' logs")

    def attack(name: str, summary: str, example: str) -> argparse.ArgumentParser:
        layout = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        epilog = f"example:\n  hf-private audit {name} {example}"
        return attacks.add_parser(name, parents=[again], help=summary, description=summary, epilog=epilog, **layout)

    mia = attack(
        "mia",
        "membership inference by the loss of a saved model",
        "path/to/model --members train.tsv --others test.tsv",
    )
    mia.add_argument("model", metavar="MODEL", help="folder of a saved classifier or causal language model")
    mia.add_argument("--members", required=True, help=f"records that it was trained on, {FILES}")
    mia.add_argument("--others", required=True, help="records like them that it was not trained on")
    mia.add_argument("--compare", metavar="MODEL", help="a second model, trained on the same members")
    mia.add_argument("--delta", type=probability, default=1e-5, help="delta of the bound (default: %(default)s)")
    mia.add_argument("--plot", metavar="FILE", help="write the ROC curve, as .png or .svg")
    mia.add_argument("--attach", action="store_true", help="write the result into the model's privacy.json and card")

    canaries = attack(
        "canaries", "bound epsilon from below by one training run", "my_run.py:make_trainer --canaries 2000"
    )
    canaries.add_argument("run_of", metavar="RUN", nargs="?", help=RUN_HELP)
    canaries.add_argument(
        "--canaries", type=whole(10), default=1000, help="coins to toss; more certify more (default: %(default)s)"
    )
    canaries.add_argument("--attach", metavar="MODEL", help="write the result into that model's privacy.json and card")

    step = attack(
        "step", "sensitivity, coupled records, uncovered parameters", "my_run.py:make_trainer --attach path/to/model"
    )
    step.add_argument("run_of", metavar="RUN", nargs="?", help=RUN_HELP)
    step.add_argument("--records", type=whole(2), default=8, help="records of the batch (default: %(default)s)")
    step.add_argument("--attach", metavar="MODEL", help="write the result into that model's privacy.json and card")


def run(args: argparse.Namespace) -> int:
    try:
        if args.attach:
            _attachable(args)
        return {"mia": _mia, "canaries": _canaries, "step": _step}[args.attack](args)
    except ValueError as error:
        raise UsageError(str(error)) from error


# ---- membership inference


def _mia(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from hf_private.audit import statistics as audit
    from hf_private.audit.mia import load, read_records, record_losses
    from hf_private.audit.roc import draw

    records = [read_records(path) for path in (args.members, args.others)]
    found, curves = {}, {}
    for folder in filter(None, (args.model, args.compare)):
        model, tokenizer = load(folder)
        members, others = (-record_losses(model, tokenizer, part) for part in records)  # a low loss scores high
        found[folder] = audit.infer_membership(members, others, args.delta)
        curves[folder] = audit.roc(members, others)
    if args.plot and not draw(Path(args.plot), curves):
        print("warning: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
    claims = {folder: _claim(folder) for folder in found}
    wrong = {folder for folder, result in found.items() if result.epsilon > claims[folder]}
    if args.attach:
        result = found[args.model]
        print("note: measured on the members, without noise; the card will say so", file=sys.stderr)
        _attach(
            args.model,
            {f"mia_{key}": value for key, value in _short(asdict(result)).items()} | {"mia_is_private": False},
        )
    if args.json:
        rows = {name: asdict(result) | {"claimed_epsilon": claims[name]} for name, result in found.items()}
        print_json({"models": rows, "contradicted": sorted(wrong)})
        return int(bool(wrong))
    print_table(
        f"Membership inference by loss, {found[args.model].records} records of each kind (50 % is guessing)",
        ("model", "success", "95 % interval", "AUC", "TPR at 1 % FPR", "at 0.1 % FPR", "epsilon at least", "claimed"),
        [
            (name, f"{x.success:.1%}", f"{x.interval[0]:.1%} to {x.interval[1]:.1%}", f"{x.auc:.3f}",
             f"{x.tpr_at_1_percent:.1%}", f"{x.tpr_at_01_percent:.1%}", f"{x.epsilon:.2f}", f"{claims[name]:g}")
            for name, x in found.items()
        ],
    )  # fmt: skip
    for name in sorted(wrong):
        print(f"{name}: the claimed epsilon is contradicted, if both files were drawn alike. Try `audit canaries`.")
    return int(bool(wrong))


def _claim(folder: str) -> float:
    """The epsilon that a saved model claims; infinity if it claims none."""
    from hf_private.spending.statement import read_record

    try:
        return float((read_record(folder) or {})["guarantee"]["epsilon"])
    except (LookupError, TypeError, ValueError):
        return float("inf")


# ---- a run of the user's


def _make_trainer(where: str | None) -> Callable[..., Any]:
    from importlib.util import module_from_spec, spec_from_file_location

    from hf_private.audit.canaries import small_task

    if where is None:
        return small_task
    path, _, name = where.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UsageError(f"argument RUN: must be FILE.py:FUNCTION with a file that exists, got {where!r}")
    spec = spec_from_file_location(Path(path).stem, path)
    module = module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"argument RUN: must name a function of {path}, got {name!r}")
    try:
        signature(function).bind("trainer_class", "output_dir")
    except TypeError:
        raise UsageError(
            f"argument RUN: must take (trainer_class, output_dir), got {name}{signature(function)}"
        ) from None
    return function


def _canaries(args: argparse.Namespace) -> int:
    from contextlib import redirect_stdout

    from hf_private.audit.canaries import audit_run

    make_trainer = _make_trainer(args.run_of)
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):  # the run has its own words
        report = audit_run(make_trainer, folder, args.canaries)
    found = report.found
    result = {
        "epsilon": found.epsilon,
        "claimed_epsilon": report.claimed,
        "contradicted": report.contradicted,
        "highest": found.highest,
        "canaries": found.canaries,
        "guesses": found.guesses,
        "correct": found.correct,
        "delta": found.delta,
        "confidence": found.confidence,
        "steps": report.steps,
    }
    if args.attach:
        _attach(args.attach, {f"canaries_{key}": value for key, value in _short(result).items()})
    if args.json:
        print_json(result)
        return int(report.contradicted)
    print(f"{found.correct} of {found.guesses} coins guessed right ({found.canaries} canaries, {report.steps} steps).")
    print(
        f"epsilon is at least {found.epsilon:.3f} with {found.confidence:.0%} confidence; claimed is"
        f" {report.claimed:.3f} at delta = {found.delta:g}."
    )
    if report.contradicted:
        print("THE CLAIM IS CONTRADICTED: the run does not do what its accountant believes.")
    elif found.highest < report.claimed:
        print(
            f"Nothing could have contradicted it: {found.guesses} right guesses show {found.highest:.2f} at most."
            " Use more canaries, or audit a run with a smaller epsilon."
        )
    else:
        print("The claim is not contradicted. That is no proof of privacy.")
    return int(report.contradicted)


def _step(args: argparse.Namespace) -> int:
    from hf_private.audit.step import audit_step
    from hf_private.trainer.trainer import DPTrainer

    with TemporaryDirectory() as folder:
        report = audit_step(_make_trainer(args.run_of)(DPTrainer, folder), args.records)
    if args.attach:
        print("note: measured on records of the run, without noise; the card will say so", file=sys.stderr)
        found = {
            "holds": report.holds,
            "sensitivity": report.sensitivity,
            "clip_norm": report.clip_norm,
            "records": report.records,
            "coupled_pairs": len(report.coupled),
            "uncovered_parameters": len(report.uncovered),
            "is_private": False,
        }
        _attach(args.attach, {f"step_{key}": value for key, value in _short(found).items()})
    if args.json:
        print_json(
            {
                "holds": report.holds,
                "sensitivity": report.sensitivity,
                "clip_norm": report.clip_norm,
                "records": report.records,
                "coupled": [{"removed": i, "moved": j, "change": change} for i, j, change in report.coupled],
                "uncovered": {entry.name: entry.note for entry in report.uncovered},
                "random_collator": report.random_collator,
            }
        )
        return int(not report.holds)
    print(f"largest influence of one of {report.records} records: {report.sensitivity:.6g}, record {report.worst}")
    print(f"the noise covers: {report.clip_norm:g}")
    for i, j, change in report.coupled[:5]:
        print(f"coupled: record {j}'s gradient changes by {change:.1%} when record {i} is taken away")
    if len(report.coupled) > 5:
        print(f"... and {len(report.coupled) - 5} more pairs")
    for entry in report.uncovered:
        print(f"uncovered: {entry.name}: {entry.note}")
    if report.random_collator:
        print("The collator draws at random: neighbours shared its draw.")
    print("Nothing was found." if report.holds else "This run must not be trusted as it is.")
    return int(not report.holds)


# ---- the card


def _short(result: dict[str, Any]) -> dict[str, Any]:
    """Numbers as a card shows them."""
    return {
        key: round(value, 4) if isinstance(value, float) and key != "delta" else
        [round(x, 4) for x in value] if isinstance(value, tuple) else value
        for key, value in result.items()
    }  # fmt: skip


def _attachable(args: argparse.Namespace) -> None:
    """Refuse before the attack, which may take long, what could not be written down after it."""
    from hf_private.publishing.schema import violations
    from hf_private.spending.statement import read_record, schema

    if args.attack != "mia" and args.run_of is None:
        raise UsageError("argument --attach: must come with RUN, for the small run is not that model's")
    folder = args.model if args.attack == "mia" else args.attach
    record = read_record(folder)
    if record is None:
        raise UsageError(f"argument --attach: must be a model with a privacy.json, got {folder!r}")
    if broken := next(violations(record, schema()), None):
        raise UsageError(f"argument --attach: must be a model with a valid privacy.json, got {folder!r}: {broken}")


def _attach(folder: str, found: dict[str, Any]) -> None:
    """Add what was found to the audit of a saved model's record, and write its card again."""
    from hf_private.publishing.card import write_files
    from hf_private.spending.statement import plain, read_record

    record = read_record(folder)
    record["audit"] = {**(record["audit"] or {}), **plain(found)}
    write_files(folder, record)
