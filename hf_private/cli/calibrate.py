"""Find the noise multiplier for a privacy budget.

Assumes Poisson sampling at rate batch / n, and neighbouring datasets that differ by adding or removing
one record. The budget is an epsilon at --delta, or with --advantage the largest advantage (members
found minus false alarms) that any membership attack may have. The table shows the epsilon of the same
noise for other plans, and how often the best attacker is right. With --unit-counts the budget is per
unit (person), and both ways to draw its records are compared.

examples:
  hf-private calibrate --n 67349 --batch 2000 --steps 680 --epsilon 3.3 --delta 1e-5
  hf-private calibrate --n 67349 --batch 2000 --steps 680 --advantage 0.1 --delta 1e-5
"""

import argparse
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_private.accounting import ACCOUNTANT_NAMES

from .arguments import UsageError, positive, probability, whole
from .output import print_json, print_table
from .unit_counts import add_unit_counts, as_json, compared, show

if TYPE_CHECKING:
    from hf_private.accounting.risk import Risk

NAME = "calibrate"


@dataclass(frozen=True)
class Plan:
    """Size of the data, expected batch size and number of steps; `change` says how it differs from the request."""

    change: str
    n: int
    batch: int
    steps: int

    @property
    def sample_rate(self) -> float:
        return self.batch / self.n

    @property
    def epochs(self) -> float:
        return self.steps * self.sample_rate

    def neighbours(self) -> "list[Plan]":
        """Alternatives: longer, shorter, and the same epochs with other batch sizes."""
        candidates = [
            Plan("twice the epochs", self.n, self.batch, 2 * self.steps),
            Plan("half the epochs", self.n, self.batch, max(1, self.steps // 2)),
            Plan("twice the batch, same epochs", self.n, 2 * self.batch, math.ceil(self.steps / 2)),
            Plan("half the batch, same epochs", self.n, max(1, self.batch // 2), 2 * self.steps),
        ]
        return [plan for plan in candidates if plan.batch <= self.n]


class Priced(NamedTuple):
    """Epsilon and risk of a plan."""

    plan: Plan
    epsilon: float
    risk: "Risk"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--n", type=whole(1), help="number of training records")
    add_unit_counts(size)
    parser.add_argument("--batch", type=whole(1), required=True, help="expected (logical) batch size")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=positive, help="training length in epochs of ceil(n / batch) steps")
    length.add_argument("--steps", type=whole(1), help="training length in optimizer steps")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--epsilon", type=positive, help="target epsilon")
    budget.add_argument(
        "--advantage", type=probability, help="largest advantage of an attack: 0 is chance, 1 is certainty"
    )
    parser.add_argument("--delta", type=probability, required=True, help="target delta, well below 1 / n")
    parser.add_argument(
        "--accountant", choices=ACCOUNTANT_NAMES, default="prv", help="accountant to use (default: %(default)s)"
    )
    parser.add_argument(
        "--records-per-unit", type=whole(1), default=1, metavar="K",
        help="protect people who own up to K records each (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from hf_private.accounting.budget import BudgetExceeded, enforced_epsilon
    from hf_private.accounting.events import Event
    from hf_private.accounting.risk import risk
    from hf_private.publishing.rounding import decimals, percent
    from hf_private.spending.limits import limit_of

    unit_plans = None
    k = args.records_per_unit
    if args.unit_counts:
        if args.epsilon is None:
            raise UsageError("argument --unit-counts: must come with --epsilon, got --advantage")
        args.n = len(args.unit_counts)
        args.records_per_unit = 1  # where units are drawn, a unit is clipped as one
    if args.batch > args.n:
        raise UsageError(f"argument --batch: must be at most --n = {args.n}, got {args.batch}")
    if args.delta >= 1 / args.n:
        weak = f"--delta {args.delta:g} is not below 1 / n = {1 / args.n:.2g}, so the guarantee is weak"
        print(f"warning: {weak}", file=sys.stderr)
    steps = args.steps or math.ceil(args.epochs * math.ceil(args.n / args.batch))
    plan = Plan("as requested", args.n, args.batch, steps)
    limit = limit_of(args.epsilon, args.advantage, args.delta, args.accountant, args.records_per_unit)
    assert limit is not None, "argparse demands one of --epsilon and --advantage"
    try:
        sigma = limit.noise(plan.sample_rate, plan.steps)
    except (ValueError, BudgetExceeded) as error:
        raise UsageError(str(error)) from error

    if args.unit_counts:
        rates = (args.batch, steps, args.epsilon, args.delta, k, args.accountant)
        unit_plans = compared(args.unit_counts, *rates)

    def price(plan: Plan) -> Priced:
        events = [Event(plan.sample_rate, (sigma,), plan.steps)]
        epsilon = enforced_epsilon(events, args.delta, args.accountant, args.records_per_unit)
        return Priced(plan, epsilon, risk(events, args.delta, args.records_per_unit))

    rows = [price(plan) for plan in (plan, *plan.neighbours())]
    if args.json:
        print_json(_report(args, sigma, rows) | ({"unit_sampling": as_json(unit_plans)} if unit_plans else {}))
    else:
        if args.advantage is None:
            kept = f"epsilon <= {args.epsilon:g} at delta = {args.delta:g}"
        else:
            kept = f"the advantage of every attack <= {args.advantage:g}"
        print(f"noise multiplier {sigma} keeps {kept}")  # all digits: fewer could be too little noise
        print(rows[0].risk)
        print_table(
            "The same noise under other plans",
            ("plan", "batch", "steps", "epochs", "epsilon", "attacker is right"),
            [
                (
                    plan.change,
                    plan.batch,
                    plan.steps,
                    f"{plan.epochs:.2f}",
                    decimals(epsilon, 3) if math.isfinite(epsilon) else "inf",
                    percent(risk.accuracy),
                )
                for plan, epsilon, risk in rows
            ],
        )
        if unit_plans:
            show(unit_plans)
    return 0


def _round_up(value: float, digits: int) -> float:
    """Round up: an epsilon or a risk must never look smaller than it is."""
    return math.ceil(value * 10**digits) / 10**digits if math.isfinite(value) else value


def _report(args: argparse.Namespace, sigma: float, rows: list[Priced]) -> dict[str, Any]:
    plans = [
        {
            "plan": plan.change,
            "batch": plan.batch,
            "steps": plan.steps,
            "sample_rate": plan.sample_rate,
            "epsilon": _round_up(epsilon, 6),
            "risk": risk.to_dict(),
        }
        for plan, epsilon, risk in rows
    ]
    return {
        "noise_multiplier": sigma,
        "target_epsilon": args.epsilon,
        "target_advantage": args.advantage,
        "delta": args.delta,
        "accountant": args.accountant,
        "records_per_unit": args.records_per_unit,
        "sampling": "poisson",
        "adjacency": f"add or remove one {'unit' if args.unit_counts else 'record'}",
        **plans[0],
        "neighbours": plans[1:],
    }
