"""Show which parameters of a model can be trained privately, and what a step would cost.

The model is built from its configuration, without its weights, and a step is run on tensors
without data, so that also very large models can be examined. The exit code is 1 if something
would be refused.

example:
  hf-private doctor path/to/model --batch 8 --length 128
  hf-private doctor path/to/model --carriers r=8,sparsity=0.3
"""

import argparse
import sys
from typing import TYPE_CHECKING

from hf_private.commands.arguments import TASKS, UsageError, key_values, probability, whole
from hf_private.commands.output import print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from hf_private.commands.coverage import Entry
    from hf_private.commands.dryrun import Cost
    from hf_private.methods.carriers import Carriers

    # coverage, costs by method, and with --carriers the trained and noised numbers by method
    Examination = tuple[list[Entry], dict[str, Cost], dict[str, dict[str, int]]]

NAME = "doctor"
SMALL = 500_000_000  # parameters of a model that may be built for real, where tensors without data do not suffice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model's or adapter's folder, or its name on the Hub")
    parser.add_argument(
        "--task", choices=TASKS, help="which head to put on the model (default: the one that its config names)"
    )
    parser.add_argument("--batch", type=whole(1), default=8, help="records in a micro-batch (default: %(default)s)")
    parser.add_argument("--length", type=whole(1), default=128, help="tokens per record (default: %(default)s)")
    parser.add_argument(
        "--carriers",
        metavar="r=8,...",
        type=key_values(r=whole(1), sparsity=probability, source=str, sides=str),
        help="also show low-rank carriers: r, sparsity, source, sides as in CarrierConfig",
    )


def run(args: argparse.Namespace) -> int:
    entries, costs, dimensions = _examine(args)
    if args.json:
        print_json(_report(args, entries, costs) | ({"dimensions": dimensions} if dimensions else {}))
    else:
        _show(args, entries, costs)
        if dimensions:
            _show_dimensions(dimensions)
    return 1 if any(entry.status == "refused" for entry in entries) else 0


def _examine(args: argparse.Namespace) -> "Examination":
    """Coverage and costs, on tensors without data if the model allows it, otherwise on small real ones."""
    from hf_private.commands.models import builder

    build = builder(args.model, args.task)
    attempts = [("meta", False), ("meta", True)]  # some models look for padding, others are content with a mask
    if sum(p.numel() for p in build("meta").parameters()) <= SMALL:
        attempts.append(("cpu", True))
    for device, mask in attempts:
        try:
            return _examine_on(build, device, mask, args)
        except (NotImplementedError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
    raise UsageError(f"argument MODEL: {args.model} looks at its input's values and is too large to be run: {reason}")


def _examine_on(
    build: "Callable[[str], nn.Module]", device: str, mask: bool, args: argparse.Namespace
) -> "Examination":
    from hf_private.bookkeeping import trainable
    from hf_private.commands import dryrun
    from hf_private.commands.coverage import coverage
    from hf_private.commands.models import inputs, losses
    from hf_private.methods import Full

    model = build(device).train()
    few = inputs(model, 2, min(args.length, 7), device, mask)
    entries = coverage(model, lambda: losses(model, few))
    batch = inputs(model, args.batch, args.length, device, mask)
    costs = {}
    if parameters := trainable(model):
        costs["plain training"] = dryrun.measure(lambda: dryrun.plain_step(model, lambda: losses(model, batch)))
        method = Full()
        method.attach(parameters)
        costs["BK"] = dryrun.measure(lambda: dryrun.private_step(model, lambda: losses(model, batch), method))
    dimensions = {}
    if args.carriers is not None:
        dimensions, method = _carriers(model, args.carriers)
        cost = dryrun.measure(lambda: dryrun.private_step(model, lambda: losses(model, batch), method))
        costs[list(dimensions)[-1]] = dryrun.Cost(cost.peak_bytes + method.start_bytes, cost.flops)
    return entries, costs, dimensions


def _carriers(model: "nn.Module", settings: dict) -> "tuple[dict[str, dict[str, int]], Carriers]":
    """Trained and noised numbers by method, and the carriers themselves, ready for a step; freezes the rest."""
    from hf_private.bookkeeping import trainable
    from hf_private.diagnostics import dimensions_by_method
    from hf_private.matching import freeze_rest
    from hf_private.targets import CarrierConfig, carriers_of

    try:
        config = CarrierConfig(**settings)
        dimensions = dimensions_by_method(model, config)
        method, selection = carriers_of(config, model)
    except ValueError as error:
        raise UsageError(f"argument --carriers: {error}") from error
    freeze_rest(model, selection.full | method.targets.keys())
    method.attach(trainable(model))
    method.begin_step(0)
    return dimensions, method


def _groups(entries: "list[Entry]") -> list[tuple[str, str, int, int, str]]:
    """Entries with the same fate together: (status, note, parameters, numbers, first name)."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.status, entry.note), []).append(entry)
    return [
        (status, note, len(group), sum(entry.size for entry in group), group[0].name)
        for (status, note), group in groups.items()
    ]


def _show(args: argparse.Namespace, entries: "list[Entry]", costs: "dict[str, Cost]") -> None:
    groups = _groups(entries)
    print_table(
        f"Parameters of {args.model}",
        ("status", "rule", "tensors", "numbers", "for instance"),
        [
            (status, note if status == "covered" else "", n, f"{size:,}", name)
            for status, note, n, size, name in groups
        ],
    )
    for status, note, count, _, name in groups:
        if status == "refused":
            print(
                f"refused: {name}" + (f" and {count - 1} more" if count > 1 else "") + f"\n  {note}", file=sys.stderr
            )
    plain = costs.get("plain training")
    print_table(
        f"A micro-batch of {args.batch} records and {args.length} tokens, beside the weights",
        ("method", "peak memory", "of plain", "operations", "of plain"),
        [
            (
                name,
                f"{cost.peak_bytes / 2**20:,.0f} MiB",
                f"{cost.peak_bytes / plain.peak_bytes:.2f}",
                f"{cost.flops / 1e9:,.1f} GFLOP",
                f"{cost.flops / plain.flops:.2f}",
            )
            for name, cost in costs.items()
        ],
    )
    trained = sum(entry.size for entry in entries if entry.status == "covered")
    total = sum(entry.size for entry in entries)
    print(f"{trained:,} of {total:,} numbers can be trained privately. float32: weights {total * 4 / 2**20:,.0f} MiB,")
    print(f"AdamW's state {trained * 8 / 2**20:,.0f} MiB.")


def _show_dimensions(dimensions: dict[str, dict[str, int]]) -> None:
    full = dimensions["DP-SGD"]["noised"]
    print_table(
        "Noise by method",
        ("method", "trained numbers", "noised numbers", "of DP-SGD"),
        [
            (name, f"{row['trainable']:,}", f"{row['noised']:,}", f"{row['noised'] / full:.4f}")
            for name, row in dimensions.items()
        ],
    )


def _report(args: argparse.Namespace, entries: "list[Entry]", costs: "dict[str, Cost]") -> dict:
    count = {status: sum(e.size for e in entries if e.status == status) for status in ("covered", "frozen", "refused")}
    return {
        "model": args.model,
        "numbers": count,
        "parameters": [vars(entry) for entry in entries],
        "micro_batch": {"records": args.batch, "length": args.length},
        "costs": {name: {"peak_bytes": cost.peak_bytes, "flops": cost.flops} for name, cost in costs.items()},
    }
