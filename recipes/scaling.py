"""Time and traffic of one private step on one rank and on several, one thread each, by method.

    python recipes/scaling.py
    python recipes/scaling.py --ranks 4 --batch-size 256 --output scaling4

Each rank computes its share of the batch; the clipped sums are added over the ranks. For a p x d weight, RGP sends
r (p + d) numbers. Steps of one rank, for which the others wait, and steps of all ranks alternate, so that changes in
the load of the machine do not affect their ratio. Results go to recipes/results/<output>.{md,json}.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from hf_private import CarrierConfig
from hf_private.distributed.ranks import Ranks
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from hf_private.methods.registry import resolve_method
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch

RESULTS = Path(__file__).parent / "results"
METHODS = {
    "BK": None,
    "RGP": CarrierConfig(r=8),
    "LSG": CarrierConfig(r=8, sparsity=0.3),
}
COLUMNS = ("method", "ranks", "s / step", "speed-up", "MB reduced / step")


def build(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 64),
        vocab_size=2000,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def mechanism(model: nn.Module, method: str, options: argparse.Namespace, ranks: Ranks) -> Mechanism:
    return Mechanism(
        model,
        PerSampleLoss(model),
        method=resolve_method(METHODS[method], model),
        clipping=Clipping(),
        noise=NoiseSource(key=ranks.key()),
        noise_multiplier=1.0,
        sample_rate=0.01,
        expected_batch_size=options.batch_size,
        charge=lambda event: None,
        ranks=ranks,
    )


def share(batch: dict[str, Tensor], ranks: Ranks, rows: int) -> Iterator[dict[str, Tensor]]:
    """The micro-batches of a rank."""
    own = {name: value[ranks.rank :: ranks.world_size] for name, value in batch.items()}
    for i in range(0, len(own["input_ids"]), rows):
        yield {name: value[i : i + rows] for name, value in own.items()}


def measure(method: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Median seconds of a step on one batch, by one rank and by all, and the bytes that a rank sends."""
    model, all_ranks, alone = build(options), Ranks(), Ranks.alone()
    batch = synthetic_batch(model, options.batch_size, options.length)
    runs = {ranks: mechanism(model, method, options, ranks) for ranks in (alone, all_ranks)}
    times: dict[Ranks, list[float]] = {alone: [], all_ranks: []}
    for _ in range(options.steps + 1):
        for ranks, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            if ranks is all_ranks or all_ranks.rank == 0:
                run.step(share(batch, ranks, options.micro_batch_size))
            times[ranks].append(time.perf_counter() - start)
    return [
        {
            "method": method,
            "ranks": ranks.world_size,
            "seconds": statistics.median(times[ranks][1:]),  # the first step warms up
            "bytes": ranks.reduced_bytes,
        }
        for ranks in (alone, all_ranks)
    ]


def worker(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=options.ranks)
    rows = [row for method in METHODS for row in measure(method, options)]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def table(rows: list[dict[str, Any]]) -> str:
    """The figures in Markdown; speed-ups are relative to one rank with the same method."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for row in rows:
        one = next(other["seconds"] for other in rows if other["method"] == row["method"] and other["ranks"] == 1)
        cells = row["method"], row["ranks"], f"{row['seconds']:.3f}", f"{one / row['seconds']:.2f}"
        lines.append(f"| {' | '.join(map(str, cells))} | {row['bytes'] / 1e6:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128, help="records in a logical step, over all ranks")
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="tokens of a record")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", default="scaling", help="name of the files in recipes/results/")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder, options), nprocs=options.ranks)
        rows = json.loads(Path(folder, "rows.json").read_text())
    weights = sum(p.numel() for p in build(options).parameters())
    size = f"{weights:,} weights, {options.batch_size} records of {options.length} tokens in a step, 1 thread per rank"
    text = f"{table(rows)}\n\n{size}, medians of {options.steps} steps.\n\n`{shlex.join(['python', *sys.argv])}`\n"
    print(text)
    record = RESULTS / f"{options.output}.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({"settings": vars(options), "weights": weights, "rows": rows}, indent=1) + "\n")
    record.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
