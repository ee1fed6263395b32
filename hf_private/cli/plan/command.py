"""Choose method, batch size and steps for a privacy budget.

Every method that applies to the model is tried with batch sizes and numbers of steps, at the noise
that the budget demands. The ranking follows rules of thumb from published scaling laws and from our
own tables: it says which plan to try first, not what accuracy to expect. Hours are a lower estimate,
at the rate of matrix products measured on this machine.

With --unit-counts the budget is per unit (person), and both ways to draw their records are compared.

examples:
  hf-private plan --n 5000 --epsilon 8 --model path/to/model --picture plan.png
  hf-private plan --n 67349 --epsilon 3 --model path/to/model --hours 2 --json
"""

import argparse
import math
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from hf_private.cli.arguments import TASKS, UsageError, positive, probability, whole
from hf_private.cli.output import print_json, print_table
from hf_private.cli.unit_counts import add_unit_counts, as_json, best_of, compared, show

if TYPE_CHECKING:
    from hf_private.accounting.unit_plans import UnitPlan

    from .candidates import Candidate
    from .rules import Schedule

NAME = "plan"


class Plan(NamedTuple):
    """The best schedule of one method."""

    candidate: "Candidate"
    schedule: "Schedule"
    noise: float
    useful: float
    operations: float
    hours: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--n", type=whole(2), help="number of training records")
    add_unit_counts(size)
    parser.add_argument("--epsilon", type=positive, required=True, help="target epsilon")
    parser.add_argument("--model", metavar="MODEL", required=True, help="a model's folder, config, or name on the Hub")
    parser.add_argument("--delta", type=probability, help="target delta (default: a tenth of 1 / n, or less)")
    parser.add_argument("--hours", type=positive, help="longest training time, in hours (default: any)")
    parser.add_argument("--task", choices=TASKS, help="head of the model (default: the one that its config names)")
    parser.add_argument("--length", type=whole(1), help="tokens per record (default: 128, or the model's maximum)")
    parser.add_argument("--picture", metavar="FILE", help="draw noise / signal over epsilon, by batch size (PNG)")
    parser.add_argument(
        "--micro-batch", type=whole(1), default=8, metavar="B", help="records in memory at once (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    from .candidates import candidates, operations_per_second

    if args.unit_counts:
        args.n = len(args.unit_counts)
        if args.n < 2:
            raise UsageError(f"argument --unit-counts: must hold at least 2 units, got {args.n}")
    delta = args.delta or 10.0 ** -(math.ceil(math.log10(args.n)) + 1)
    found = candidates(args.model, args.task, args.micro_batch, args.length)
    rate = operations_per_second()
    plans = search(found, schedules(args.n, args.epsilon, delta), rate, args.hours)
    best = plans[0]
    unit_plans = None
    if args.unit_counts:
        schedule = best.schedule
        unit_plans = compared(args.unit_counts, schedule.batch, schedule.steps, args.epsilon, delta, 1, "rdp")
    code = snippet(best, args.epsilon, delta, args.micro_batch, best_of(unit_plans) if unit_plans else None)
    if args.picture:
        from .picture import curves, draw

        found_curves = curves(args.n, delta, best.candidate.noised, best.schedule.steps)
        draw(args.picture, found_curves, (args.epsilon, best.noise, best.schedule), best.candidate.name)
    if args.json:
        print_json(
            _report(args, delta, rate, plans, code) | ({"unit_sampling": as_json(unit_plans)} if unit_plans else {})
        )
    else:
        _show(args, delta, plans)
        if unit_plans:
            show(unit_plans)
        print(f"\n{code}", end="")
    return 0


def schedules(n: int, epsilon: float, delta: float) -> "list[Schedule]":
    """Batch sizes and steps worth trying, with the noise by RDP: quick, and a few percent more than is needed."""
    from tqdm import tqdm

    from hf_private.accounting.budget import BudgetExceeded, calibrate

    from .rules import STEPS, Schedule, batches

    found = []
    tried = list(product(batches(n), STEPS))
    for batch, steps in tqdm(tried, desc="Calibrating the noise", unit=" plans", leave=False, delay=2.0):
        try:
            found.append(Schedule(batch, steps, calibrate(epsilon, delta, batch / n, steps, accountant="rdp")))
        except BudgetExceeded:
            continue
    if not found:
        raise UsageError(f"argument --epsilon: no noise is enough for {epsilon:g} at delta {delta:g}")
    return found


def search(found: "list[Candidate]", schedules: "list[Schedule]", rate: float, hours: float | None) -> list[Plan]:
    """The best schedule of each kind of method, the most useful plan first.

    Args:
        rate: operations per second.
        hours: plans that take longer are left out.
    """
    from hf_private.accounting.signal import noise_to_signal

    from .rules import cheapest_of_the_best, usefulness

    kinds: dict[str, list[tuple[float, float, Plan]]] = {}
    for candidate in found:
        for schedule in schedules:
            operations = candidate.operations * schedule.batch * schedule.steps
            noise = noise_to_signal(schedule.noise_multiplier, candidate.noised, schedule.batch).ratio
            useful = usefulness(candidate.kind, noise, schedule.steps, candidate.rank, candidate.mean)
            plan = Plan(candidate, schedule, noise, useful, operations, operations / rate / 3600)
            kinds.setdefault(candidate.kind, []).append((useful, plan.hours, plan))
    quickest = min(time for plans in kinds.values() for _, time, _ in plans)
    if hours is not None and quickest > hours:
        raise UsageError(
            f"argument --hours: must be at least {quickest:.2g}, what the quickest plan takes, got {hours:g}"
        )
    affordable = ([one for one in plans if hours is None or one[1] <= hours] for plans in kinds.values())
    best = [cheapest_of_the_best(plans)[2] for plans in affordable if plans]
    return sorted(best, key=lambda plan: -plan.useful)


def snippet(plan: Plan, epsilon: float, delta: float, micro_batch: int, unit: "UnitPlan | None" = None) -> str:
    """Settings of a plan as code to paste; `unit` is how its units are drawn."""
    from .rules import learning_rate

    candidate, schedule = plan.candidate, plan.schedule
    carriers = {"RGP": f"CarrierConfig(r={candidate.rank})", "LSG": f"CarrierConfig(r={candidate.rank}, sparsity=0.3)"}
    imports = ["DPConfig", "DPTrainer", *(["CarrierConfig"] if candidate.kind in carriers else [])]
    before = ""
    if candidate.mean:
        imports.append("read_by_mean")
        before = "model = read_by_mean(model)  # a new head on the mean of the tokens, as the encoder was trained\n"
    if candidate.kind == "head only":
        before += "model.base_model.requires_grad_(False)\n"
    elif candidate.kind == "LoRA" and candidate.rank:  # otherwise the model is an adapter already
        # without its task PEFT would leave a new head frozen, as random as it begins
        task = f', task_type="{candidate.task_type}"' if candidate.task_type else ""
        lora = f'LoraConfig(r={candidate.rank}, target_modules="all-linear"{task})'
        before += f"model = get_peft_model(model, {lora})\n"
    before += "\n" if before else ""
    peft = "from peft import LoraConfig, get_peft_model\n" if "get_peft_model" in before else ""
    extra = f"\n    carriers={carriers[candidate.kind]}," if candidate.kind in carriers else ""
    batch = schedule.batch
    if unit is not None:
        batch = unit.batch
        extra += (
            '\n    unit_column="unit",  # the name of your column'
            f"\n    records_per_unit={unit.k},\n    unit_sampling={unit.sampling!r},"
        )
    return f"""\
{peft}from transformers import TrainingArguments

from hf_private import {", ".join(sorted(imports))}

{before}dp_config = DPConfig(
    target_epsilon={epsilon:g},
    target_delta={delta:g},
    expected_batch_size={batch},{extra}
)
args = TrainingArguments(
    output_dir="private_model",
    max_steps={schedule.steps},
    per_device_train_batch_size={micro_batch},  # speed and memory only
    learning_rate={learning_rate(candidate.kind, plan.noise):g},  # from our tables; also try half and double of it
    lr_scheduler_type="linear",
)
trainer = DPTrainer(model, args, dp_config=dp_config, train_dataset=train_dataset, processing_class=tokenizer)
"""


def _show(args: argparse.Namespace, delta: float, plans: list[Plan]) -> None:
    from hf_private.accounting.signal import noise_to_signal

    from .rules import LEVEL, SOURCES, in_words

    counted = "units" if args.unit_counts else "records"
    print_table(
        f"Plans for {args.n:,} {counted} at epsilon {args.epsilon:g}, delta {delta:g}: most useful first",
        (
            "method",
            "batch",
            "steps",
            "epochs",
            "sigma",
            "noise / signal",
            "usefulness",
            "operations",
            "hours",
            "memory",
        ),
        [
            (
                plan.candidate.name,
                plan.schedule.batch,
                plan.schedule.steps,
                f"{plan.schedule.steps * plan.schedule.batch / args.n:.1f}",
                f"{plan.schedule.noise_multiplier:.3f}",
                f"{plan.noise:.2f}",
                f"{plan.useful:.2f}",
                f"{plan.operations:.1e}",
                f"{plan.hours:.2g}",
                f"{plan.candidate.memory / 2**30:,.1f} GiB",
            )
            for plan in plans
        ],
    )
    best = plans[0]
    print(f"{best.candidate.name} is expected to be {in_words(best.useful)}.")
    loud = noise_to_signal(best.schedule.noise_multiplier, best.candidate.noised, best.schedule.batch)
    print(loud.warning or loud)
    if best.candidate.mean:
        print("The encoder was trained for the mean of its tokens: `read_by_mean` lets the new head read it.")
    level = [plan.candidate.name for plan in plans[1:] if plan.useful >= (1 - LEVEL) * plans[0].useful]
    if level:
        print(f"Level with it: {', '.join(level)}.")
    print(
        "noise / signal = sigma sqrt(noised numbers) / batch: the norm of the noise over the largest possible norm of"
    )
    print("the mean clipped gradient. sigma is RDP's, a few percent above what DPTrainer calibrates. Hours are at the")
    print("measured rate of matrix products: training may take twice as long. Usefulness is a rule of thumb, from")
    for source in SOURCES:
        print(f"- {source}")


def _report(args: argparse.Namespace, delta: float, rate: float, plans: list[Plan], code: str) -> dict:
    from .rules import SOURCES, in_words

    return {
        "n": args.n,
        "epsilon": args.epsilon,
        "delta": delta,
        "model": args.model,
        "operations_per_second": rate,
        "plans": [
            {
                "method": plan.candidate.kind,
                "rank": plan.candidate.rank,
                "batch": plan.schedule.batch,
                "steps": plan.schedule.steps,
                "noise_multiplier": plan.schedule.noise_multiplier,
                "reads_mean": plan.candidate.mean,
                "noised": plan.candidate.noised,
                "noise_to_signal": plan.noise,
                "usefulness": plan.useful,
                "in_words": in_words(plan.useful),
                "operations": plan.operations,
                "hours": plan.hours,
                "memory_bytes": plan.candidate.memory,
                "code": snippet(plan, args.epsilon, delta, args.micro_batch),
            }
            for plan in plans
        ],
        "code": code,
        "sources": list(SOURCES),
    }
