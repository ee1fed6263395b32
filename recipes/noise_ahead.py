"""Secure noise made by background threads while the passes run: time of a step, memory, and whether a number changes.

    OMP_NUM_THREADS=1 python recipes/noise_ahead.py

MiniLM-L6 with random weights, 16 records of 32 tokens in each of four micro-batches, torch on one thread. With 0
threads noise is made after the passes, as where no core is free (`taskset -c 0`). The variants take turns; the least
time of each counts. Results go to recipes/results/noise_ahead.{md,json}.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engines import make_batch, minilm

from hf_private.mechanism import ahead, noise
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.step import Mechanism
from hf_private.tasks.losses import PerSampleLoss

RESULTS = Path(__file__).parent / "results" / "noise_ahead"
KEY = bytes(range(32))  # so that all variants add the same noise


class Watched(ahead.Ahead):
    """Notes how many numbers wait to be used, at most."""

    most_waiting = 0

    def take(self, piece: Any) -> Any:
        waiting = sum(value.result().numel() for value in list(self._values.values()) if value.done())
        Watched.most_waiting = max(Watched.most_waiting, waiting)
        return super().take(piece)


def step_of(threads: int, source: noise.NoiseSource, model: Any, loss: PerSampleLoss, parts: list[Any]) -> Any:
    """One private step: wall and CPU seconds, numbers that waited, and the gradient."""
    mechanism = Mechanism(
        model,
        loss,
        clipping=Clipping(clip_norm=0.5),
        noise=source,
        noise_multiplier=1.0,
        sample_rate=0.01,
        expected_batch_size=64.0,
        charge=lambda event: None,
    )
    Watched.most_waiting = 0
    with mock.patch.object(noise, "free_threads", lambda device: threads), mock.patch.object(noise, "Ahead", Watched):
        wall, cpu = time.perf_counter(), time.process_time()
        mechanism.step(parts)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return wall, cpu, Watched.most_waiting, gradient


def table(rows: dict[str, dict[str, Any]], numbers: int) -> str:
    lines = [
        "# Noise ahead of its use",
        "",
        f"MiniLM-L6, {numbers / 1e6:.1f} million noised numbers, four micro-batches of 16 x 32, torch on one thread.",
        "",
        "| background threads | wall, s | CPU, s | numbers waiting, at most | gradient as without threads |",
        "|---|---|---|---|---|",
    ]
    for threads, row in rows.items():
        same = "to the bit" if row["same"] else "**no**"
        lines.append(
            f"| {threads} | {row['wall']:.2f} | {row['cpu']:.2f} | {row['waiting'] / 1e6:.1f} million | {same} |"
        )
    bound = noise._AHEAD / 1e6
    lines += ["", f"At most {bound:.0f} million numbers wait on a CPU ({8 * bound:.0f} MB), whatever the model is."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, nargs="+", default=[0, 1])
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = minilm().train()
    loss = PerSampleLoss(model)
    parts = [loss.checked(model, make_batch(model, "minilm", 16, 32)) for _ in range(4)]
    rows: dict[str, dict[str, Any]] = {}
    reference = None
    for _ in range(args.rounds):
        for threads in args.threads:
            wall, cpu, waiting, gradient = step_of(threads, noise.NoiseSource("secure", KEY), model, loss, parts)
            reference = gradient if reference is None else reference
            row = rows.setdefault(str(threads), {"wall": wall, "cpu": cpu, "waiting": 0, "same": True})
            row["wall"], row["cpu"] = min(row["wall"], wall), min(row["cpu"], cpu)
            row["waiting"] = max(row["waiting"], waiting)
            row["same"] = row["same"] and torch.equal(gradient, reference)
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    RESULTS.with_suffix(".json").write_text(json.dumps({"numbers": numbers, "threads": rows}, indent=1) + "\n")
    text = table(rows, numbers) + "\n`OMP_NUM_THREADS=1 python recipes/noise_ahead.py`\n"
    RESULTS.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
