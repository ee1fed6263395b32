"""What every rank runs: `worker.py FOLDER 1 2 3` forks one rank, then two, then three, and each runs all cases.

Results go to FOLDER/N-RANK.pt, for tests/distributed to compare. Under a launcher rank 1 dies in mid-run.
"""

import os
import signal
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
import torch
import torch.distributed as dist

import tests.conftest  # noqa: F401  the tests' environment, before anything is imported
from hf_private.distributed import ranks as ranks_module
from hf_private.distributed.ranks import Ranks
from tests.support.ranks.engine import METHODS, checked, engine, noise, replicated
from tests.support.ranks.failures import dies_in_shards, errors, kill, trainer_errors
from tests.support.ranks.runs import trainers
from tests.support.ranks.sharding import sharding


def run(folder: Path) -> None:
    """All cases on this rank."""
    ranks = start()
    found: dict[str, Any] = {"world_size": ranks.world_size}
    found["engine"] = {name: engine(name, False, ranks) for name in METHODS}
    found["engine"]["bk-adam"] = engine("bk", False, ranks, adam=True)
    found["noise"] = noise(False, ranks)
    found["key"] = ranks.key().stream("test").words(0, 4)
    if ranks.world_size > 1:
        found["fsdp"] = {name: engine(name, True, ranks) for name in METHODS if name != "gep"}
        found["fsdp"]["bk-adam"] = engine("bk", True, ranks, adam=True)
        found["fsdp noise"] = noise(True, ranks)
        if ranks.world_size == 2:
            found["fsdp"]["replicated"] = engine("bk", True, ranks, mesh=replicated(ranks))
            found["checked"] = checked()
        found["errors"] = errors(ranks)
    found["trainer"] = trainers(folder, ranks)
    if ranks.world_size > 1:
        found["trainer"] |= sharding(folder, ranks) | trainer_errors(folder, ranks)
    torch.save(found, folder / f"{ranks.world_size}-{ranks.rank}.pt")
    if dist.is_initialized():
        dist.barrier()
        dies_in_shards(folder, ranks)


def start() -> Ranks:
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))  # whoever waits longer waits for ever
    ranks_module.CHECK_EVERY = 1
    ranks = Ranks()
    assert ranks.world_size == int(os.environ.get("WORLD_SIZE", 1))
    return ranks


def fork(folder: Path, world: int) -> None:
    """Run all cases on `world` ranks, which share the time of the imports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in range(world):
        if child := os.fork():
            started.append(child)
            continue
        code = 1
        try:
            if world > 1:
                names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
                values = (str(rank), str(rank), str(world), str(world), "127.0.0.1", port)
                os.environ.update(zip(names, values, strict=True))
            run(folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    while started:
        child, status = os.wait()
        started.remove(child)
        if status:
            for other in started:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


if __name__ == "__main__":
    if "RANK" in os.environ:
        kill(Path(sys.argv[1]), start())
    else:
        for number in map(int, sys.argv[2:]):
            fork(Path(sys.argv[1]), number)
