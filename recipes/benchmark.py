"""What a private step costs: speed, memory and operations of every engine as ratios against plain training.

    python recipes/benchmark.py                      # the two headline settings (make bench)
    python recipes/benchmark.py --all                # all others (make bench-all); goes on where it was stopped
    python recipes/benchmark.py --settings bert-8x128 --engines bk rgp --rounds 6 --output try
    make bench-peers                                 # Opacus and Opake, in an environment of their own

One step = forward and backward pass, for private engines with clipping and summing, without noise and optimizer.
All engines of a setting run in one process, in turn, on one thread. Other load on a machine only ever adds to a time,
and comes and goes in seconds, so a step is taken apart: calls of one operation on operands of the same shapes (and the
Python code between all of them) count with their tenth percentile over the rounds of a run, and a step's time is the
sum. A speed is the ratio of such times, the worst of the runs. That hides a cost which only some like calls have, as
operands that have left the cache. "Whole steps" is the ratio of the fastest whole steps of all runs in CPU seconds,
with the machine's noise in it. A profiler runs along with both, which costs engines of many small calls more. Memory
is the peak of live tensor bytes, weights included; operations are counted by torch. Results go to
recipes/results/<output>.{md,json,png}; what is there already is not measured again, unless --fresh is given.
"""

import argparse
import ctypes
import gc
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers as hf
from engines import MODELS, OURS, Step, anchors, lora, make_batch, minilm, with_method
from peers import PEERS
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

RESULTS = Path(__file__).parent / "results"
ENGINES = OURS | PEERS
WHOLE_ONLY = ("opake",)  # its transforms do not run under the counters, and fill the memory under the profiler
HEADLINE = ("bert-8x128", "gpt2-4x100")
GRID = (
    "bert-8x32", "bert-2x512", "roberta-8x32", "roberta-8x128", "roberta-2x512", "minilm-16x32", "minilm-16x128",
    "minilm-4x512", "gpt2-8x32", "gpt2-4x128", "gpt2-2x512", "gpt2-1x1024", "llama-8x32", "llama-4x128",
    "llama-2x512", "llama-1x1024", "vit-4x197",
)  # fmt: skip


# ---- counting


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the model's storages and of all that operations create while they live; keeps the peak."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = WeakIdKeyDictionary()
        for tensor in (*model.parameters(), *model.buffers()):
            self._track(tensor.untyped_storage())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._track(tensor.untyped_storage())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = _Finally(lambda: self._free(size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, size: int) -> None:
        self.live -= size


class _Finally:
    """Runs a function when the entry that holds it goes."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def __del__(self) -> None:
        self.function()


@contextmanager
def counted(model: nn.Module) -> Iterator[dict[str, float]]:
    row: dict[str, float] = {}
    with FlopCounterMode(display=False) as flops, LiveBytes(model) as live:
        yield row
    row["flops"], row["bytes"] = flops.get_total_flops(), live.peak


# ---- measuring


def prepare(setting: str, engines: list[str]) -> tuple[dict[str, dict], dict[str, Step]]:
    """By engine: what one step costs in bytes and operations, and the step. Peers may be absent, or refuse a model."""
    name, _, size = setting.partition("-")
    batch_size, length = map(int, size.split("x"))
    rows: dict[str, dict] = {}
    steps: dict[str, Step] = {}
    for engine in engines:
        torch.manual_seed(0)
        model = MODELS[name]().train()
        batch = make_batch(model, name, batch_size, length)
        try:
            step = ENGINES[engine](model, batch)
            if engine in WHOLE_ONLY:
                step()
                row = {"flops": None, "bytes": None}
            else:
                with counted(model) as row:
                    step()
        except Exception as error:
            if engine not in PEERS:
                raise
            reason = (str(error).splitlines() or [""])[0]
            print(f"  {engine}: skipped ({type(error).__name__}: {reason})", flush=True)
            continue
        rows[engine], steps[engine] = {"setting": setting, "engine": engine, **row}, step
    return rows, steps


# Operation and shapes of its operands -> microseconds of each call, without the operations inside it.
Calls = dict[tuple[str, str], list[float]]


def timed(step: Step, apart: bool = True) -> tuple[float, Calls]:
    """One step: its CPU seconds, and the times of the calls in it. What no operation took stands under "step"; all of
    it does, if it is not taken `apart`."""
    if not apart:
        start = time.process_time()
        step()
        seconds = time.process_time() - start
        return seconds, {("step", "[]"): [1e6 * seconds]}
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as watch:
        start = time.process_time()
        with record_function("step"):
            step()
        seconds = time.process_time() - start
    calls: Calls = {}
    for event in watch.events():
        calls.setdefault((event.name, str(event.input_shapes)), []).append(event.self_cpu_time_total)
    return seconds, calls


def step_time(rounds: list[Calls]) -> float:
    """Seconds of a step on an undisturbed machine, from some that may have been disturbed."""
    kinds = {kind for calls in rounds for kind in calls}
    times = {kind: sorted(took for calls in rounds for took in calls.get(kind, [])) for kind in kinds}
    return sum(len(took) * took[len(took) // 10] for took in times.values()) / len(rounds) / 1e6


def measure(setting: str, engines: list[str], rounds: int, runs: int) -> list[dict]:
    """One row per engine; all speeds are relative to plain training in the same run, and the worst run counts."""
    rows, steps = prepare(setting, engines)
    speeds: dict[str, list[float]] = {engine: [] for engine in steps}
    whole = dict.fromkeys(steps, float("inf"))
    for run in range(runs):
        seen: dict[str, list[Calls]] = {engine: [] for engine in steps}
        fastest = dict.fromkeys(steps, float("inf"))
        for turn in range(rounds):
            print(f"  run {run + 1} of {runs}, round {turn + 1} of {rounds}", flush=True)
            for engine, step in steps.items():
                gc.collect()
                seconds, calls = timed(step, apart=engine not in WHOLE_ONLY)
                fastest[engine] = min(fastest[engine], seconds)
                seen[engine].append(calls)
        took = {engine: step_time(calls) for engine, calls in seen.items()}
        for engine in steps:
            rows[engine]["seconds"] = min(took[engine], rows[engine].get("seconds", float("inf")))
            times = fastest if engine in WHOLE_ONLY else took
            speeds[engine].append(times["plain"] / times[engine])
            whole[engine] = min(whole[engine], fastest[engine])
    for engine, row in rows.items():
        row["speed"], row["speeds"] = min(speeds[engine]), speeds[engine]
        row["whole_steps"] = whole["plain"] / whole[engine]
        for ratio, count in (("memory", "bytes"), ("operations", "flops")):
            row[ratio] = row[count] and row[count] / rows["plain"][count]
    return list(rows.values())


def gep_memory() -> list[dict]:
    """Peak bytes of whole logical steps with GEP (MiniLM, LoRA), for m anchors and B records, 8 at a time."""
    found = []
    for num_anchors, batch_size, k in ((32, 16, 64), (64, 16, 64), (32, 32, 64), (32, 16, 128)):
        torch.manual_seed(0)
        model = lora(minilm().train())
        batch = make_batch(model, "minilm", 8, 32)
        with LiveBytes(model) as live:
            method = anchors(model, lambda _, m=num_anchors, b=batch: iter([b] * (m // 8)), num_anchors, k)
            step = with_method(model, batch, method)
            for _ in range(batch_size // 8):
                step()
        sizes = {"anchors": num_anchors, "batch": batch_size, "k": k}
        found.append(sizes | {"basis_bytes": method.basis_bytes, "peak_bytes": live.peak})
    return found


def keep_memory() -> None:
    """Let glibc keep what is freed. Else every step, plain or private, asks the kernel for its memory anew, at a price
    that changes with the load of a virtual machine's host."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap too
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: and the heap never shrinks


# ---- results


def table(rows: list[dict]) -> str:
    lines = ["| setting | engine | speed | whole steps | memory | operations |", "|---|---|---|---|---|---|"]
    for r in rows:
        ratios = (r["speed"], r["whole_steps"], r["memory"], r["operations"])
        shown = " | ".join("not counted" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        lines.append(f"| {r['setting']} | {r['engine']} | {shown} |")
    return "\n".join(lines)


def gep_table(rows: list[dict]) -> str:
    lines = [
        "GEP's memory over whole logical steps (MiniLM with LoRA, 8 records of 32 tokens at a time): neither more",
        "anchors nor more records take more, only more basis vectors do.",
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
    width = 0.8 / len(engines)
    for axes, first in zip(figure.subplots(-(-len(settings) // 8), squeeze=False).flat, range(0, 99, 8), strict=False):
        shown = settings[first : first + 8]
        for i, engine in enumerate(engines):
            speed = {r["setting"]: r["speed"] for r in rows if r["engine"] == engine}
            places = [x + i * width for x in range(len(shown))]
            axes.bar(places, [speed.get(setting, 0) for setting in shown], width, label=engine)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks([x + 0.4 - width / 2 for x in range(len(shown))], shown)
        axes.set_xlim(-0.3, min(len(settings), 8))  # bars of a short last row as wide as the others
        axes.set_ylabel("speed (plain training = 1)")
    figure.axes[0].legend(fontsize=7, ncols=2)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--settings", nargs="+", default=list(HEADLINE), help="<model>-<records>x<tokens>, e.g. bert-8x128"
    )
    parser.add_argument("--engines", nargs="+", default=list(OURS), choices=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=2, help="rounds of a run")
    parser.add_argument("--runs", type=int, default=3, help="runs, of which the worst counts")
    parser.add_argument("--all", action="store_true", help="the grid of the other models and sizes")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--output", default="benchmark", help="name of the files in recipes/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler says when it starts and stops
    keep_memory()
    hf.logging.set_verbosity_error()
    RESULTS.mkdir(exist_ok=True)
    record = RESULTS / f"{args.output}.json"
    rows: list[dict] = json.loads(record.read_text()) if record.is_file() and not args.fresh else []
    began, memory = time.perf_counter(), ""
    settings = GRID if args.all else args.settings
    for number, setting in enumerate(settings, 1):
        known = {r["engine"] for r in rows if r["setting"] == setting and "whole_steps" in r}
        missing = [engine for engine in args.engines if engine not in known and engine != "plain"]
        minutes = (time.perf_counter() - began) / 60
        if not missing:
            print(f"{setting}: measured before (--fresh measures again)", flush=True)
            continue
        print(f"{setting} ({number} of {len(settings)}, {minutes:.0f} min): {' '.join(missing)}", flush=True)
        found = measure(setting, ["plain", *missing], args.rounds, args.runs)
        replaced = {(r["setting"], r["engine"]) for r in found}
        rows = [r for r in rows if (r["setting"], r["engine"]) not in replaced] + found
        order = [*HEADLINE, *GRID, *dict.fromkeys(r["setting"] for r in rows)]
        rows.sort(key=lambda r: (order.index(r["setting"]), list(ENGINES).index(r["engine"])))
        print(table([r for r in rows if r["setting"] == setting]), flush=True)
        record.write_text(json.dumps(rows, indent=1))
        memory = memory or (gep_table(gep_memory()) if "lora-gep" in args.engines else "")
        command = f"`{shlex.join(['python', *sys.argv])}`"
        record.with_suffix(".md").write_text(f"{command}\n\n{table(rows)}\n\n{memory}".rstrip() + "\n")
        chart(rows, record.with_suffix(".png"))
    print(f"{(time.perf_counter() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
