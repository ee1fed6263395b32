"""Run by tests/devices for each of two ranks: two steps on the CPU and on the emulated device, joined by gloo."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hf_private.distributed.ranks import Ranks
from hf_private.gradients.bookkeeper import trainable
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from tests.support.devices import emulated, engine


def gradients(device: str) -> tuple[Tensor, emulated.Counts]:
    """What the second of two steps leaves in `.grad`: the first rank has one micro-batch, the other two."""
    model, loss, method, parts = engine.prepared("BK", device)
    ranks = Ranks()
    mechanism = Mechanism(
        model,
        loss,
        method=method,
        clipping=Clipping(clip_norm=0.5),
        noise=NoiseSource("secure", engine.KEY),
        noise_multiplier=1.0,
        sample_rate=0.1,
        expected_batch_size=8.0,
        charge=lambda event: None,
        ranks=ranks,
    )
    for _ in range(2):
        with emulated.counted() as counts:
            mechanism.step(parts[:1] if ranks.rank == 0 else parts[1:])
    return torch.cat([p.grad.flatten().to("cpu") for p in trainable(model).values()]), counts


def main(folder: str, rank: str) -> None:
    """Write what this rank gets on both devices."""
    library = emulated.register()
    os.environ |= {"RANK": rank, "WORLD_SIZE": "2"}
    dist.init_process_group("cpu:gloo,emu:gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
    there, counts = gradients("emu")
    found = {"cpu": gradients("cpu")[0], "emu": there, "mixed": dict(counts.mixed), "syncs": dict(counts.syncs)}
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.barrier()
    del library
    emulated.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
