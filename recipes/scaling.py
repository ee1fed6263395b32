"""Time and traffic of one private step on 1 and 2 ranks of one thread each, by method.

    python recipes/scaling.py
    python recipes/scaling.py --ranks 1 2 4 --batch-size 128 --json scaling.json

Each rank computes its share of the batch; the clipped sums are added up over the ranks. Of a weight of p x d numbers,
RGP sends r (p + d).
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from hf_private import CarrierConfig, DPConfig
from hf_private.clipping import Clipping
from hf_private.losses import PerSampleLoss
from hf_private.mechanism import Mechanism
from hf_private.noise import NoiseSource
from hf_private.ranks import Ranks
from hf_private.synthetic import synthetic_batch
from hf_private.targets import resolve_method

METHODS = {
    "BK": {},
    "RGP": {"carriers": CarrierConfig(r=8)},
    "LSG": {"carriers": CarrierConfig(r=8, sparsity=0.5)},
}


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


def measure(method: str, options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Median seconds of a step on a batch of a fixed size, and the bytes that a rank gives to the network."""
    model = build(options)
    config = DPConfig(noise_multiplier=1.0, **METHODS[method])
    mechanism = Mechanism(
        model,
        PerSampleLoss(model),
        method=resolve_method(config, model),
        clipping=Clipping(),
        noise=NoiseSource(key=ranks.key()),
        noise_multiplier=1.0,
        sample_rate=0.01,
        expected_batch_size=options.batch_size,
        charge=lambda event: None,
        ranks=ranks,
    )
    batch = synthetic_batch(model, options.batch_size, options.length)
    own = {name: value[ranks.rank :: ranks.world_size] for name, value in batch.items()}
    rows = options.micro_batch_size
    micro = [{name: value[i : i + rows] for name, value in own.items()} for i in range(0, len(own["input_ids"]), rows)]
    times = []
    for _ in range(options.steps + 1):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        mechanism.step(micro)
        times.append(time.perf_counter() - start)
    return {"seconds": statistics.median(times[1:]), "bytes": ranks.reduced_bytes}


def worker(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{world}", rank=rank, world_size=world)
    found = {method: measure(method, options, Ranks()) for method in METHODS}
    if rank == 0:
        Path(folder, f"{world}.json").write_text(json.dumps(found))
    if world > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch-size", type=int, default=64, help="records in a logical step, over all ranks")
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="tokens of a record")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args()

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in options.ranks:
            mp.spawn(worker, (world, folder, options), nprocs=world)
            results[world] = json.loads(Path(folder, f"{world}.json").read_text())
    weights = sum(p.numel() for p in build(options).parameters())
    print(f"{weights:,} weights, {options.batch_size} records of {options.length} tokens in a step, 1 thread per rank")
    print(f"{'method':8}{'ranks':>7}{'s / step':>12}{'speed-up':>11}{'MB reduced / step':>20}")
    for method in METHODS:
        first = results[options.ranks[0]][method]["seconds"]
        for world in options.ranks:
            found = results[world][method]
            ratio, megabytes = first / found["seconds"], found["bytes"] / 1e6
            print(f"{method:8}{world:7}{found['seconds']:12.3f}{ratio:11.2f}{megabytes:20.2f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
