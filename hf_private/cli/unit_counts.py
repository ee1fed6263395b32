"""`--unit-counts FILE`: compare drawing units with drawing records, for given numbers of records per unit."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import UsageError
from .output import print_table

if TYPE_CHECKING:
    from hf_private.accounting.unit_plans import UnitPlan

KS = (1, 2, 4, 8)  # compared if no k is asked for


def add_unit_counts(parser: argparse._ActionsContainer) -> None:
    """Add `--unit-counts`; it takes the place of `--n`."""
    parser.add_argument(
        "--unit-counts", type=read_counts, metavar="FILE",
        help="one number per line: how many records each unit (person) has; batches then count units, and both"
        " ways to draw (`unit_sampling`) are compared",
    )  # fmt: skip


def read_counts(text: str) -> list[int]:
    """The whole numbers of a file, one per line."""
    try:
        lines = Path(text).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"must be a file that can be read, got {text!r}") from error
    for number, line in enumerate(lines, 1):
        if not line.isascii() or not line.isdigit() or int(line) < 1:
            raise argparse.ArgumentTypeError(f"must hold a whole number >= 1 per line, got {line!r} in line {number}")
    if not lines:
        raise argparse.ArgumentTypeError(f"must hold a number for each unit, got an empty file {text!r}")
    return [int(line) for line in lines]


def compared(
    counts: Sequence[int], batch: int, steps: int, epsilon: float, delta: float, k: int, accountant: str
) -> "list[UnitPlan]":
    """Both samplings for k = `records_per_unit`, or for some usual values if it is 1."""
    from hf_private.accounting.budget import BudgetExceeded
    from hf_private.accounting.unit_plans import compare_samplings

    ks = [one for one in KS if one == 1 or one <= max(counts)] if k == 1 else [k]
    try:
        return compare_samplings(counts, batch, steps, epsilon, delta, ks, accountant)
    except (ValueError, BudgetExceeded) as error:
        raise UsageError(str(error)) from error


def best_of(plans: "list[UnitPlan]") -> "UnitPlan":
    """The one to try first: the least noise where the gradients of a unit differ; the first of equals."""
    return min(plans, key=lambda plan: plan.unlike)


def show(plans: "list[UnitPlan]") -> None:
    """Print the comparison and how to read it."""
    print_table(
        "Ways to draw at this epsilon per unit",
        ("unit_sampling", "k", "expected_batch_size", "records per step", "sigma", "noise: alike", "noise: unlike"),
        [
            (plan.sampling, plan.k, plan.batch, f"{plan.rows:.0f}", f"{plan.noise_multiplier:.3f}",
             f"{plan.alike:.2e}", f"{plan.unlike:.2e}")
            for plan in plans
        ],
    )  # fmt: skip
    print(
        "noise: sigma over the clipped gradients of a step that point one way, if the gradients of one unit's records"
    )
    print(
        "are alike, and if they are not, as is usual for large models. k is `records_per_unit`. Less noise is better."
    )
    best = best_of(plans)
    print(f"Try first: unit_sampling={best.sampling!r}, records_per_unit={best.k}, expected_batch_size={best.batch}.")


def as_json(plans: "list[UnitPlan]") -> list[dict[str, Any]]:
    return [asdict(plan) for plan in plans]
