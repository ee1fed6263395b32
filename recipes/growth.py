"""Measure how the cost of a private step grows with length, batch, width, depth, rank, accumulation and dataset size.

    python recipes/growth.py                   # make growth
    python recipes/growth.py --axes length width --rounds 5

The script changes a small BERT along one axis at a time; plain training, BK and RGP (r=8) take turns in one process on
one thread. An exponent e means that the cost grows like x^e. It is fitted to all points (least squares on logarithms)
and to the last two, because fixed costs flatten the beginning. Memory is the peak of live tensor bytes without the
weights; torch counts the operations. Rank is that of the carriers; accumulation runs whole logical steps, with noise;
the dataset is only sampled. For several processes see scaling.py. Writes recipes/results/growth.{md,json,png}.
"""

import argparse
import gc
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from engines import OURS, bert, make_batch, private
from torch import nn

from hf_private.cli.doctor import dryrun
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.sampling import PoissonSampler
from hf_private.mechanism.step import Mechanism
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.methods.registry import resolve_method
from hf_private.tasks.losses import PerSampleLoss

RESULTS = Path(__file__).parent / "results" / "growth"
BASE = {"length": 64, "batch": 8, "width": 256, "depth": 2, "rank": 8}
AXES: dict[str, tuple[int, ...]] = {
    "length": (32, 64, 128, 256, 512),
    "batch": (2, 4, 8, 16, 32),
    "width": (128, 256, 512, 1024),
    "depth": (1, 2, 4, 8),
    "rank": (4, 8, 16, 32, 64),
    "accumulation": (1, 2, 4, 8),
    "records": (10**4, 10**5, 10**6, 10**7, 10**8),
}
EXPECTED = {
    "length": "1, and 2 for attention and for Gram matrices, until instantiating is cheaper",
    "batch": "1",
    "width": "2; 1 for memory without the weights, if no gradients are held",
    "depth": "1",
    "rank": "well below 1: thin products are small next to those of the model",
    "accumulation": "1; memory 0",
    "records": "0: the sampler draws the gaps between sampled records",
}
ENGINES = ("plain", "bk", "rgp")
MEASURES = {"seconds": "CPU seconds", "flops": "operations", "bytes": "memory"}
SAMPLED = 1000  # expected batch size for datasets of all sizes


def build(width: int, depth: int) -> nn.Module:
    """A BERT with a small vocabulary, so that the embedding does not dominate the cost."""
    torch.manual_seed(0)
    return bert(
        hidden_size=width, num_hidden_layers=depth, num_attention_heads=width // 64, intermediate_size=4 * width,
        vocab_size=1250,
    ).train()  # fmt: skip


def batch_of(model: nn.Module, size: int, length: int) -> dict[str, torch.Tensor]:
    batch = make_batch(model, "bert", size, length)
    return batch | {"input_ids": batch["input_ids"] % model.config.vocab_size}


def micro_steps(axis: str, x: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """One micro-batch by engine."""
    size = BASE | {axis: x}
    for engine in ("rgp",) if axis == "rank" else ENGINES:
        model = build(size["width"], size["depth"])
        batch = batch_of(model, size["batch"], size["length"])
        carriers = CarrierConfig(r=size["rank"])
        yield engine, private(model, batch, carriers) if engine == "rgp" else OURS[engine](model, batch)


def logical_steps(_: str, x: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Whole steps of `x` micro-batches with noise; plain training accumulates gradients."""
    for engine in ENGINES:
        model = build(BASE["width"], BASE["depth"])
        batches = [batch_of(model, BASE["batch"], BASE["length"]) for _ in range(x)]
        loss = PerSampleLoss(model)
        if engine == "plain":

            def plain(model: nn.Module = model, batches: list = batches, loss: PerSampleLoss = loss) -> None:
                for batch in batches:
                    loss(model, batch).sum().backward()
                model.zero_grad()

            yield engine, plain
            continue
        carriers = CarrierConfig(r=8) if engine == "rgp" else None
        mechanism = Mechanism(
            model,
            loss,
            method=resolve_method(carriers, model),
            clipping=Clipping(),
            noise=NoiseSource(),
            noise_multiplier=1.0,
            sample_rate=0.01,
            expected_batch_size=x * BASE["batch"],
            charge=lambda event: None,
        )

        def logical(mechanism: Mechanism = mechanism, batches: list = batches, model: nn.Module = model) -> None:
            mechanism.step(batches)
            model.zero_grad()

        yield engine, logical


def measure(axis: str, rounds: int) -> list[dict[str, Any]]:
    """One row per value of the axis and engine."""
    if axis == "records":
        return [_draws(n, rounds) for n in AXES[axis]]
    rows = []
    for x in AXES[axis]:
        found: dict[str, dict[str, Any]] = {}
        steps = {}
        for engine, step in (logical_steps if axis == "accumulation" else micro_steps)(axis, x):
            cost = dryrun.measure(step)
            found[engine] = {"axis": axis, "x": x, "engine": engine, "seconds": float("inf")}
            found[engine] |= {"flops": cost.flops, "bytes": cost.peak_bytes}
            steps[engine] = step
        for _ in range(rounds):
            for engine, step in steps.items():
                gc.collect()
                start = time.process_time()
                step()
                found[engine]["seconds"] = min(found[engine]["seconds"], time.process_time() - start)
        rows += found.values()
    return rows


def _draws(num_records: int, rounds: int) -> dict[str, Any]:
    """Seconds of one Poisson draw."""
    sampler = PoissonSampler(num_records, SAMPLED)
    seconds, drawn = float("inf"), 0
    for counter in range(10 * rounds):
        start = time.process_time()
        drawn += len(sampler.draw(counter))
        seconds = min(seconds, time.process_time() - start)
    return {"axis": "records", "x": num_records, "engine": "sampling", "seconds": seconds, "drawn": drawn}


def exponents(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By axis and engine: the fitted exponent of each measure, and that between the last two points."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["axis"], row["engine"]), []).append(row)
    found = []
    for (axis, engine), points in groups.items():
        entry: dict[str, Any] = {"axis": axis, "engine": engine}
        for name in MEASURES:
            if all(name in point for point in points):
                x = np.log([point["x"] for point in points])
                y = np.log([point[name] for point in points])
                entry[name] = (float(np.polyfit(x, y, 1)[0]), float((y[-1] - y[-2]) / (x[-1] - x[-2])))
        found.append(entry)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Growth of the cost of a step", "",
        "Exponents: over all points / between the last two. One thread; seconds are minima of CPU time.", "",
        f"| axis | engine | {' | '.join(MEASURES.values())} | expected |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for entry in exponents(rows):
        cells = [f"{entry[name][0]:.2f} / {entry[name][1]:.2f}" if name in entry else "" for name in MEASURES]
        lines.append(f"| {entry['axis']} | {entry['engine']} | {' | '.join(cells)} | {EXPECTED[entry['axis']]} |")
    draws = [row for row in rows if row["axis"] == "records"]
    if draws:
        lines += ["", f"A Poisson draw of {SAMPLED} expected records:", "", "| dataset | milliseconds |", "|---|---|"]
        lines += [f"| {row['x']:,} | {1000 * row['seconds']:.2f} |" for row in draws]
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    axes_names = list(dict.fromkeys(row["axis"] for row in rows))
    figure = Figure(figsize=(12, 3.4 * -(-len(axes_names) // 3)), layout="constrained")
    panels = figure.subplots(-(-len(axes_names) // 3), 3, squeeze=False).flatten()
    for panel in panels[len(axes_names) :]:
        panel.set_axis_off()
    for panel, axis in zip(panels, axes_names, strict=False):
        for engine in dict.fromkeys(row["engine"] for row in rows if row["axis"] == axis):
            points = [(row["x"], row["seconds"]) for row in rows if (row["axis"], row["engine"]) == (axis, engine)]
            panel.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=engine)
        low, high = panel.get_ylim()
        middle = (low * high) ** 0.5
        panel.set_ylim(min(low, middle / 10**0.5), max(high, middle * 10**0.5))  # at least a decade
        panel.set_xticks(AXES[axis], [f"{x:g}" for x in AXES[axis]])
        panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        panel.set_xlabel(axis)
        panel.set_ylabel("CPU seconds")
        panel.legend(fontsize=7)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=list(AXES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    hf.logging.set_verbosity_error()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for axis in args.axes:
        print(f"{axis} ...", flush=True)
        rows += measure(axis, args.rounds)
        args.results.with_suffix(".json").write_text(json.dumps(rows, indent=1))
        args.results.with_suffix(".md").write_text(f"{table(rows)}\n`{shlex.join(['python', *sys.argv])}`\n")
    plot(rows, args.results.with_suffix(".png"))
    print(table(rows))


if __name__ == "__main__":
    main()
