"""Attack your own model or training run: membership inference, canaries, or one step.

mia guesses from the losses of a saved model which records it was trained on. canaries trains once
with records that are easy to recognise, and bounds epsilon from below. step removes one record after
the other from a batch and measures what changes. canaries and step build the run with a function of
yours, f(trainer_class, output_dir) -> trainer, which must use the class it gets instead of DPTrainer.
Without one they audit a small built-in run. The exit code is 1 if the attack finds a problem.

examples:
  hf-private audit mia path/to/model --members train.tsv --others test.tsv
  hf-private audit canaries my_run.py:make_trainer --canaries 2000
  hf-private audit step my_run.py:make_trainer --attach path/to/model
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from .arguments import UsageError, add_common_options, probability, whole
from .output import print_json, print_table
from .statements import read_statement

if TYPE_CHECKING:
    from hf_private.audit.canaries import CanaryReport
    from hf_private.audit.step import StepReport

NAME = "audit"
FILES = "with columns text (or sentence) and optionally text_pair and label: .tsv, .csv, .json or .jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    attacks = parser.add_subparsers(dest="attack", metavar="ATTACK", required=True)

    def add_attack(name: str, summary: str, example: str) -> argparse.ArgumentParser:
        epilog = f"example:\n  hf-private audit {name} {example}"
        attack = attacks.add_parser(name, help=summary.rstrip("."), description=summary, epilog=epilog)
        add_common_options(attack, default=argparse.SUPPRESS)
        return attack

    def add_run(attack: argparse.ArgumentParser) -> None:
        what = "FILE.py:FUNCTION that builds the run, f(trainer_class, output_dir) -> trainer (default: a small run)"
        attack.add_argument("run_of", metavar="RUN", nargs="?", help=what)
        attack.add_argument("--attach", metavar="MODEL", help="write the result to this model's privacy.json and card")

    mia = add_attack(
        "mia",
        "Infer from the losses of a saved model which records it was trained on.",
        "path/to/model --members train.tsv --others test.tsv",
    )
    mia.add_argument("model", metavar="MODEL", help="folder of a saved classifier or causal language model")
    mia.add_argument("--members", required=True, help=f"records that it was trained on, {FILES}")
    mia.add_argument("--others", required=True, help="similar records that it was not trained on")
    mia.add_argument("--compare", metavar="MODEL", help="a second model, trained on the same members")
    mia.add_argument("--delta", type=probability, default=1e-5, help="delta of the bound (default: %(default)s)")
    mia.add_argument("--plot", metavar="FILE", help="write the ROC curve, as .png or .svg")
    mia.add_argument("--attach", action="store_true", help="write the result to the model's privacy.json and card")

    canaries = add_attack(
        "canaries", "Bound epsilon from below with one training run.", "my_run.py:make_trainer --canaries 2000"
    )
    add_run(canaries)
    canaries.add_argument(
        "--canaries", type=whole(10), default=1000, metavar="M",
        help="number of canaries; more canaries certify a larger epsilon (default: %(default)s)",
    )  # fmt: skip

    step = add_attack(
        "step",
        "Measure the sensitivity of one step; find coupled records and uncovered parameters.",
        "my_run.py:make_trainer --attach path/to/model",
    )
    add_run(step)
    step.add_argument(
        "--records", type=whole(2), default=8, help="records, or units, in the batch (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    attacks = {"mia": _mia, "canaries": _canaries, "step": _step}
    try:
        if args.attach:
            _check_attach(args)
        return attacks[args.attack](args)
    except ValueError as error:
        raise UsageError(str(error)) from error


# ---- membership inference


def _mia(args: argparse.Namespace) -> int:
    from hf_private.audit.mia import load, read_records, record_losses
    from hf_private.audit.roc import draw
    from hf_private.audit.statistics import infer_membership, roc

    members, others = read_records(args.members), read_records(args.others)
    found, curves = {}, {}
    for folder in filter(None, (args.model, args.compare)):
        model, tokenizer = load(folder)
        inside = -record_losses(model, tokenizer, members)  # a low loss is a high score
        outside = -record_losses(model, tokenizer, others)
        found[folder] = infer_membership(inside, outside, args.delta)
        curves[folder] = roc(inside, outside)
    if args.plot and not draw(Path(args.plot), curves):
        print("warning: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
    claims = {folder: _claim(folder) for folder in found}
    contradicted = sorted(folder for folder, result in found.items() if result.epsilon > claims[folder])
    if args.attach:
        print("note: measured on the members, without noise; the card says so", file=sys.stderr)
        _attach(args.model, "mia", asdict(found[args.model]) | {"is_private": False})
    if args.json:
        rows = {name: asdict(result) | {"claimed_epsilon": claims[name]} for name, result in found.items()}
        print_json({"models": rows, "contradicted": contradicted})
        return int(bool(contradicted))
    print_table(
        f"Membership inference by loss, {found[args.model].records} records of each kind (50 % is guessing)",
        ("model", "success", "95 % interval", "AUC", "TPR at 1 % FPR", "at 0.1 % FPR", "epsilon at least", "claimed"),
        [
            (name, f"{x.success:.1%}", f"{x.interval[0]:.1%} to {x.interval[1]:.1%}", f"{x.auc:.3f}",
             f"{x.tpr_at_1_percent:.1%}", f"{x.tpr_at_01_percent:.1%}", f"{x.epsilon:.2f}", f"{claims[name]:g}")
            for name, x in found.items()
        ],
    )  # fmt: skip
    for name in contradicted:
        print(
            f"{name}: the attack contradicts the claimed epsilon, provided that both files come from one distribution."
            " Try `hf-private audit canaries`."
        )
    return int(bool(contradicted))


def _claim(folder: str) -> float:
    """The epsilon that a saved model claims; infinity if it claims none."""
    from hf_private.spending.statement import read_statement

    try:
        return float((read_statement(folder) or {})["guarantee"]["epsilon"])
    except (LookupError, TypeError, ValueError):
        return float("inf")


# ---- attacks on a run


def _load_function(location: str | None) -> Callable[..., Any]:
    """The function that builds the run: FILE.py:FUNCTION, or the small built-in run."""
    from importlib.util import module_from_spec, spec_from_file_location

    from hf_private.audit.canaries import small_task

    if location is None:
        return small_task
    path, _, name = location.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UsageError(f"argument RUN: must be FILE.py:FUNCTION with an existing file, got {location!r}")
    spec = spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None  # always found for a .py file
    module = module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"argument RUN: must name a function in {path}, got {name!r}")
    try:
        signature(function).bind("trainer_class", "output_dir")
    except TypeError:
        got = f"{name}{signature(function)}"
        raise UsageError(f"argument RUN: must take (trainer_class, output_dir), got {got}") from None
    return function


def _canaries(args: argparse.Namespace) -> int:
    from contextlib import redirect_stdout

    from hf_private.audit.canaries import audit_run

    make_trainer = _load_function(args.run_of)
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):  # the run may print
        report = audit_run(make_trainer, folder, args.canaries)
    result = {
        **asdict(report.found),
        "claimed_epsilon": report.claimed,
        "contradicted": report.contradicted,
        "steps": report.steps,
    }
    if args.attach:
        _attach(args.attach, "canaries", result)
    if args.json:
        print_json(result)
    else:
        _show_canaries(report)
    return int(report.contradicted)


def _show_canaries(report: "CanaryReport") -> None:
    found = report.found
    print(f"{found.correct} of {found.guesses} guesses are right ({found.canaries} canaries, {report.steps} steps).")
    print(
        f"epsilon is at least {found.epsilon:.3f} with {found.confidence:.0%} confidence; the run claims"
        f" {report.claimed:.3f} at delta = {found.delta:g}."
    )
    if report.contradicted:
        print("THE CLAIM IS CONTRADICTED: the run leaks more than its accountant computes.")
    elif found.highest < report.claimed:
        print(
            f"This audit cannot contradict the claim: {found.guesses} right guesses certify at most"
            f" {found.highest:.2f}. Use more canaries, or audit a run with a smaller epsilon."
        )
    else:
        print("The claim is not contradicted. This does not prove privacy.")


def _step(args: argparse.Namespace) -> int:
    from hf_private.audit.step import audit_step
    from hf_private.trainer.trainer import DPTrainer

    make_trainer = _load_function(args.run_of)
    with TemporaryDirectory() as folder:
        report = audit_step(make_trainer(DPTrainer, folder), args.records)
    result = {name: getattr(report, name) for name in ("holds", "sensitivity", "clip_norm", "records")}
    result["of_units"] = report.each == "unit"
    if args.attach:
        print("note: measured on records of the run, without noise; the card says so", file=sys.stderr)
        counts = {"coupled_pairs": len(report.coupled), "uncovered_parameters": len(report.uncovered)}
        _attach(args.attach, "step", result | counts | {"is_private": False})
    if args.json:
        coupled = [{"removed": i, "moved": j, "change": change} for i, j, change in report.coupled]
        uncovered = {entry.name: entry.note for entry in report.uncovered}
        details = {"coupled": coupled, "uncovered": uncovered, "random_collator": report.random_collator}
        print_json(result | details)
    else:
        _show_step(report)
    return int(not report.holds)


def _show_step(report: "StepReport") -> None:
    each = report.each
    print(f"largest influence of one of {report.records} {each}s: {report.sensitivity:.6g} ({each} {report.worst})")
    print(f"the noise covers: {report.clip_norm:g}")
    for i, j, change in report.coupled[:5]:
        print(f"coupled: the gradient of {each} {j} changes by {change:.1%} when {each} {i} is removed")
    if len(report.coupled) > 5:
        print(f"... and {len(report.coupled) - 5} more pairs")
    for entry in report.uncovered:
        print(f"uncovered: {entry.name}: {entry.note}")
    if report.random_collator:
        print("The collator is random: both batches use the same random numbers.")
    print("No problem found." if report.holds else "This run does not satisfy its guarantee.")


# ---- the card


def _check_attach(args: argparse.Namespace) -> None:
    """Refuse before the attack, which may take long, what could not be written after it."""
    if args.attack == "mia":
        read_statement(args.model, "--attach")
    elif args.run_of is None:
        raise UsageError("argument --attach: must come with RUN, because the small run did not make that model")
    else:
        read_statement(args.attach, "--attach")


def _attach(folder: str, attack: str, found: dict[str, Any]) -> None:
    """Add the results of an attack to the statement of a saved model, and write its card again."""
    from hf_private.publishing.card import write_files
    from hf_private.spending.statement import plain

    statement = read_statement(folder, "--attach")
    results = {f"{attack}_{key}": value if key == "delta" else _rounded(value) for key, value in found.items()}
    statement["audit"] = {**(statement["audit"] or {}), **plain(results)}
    write_files(folder, statement)


def _rounded(value: Any) -> Any:
    """A number, or each number of a tuple, with the digits that a card shows."""
    if isinstance(value, tuple):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value
