"""Show which parameters of a model can be trained privately, and the cost of a step.

Builds the model from its configuration, without its weights, and runs a step on tensors without data,
so that even very large models can be examined. The exit code is 1 if training would refuse a parameter.

With --device and no model, it checks in about five minutes whether private steps are exact on an
accelerator, whether they wait for it, and what they cost. The report can be attached to an issue.

examples:
  hf-private doctor --device cuda
  hf-private doctor path/to/model --batch 8 --length 128
  hf-private doctor path/to/model --carriers r=8,sparsity=0.3
  hf-private doctor path/to/llama-7b --batch 1 --length 512 --bits 4 --memory 24
"""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from hf_private.cli.arguments import TASKS, UsageError, fraction, key_values, positive, whole
from hf_private.cli.output import print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from hf_private.gradients.coverage import Entry

    from .variants import Row

NAME = "doctor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="folder of a model or adapter, or its name on the Hub"
    )
    parser.add_argument("--device", help="check this device instead of a model: cuda, cuda:1, cpu, ...")
    parser.add_argument("--task", choices=TASKS, help="head of the model (default: the one that its config names)")
    parser.add_argument("--batch", type=whole(1), default=8, help="records in a micro-batch (default: %(default)s)")
    parser.add_argument(
        "--records-per-unit",
        type=whole(1),
        default=1,
        help="so many of them are one unit, which is clipped as one (default: %(default)s)",
    )
    parser.add_argument("--length", type=whole(1), help="tokens per record (default: 128, or the model's maximum)")
    parser.add_argument(
        "--carriers",
        metavar="r=8,...",
        type=key_values(r=whole(1), sparsity=fraction, source=str, sides=str),
        default={},
        help="fields r, sparsity, source and sides of CarrierConfig (default: r=8,sparsity=0.3)",
    )
    parser.add_argument(
        "--bits",
        type=int,
        choices=(4, 8),
        help="also LoRA on a base of 4 (nf4, double quantisation) or 8 bits, without gradient checkpointing",
    )
    parser.add_argument(
        "--memory", metavar="GB", type=positive, help="also say which methods fit into this much memory"
    )


def run(args: argparse.Namespace) -> int:
    if (args.model is None) == (args.device is None):
        raise UsageError("argument MODEL: give a model or --device, one of them")
    if args.device is not None:
        return _accept(args)
    if args.batch % args.records_per_unit:
        raise UsageError(f"argument --batch: must hold whole units of {args.records_per_unit}, got {args.batch}")
    entries, rows = _examine(args)
    if args.json:
        print_json(_report(args, entries, rows))
    else:
        _show(args, entries, rows)
    return 1 if any(entry.status == "refused" for entry in entries) else 0


def _accept(args: argparse.Namespace) -> int:
    """Run the acceptance of a device; 1 if a check fails."""
    import torch

    from .acceptance import accept, environment

    try:
        device = torch.device(args.device)
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError) as error:
        raise UsageError(f"argument --device: {args.device}: {str(error).partition(chr(10))[0]}") from error
    checks = accept(device)
    if args.json:
        print_json({"environment": environment(device), "checks": [vars(check) for check in checks]})
    else:
        words = {True: "ok", False: "FAILED", None: ""}
        rows = [(check.name, check.found, words[check.passed]) for check in checks]
        print_table(f"Acceptance of {environment(device)}", ("check", "found", ""), rows)
    return 1 if any(check.passed is False for check in checks) else 0


def _examine(args: argparse.Namespace) -> "tuple[list[Entry], list[Row]]":
    """Coverage and costs."""
    from hf_private.gradients.coverage import coverage, without

    from .models import UnitLosses, builder, inputs, losses, on_some_device
    from .variants import compare

    def examine(
        build: "Callable[[], nn.Module]", device: str, mask: bool, length: int
    ) -> "tuple[list[Entry], list[Row]]":
        args.length = length
        model = build()
        few = inputs(model, 2, min(length, 7), device, mask)
        entries = coverage(model, lambda: losses(model, few))
        if all(entry.status != "covered" for entry in entries):
            return entries, []
        batch = inputs(model, args.batch, length, device, mask)
        run_batch = UnitLosses(batch, args.records_per_unit)
        return entries, compare(lambda: without(build(), entries), run_batch, args.carriers, args.bits)

    build = builder(args.model, args.task)
    try:
        return on_some_device(build, examine, args.batch, args.length)
    except ValueError as error:  # a refusal by the library: a rank above the size of a matrix, an unknown source
        raise UsageError(f"argument --carriers: {error}" if args.carriers else str(error)) from error


def _groups(entries: "list[Entry]") -> list[tuple[str, str, int, int, str]]:
    """Entries grouped by status and note: (status, note, number of tensors, number of parameters, first name)."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.status, entry.note), []).append(entry)
    return [
        (status, note, len(group), sum(entry.size for entry in group), group[0].name)
        for (status, note), group in groups.items()
    ]


def _show(args: argparse.Namespace, entries: "list[Entry]", rows: "list[Row]") -> None:
    groups = _groups(entries)
    print_table(
        f"Parameters of {args.model}",
        ("status", "rule", "tensors", "parameters", "example"),
        [
            (status, note if status == "covered" else "", n, f"{size:,}", name)
            for status, note, n, size, name in groups
        ],
    )
    for status, note, count, _, name in groups:
        if status == "refused":
            more = f" and {count - 1} more" if count > 1 else ""
            print(f"refused: {name}{more}\n  {note}", file=sys.stderr)
    units = "" if args.records_per_unit == 1 else f", {args.records_per_unit} of one unit"
    print_table(
        f"A micro-batch of {args.batch} records of {args.length} tokens{units}, without the weights",
        ("method", "trained", "noised", "peak memory", "of plain", "operations", "of plain", "total memory"),
        [
            (
                row.method,
                f"{row.trained:,}",
                f"{row.noised:,}",
                f"{row.peak_bytes / 2**20:,.0f} MiB",
                f"{row.peak_bytes / rows[0].peak_bytes:.2f}",
                f"{row.flops / 1e9:,.1f} GFLOP",
                f"{row.flops / rows[0].flops:.2f}",
                f"{row.total_bytes / 2**30:,.1f} GiB",
            )
            for row in rows
        ],
    )
    trained = sum(entry.size for entry in entries if entry.status == "covered")
    total = sum(entry.size for entry in entries)
    print(f"{trained:,} of {total:,} parameters can be trained privately.")
    print(f"float32: weights {total * 4 / 2**20:,.0f} MiB, state of AdamW {trained * 8 / 2**20:,.0f} MiB.")
    print("Total memory: both, and the larger of a micro-batch with the sums so far and the gradients of an update.")
    if args.memory is not None:
        fitting = [row.method for row in rows if row.total_bytes <= args.memory * 1e9]
        print(f"Into {args.memory:g} GB fit: {'; '.join(fitting) or 'none of them'}.")
    for counts in (row.layerwise for row in rows if row.layerwise):
        print(
            f"BK forms the per-sample gradients of {counts['formed']} of {counts['weights']} linear weights at this"
            f" length; by the rule of its paper, 2T^2 >= pd, it would form {counts['formed_by_paper']}."
        )
    print("Attention is counted with its probabilities kept. Memory that an allocator reserves is not counted.")


def _report(args: argparse.Namespace, entries: "list[Entry]", rows: "list[Row]") -> dict[str, Any]:
    sizes = {status: sum(e.size for e in entries if e.status == status) for status in ("covered", "frozen", "refused")}
    return {
        "model": args.model,
        "numbers": sizes,
        "parameters": [vars(entry) for entry in entries],
        "micro_batch": {"records": args.batch, "length": args.length, "records_per_unit": args.records_per_unit},
        "methods": {row.method: {k: v for k, v in vars(row).items() if k != "method"} for row in rows},
    }
