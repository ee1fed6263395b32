"""The cost of a private step: speed, memory and operations of every engine relative to plain training.

    python recipes/benchmark.py                      # the headline settings and their targets (make bench)
    python recipes/benchmark.py --all                # the other settings (make bench-all); can be resumed
    python recipes/benchmark.py --settings bert-8x128 --engines bk rgp --seconds 60 --output try
    python recipes/benchmark.py --settings bert-8x32 --engines plain bk --profile        # time by operation
    make bench-peers                                 # Opacus and Opake, in a separate environment

A step is a forward and a backward pass; private engines also clip and sum. Noise and optimizer are not included.
All engines of a setting take turns in one process, on one thread. Other load on the machine only makes steps slower:
the fastest step of a run counts, in CPU seconds. Speed is the time of plain training divided by the time of the
engine, in the worst of several runs. Memory is the peak of live tensor bytes, weights included; torch counts the
operations. Results go to recipes/results/<output>.{md,json,png}. Existing results are kept unless --fresh is given.
"""

import argparse
import ctypes
import gc
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import transformers as hf
from engines import MODELS, OURS, Step, anchors, in_half_precision, loop, lora, make_batch, minilm, with_method
from peers import PEERS
from torch import nn
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile

from hf_private.cli.doctor import dryrun

RESULTS = Path(__file__).parent / "results"
ENGINES = OURS | {"loop": loop} | PEERS
UNCOUNTED = ("opake",)  # its transforms do not work with the counters
FULL, SHORT, LONG = ("bert-8x128", "gpt2-4x100"), ("bert-8x32", "gpt2-8x32"), ("gpt2-1x1024",)
HALF = ("minilm-16x32-bf16", "bert-8x128-bf16")
HEADLINE = (
    dict.fromkeys(FULL, tuple(OURS))
    | dict.fromkeys(SHORT, ("plain", "bk", "bk-mm"))
    | dict.fromkeys(LONG, ("plain", "bk"))
    | dict.fromkeys(HALF, ("plain", "bk", "rgp"))
)
GRID = (
    "bert-8x32", "bert-2x512", "roberta-8x32", "roberta-8x128", "roberta-2x512", "minilm-16x32", "minilm-16x128",
    "minilm-4x512", "gpt2-8x32", "gpt2-4x128", "gpt2-2x512", "gpt2-1x1024", "llama-8x32", "llama-4x128",
    "llama-2x512", "llama-1x1024", "vit-4x197",
)  # fmt: skip
OTHERS = ("deberta-4x64", "moe-4x64", "whisper-4x32", "wav2vec2-4x99")
FALLBACK = ("funnel-16x8", "funnel-16x32")  # no rule knows some of its weights
ENGINES_OF = HEADLINE | dict.fromkeys(OTHERS + FALLBACK, ("plain", "bk", "loop"))


class Aim(NamedTuple):
    """The target of an engine in some settings: a ratio to another engine, at least (speed) or at most (others)."""

    engine: str
    ratio: str
    bound: float
    settings: tuple[str, ...] = FULL
    against: str = "plain"


AIMS = (
    Aim("bk", "speed", 0.90),
    Aim("bk", "speed", 0.96, SHORT),
    Aim("bk", "speed", 0.72, LONG),
    Aim("bk-mm", "speed", 0.90, FULL + SHORT),
    Aim("bk", "speed", 0.70, HALF),
    Aim("rgp", "speed", 1.10, HALF),
    Aim("rgp", "speed", 1.35),
    Aim("lsg", "speed", 1.35),
    Aim("rgp", "speed", 0.95, against="frozen"),
    Aim("lsg", "speed", 0.95, against="frozen"),
    Aim("lora-bk", "speed", 0.95, against="lora"),
    Aim("bk-units", "speed", 0.95, against="bk"),
    Aim("bk", "speed", 0.85, OTHERS),
    Aim("bk", "speed", 2.0, FALLBACK, against="loop"),
    Aim("bk", "memory", 1.10),
    Aim("rgp", "memory", 0.90),
    Aim("lsg", "memory", 0.90),
    Aim("bk", "operations", 1.10),
)


# ---- measuring


def prepare(setting: str, engines: list[str]) -> tuple[dict[str, dict], dict[str, Step]]:
    """By engine: bytes and operations of one step, and the step. Skips peers that are absent or refuse the model."""
    name, size, *precision = setting.split("-")
    batch_size, length = map(int, size.split("x"))
    rows: dict[str, dict] = {}
    steps: dict[str, Step] = {}
    for engine in engines:
        torch.manual_seed(0)
        model = MODELS[name]().train()
        batch = make_batch(model, name, batch_size, length)
        if precision:
            in_half_precision(model)
        try:
            step = ENGINES[engine](model, batch)
            if engine in UNCOUNTED:
                step()
                row = {"flops": None, "bytes": None}
            else:
                cost = dryrun.measure(step)
                row = {"flops": cost.flops, "bytes": weights(model) + cost.peak_bytes}
        except Exception as error:
            if engine not in PEERS:
                raise
            reason = (str(error).splitlines() or [""])[0]
            print(f"  {engine}: skipped ({type(error).__name__}: {reason})", flush=True)
            continue
        rows[engine], steps[engine] = {"setting": setting, "engine": engine, **row}, step
    return rows, steps


def measure(setting: str, engines: list[str], seconds: float, runs: int) -> list[dict]:
    """One row per engine. Speeds are relative to plain training in the same run, and the worst run counts.

    A run starts new rounds for `seconds`, and has at least two.
    """
    rows, steps = prepare(setting, engines)
    speeds: dict[str, list[float]] = {engine: [] for engine in steps}
    for run in range(runs):
        fastest = dict.fromkeys(steps, float("inf"))
        began, rounds = time.perf_counter(), 0
        while rounds < 2 or time.perf_counter() - began < seconds:
            rounds += 1
            print(f"  run {run + 1} of {runs}, round {rounds}", flush=True)
            for engine, step in steps.items():
                gc.collect()
                start = time.process_time()
                step()
                fastest[engine] = min(fastest[engine], time.process_time() - start)
        for engine, row in rows.items():
            row["seconds"] = min(fastest[engine], row.get("seconds", float("inf")))
            speeds[engine].append(fastest["plain"] / fastest[engine])
    for engine, row in rows.items():
        row["speed"], row["speeds"] = min(speeds[engine]), speeds[engine]
        for ratio, count in (("memory", "bytes"), ("operations", "flops")):
            row[ratio] = row[count] and row[count] / rows["plain"][count]
    return list(rows.values())


def show_profiles(setting: str, engines: list[str]) -> None:
    """Print the time of the fastest of five steps by operation. The profiler slows down small calls most."""

    def profiled(step: Step) -> EventList:
        with profile(activities=[ProfilerActivity.CPU]) as watch:
            step()
        return watch.key_averages()

    for engine, step in prepare(setting, engines)[1].items():
        fastest = min((profiled(step) for _ in range(5)), key=lambda events: events.self_cpu_time_total)
        print(f"{setting}, {engine}")
        print(fastest.table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=60))


def weights(model: nn.Module) -> int:
    """Bytes of a model's parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def gep_memory() -> list[dict]:
    """Peak bytes of whole logical steps with GEP (MiniLM, LoRA), by number of anchors and records, 8 at a time."""
    found = []
    for num_anchors, batch_size, k in ((32, 16, 64), (64, 16, 64), (32, 32, 64), (32, 16, 128)):
        torch.manual_seed(0)
        model = lora(minilm().train())
        batch = make_batch(model, "minilm", 8, 32)
        with dryrun.PeakMemory() as memory:
            method = anchors(model, lambda _, m=num_anchors, b=batch: iter([b] * (m // 8)), num_anchors, k)
            step = with_method(model, batch, method)
            for _ in range(batch_size // 8):
                step()
        sizes = {"anchors": num_anchors, "batch": batch_size, "k": k}
        found.append(sizes | {"basis_bytes": method.basis_bytes, "peak_bytes": weights(model) + memory.peak})
    return found


def keep_memory() -> None:
    """Let glibc keep freed memory. Otherwise every step requests its memory from the kernel again, at a cost that
    depends on the load of the host of a virtual machine."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: allocate large blocks on the heap too
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink the heap


# ---- results


def table(rows: list[dict]) -> str:
    lines = ["| setting | engine | speed | its runs | memory | operations |", "|---|---|---|---|---|---|"]
    for r in rows:
        speed, memory, operations = (
            "not counted" if r[ratio] is None else f"{r[ratio]:.2f}" for ratio in ("speed", "memory", "operations")
        )
        runs = " ".join(f"{speed:.3f}" for speed in r["speeds"])
        lines.append(f"| {r['setting']} | {r['engine']} | {speed} | {runs} | {memory} | {operations} |")
    return "\n".join(lines)


def aims_table(rows: list[dict]) -> str:
    """Every target that was measured, and whether the worst run meets it."""
    known = {(r["setting"], r["engine"]): r for r in rows}
    lines = ["| aim | asked | setting | worst run | met |", "|---|---|---|---|---|"]
    for aim in AIMS:
        for setting in aim.settings:
            if (setting, aim.engine) not in known or (setting, aim.against) not in known:
                continue
            mine, other = known[setting, aim.engine], known[setting, aim.against]
            if aim.ratio == "speed":
                worst = min(a / b for a, b in zip(mine["speeds"], other["speeds"], strict=False))
                met, sign = worst >= aim.bound, ">="
            else:
                worst = mine[aim.ratio]
                met, sign = worst <= aim.bound, "<="
            name = f"{aim.engine}, {aim.ratio} of {aim.against}"
            lines.append(f"| {name} | {sign} {aim.bound:.2f} | {setting} | {worst:.3f} | {'yes' if met else 'no'} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def gep_table(rows: list[dict]) -> str:
    lines = [
        "Memory of GEP over whole logical steps (MiniLM with LoRA, 8 records of 32 tokens at a time). It grows with",
        "the number of basis vectors, not with the number of anchors or records.",
        "",
        "| anchors m | records B | basis vectors k | basis, most of it at once | peak |",
        "|---|---|---|---|---|",
    ]
    mib = 2**20
    lines += [
        f"| {r['anchors']} | {r['batch']} | {r['k']} | {r['basis_bytes'] / mib:.1f} MiB"
        f" | {r['peak_bytes'] / mib:.1f} MiB |"
        for r in rows
    ]
    return "\n".join(lines)


def chart(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys(r["setting"] for r in rows))
    engines = list(dict.fromkeys(r["engine"] for r in rows))
    figure = Figure(figsize=(2 + 2.2 * min(len(settings), 8), 3.6 * -(-len(settings) // 8)), layout="constrained")
    width, bars = 0.8 / len(engines), {}
    for axes, first in zip(figure.subplots(-(-len(settings) // 8), squeeze=False).flat, range(0, 99, 8), strict=False):
        shown = settings[first : first + 8]
        for x, setting in enumerate(shown):
            here = [r for r in rows if r["setting"] == setting]
            for i, r in enumerate(here):
                place = x + (i - (len(here) - 1) / 2) * width
                bars[r["engine"]] = axes.bar(place, r["speed"], width, color=f"C{engines.index(r['engine'])}")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(shown)), shown)
        axes.set_xlim(-0.6, min(len(settings), 8) - 0.4)  # equal widths of bars, also in a short last row
        axes.set_ylabel("speed (plain training = 1)")
    figure.legend(bars.values(), bars, loc="outside upper center", ncols=len(bars))
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", help="<model>-<records>x<tokens>, e.g. bert-8x128")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), help="default: all of ours")
    parser.add_argument("--seconds", type=float, default=12, help="length of a run; it has at least two rounds")
    parser.add_argument("--runs", type=int, default=3, help="number of runs; the worst counts")
    parser.add_argument("--all", action="store_true", help="measure the other models and sizes")
    parser.add_argument("--fresh", action="store_true", help="discard earlier results")
    parser.add_argument("--profile", action="store_true", help="print the time of a step by operation instead")
    parser.add_argument("--output", default="benchmark", help="name of the files in recipes/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences the messages of the profiler
    keep_memory()
    hf.logging.set_verbosity_error()
    RESULTS.mkdir(exist_ok=True)
    record = RESULTS / f"{args.output}.json"
    rows: list[dict] = json.loads(record.read_text()) if record.is_file() and not args.fresh else []
    began, memory = time.perf_counter(), ""
    settings = args.settings or ((*GRID, *OTHERS, *FALLBACK) if args.all else HEADLINE)
    for number, setting in enumerate(settings, 1):
        whole = (args.all or args.settings) and setting not in OTHERS + FALLBACK
        engines = args.engines or (OURS if whole else ENGINES_OF[setting])
        if args.profile:
            show_profiles(setting, list(engines))
            continue
        known = {r["engine"] for r in rows if r["setting"] == setting}
        missing = [engine for engine in engines if engine not in known and engine != "plain"]
        minutes = (time.perf_counter() - began) / 60
        if not missing:
            print(f"{setting}: already measured (--fresh measures again)", flush=True)
            continue
        print(f"{setting} ({number} of {len(settings)}, {minutes:.0f} min): {' '.join(missing)}", flush=True)
        found = measure(setting, ["plain", *missing], args.seconds, args.runs)
        replaced = {(r["setting"], r["engine"]) for r in found}
        rows = [r for r in rows if (r["setting"], r["engine"]) not in replaced] + found
        order = [*HEADLINE, *GRID, *dict.fromkeys(r["setting"] for r in rows)]
        rows.sort(key=lambda r: (order.index(r["setting"]), list(ENGINES).index(r["engine"])))
        print(table([r for r in rows if r["setting"] == setting]), flush=True)
        record.write_text(json.dumps(rows, indent=1))
        memory = memory or (gep_table(gep_memory()) if "lora-gep" in engines else "")
        command = f"`{shlex.join(['python', *sys.argv])}`"
        parts = [command, aims_table(rows), table(rows), memory]
        record.with_suffix(".md").write_text("\n\n".join(part for part in parts if part) + "\n")
        chart(rows, record.with_suffix(".png"))
    if args.profile:
        return
    print(f"{aims_table(rows)}\n{(time.perf_counter() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
