"""What each rank of recipes/machines.py runs under torchrun: `machine.py CASE OUTPUT RESULTS`.

The output folder is that of a real run. What this rank found goes to RESULTS/CASE-RANK.pt; it is for the test alone.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
import torch
import torch.distributed as dist

import tests.conftest  # noqa: F401  the tests' environment, before anything is imported
from hf_private.trainer.trainer import DPTrainer
from tests.support import training
from tests.support.ranks.engine import failure
from tests.support.ranks.runs import make
from tests.support.ranks.sharding import loaded

SAVES = {"save_strategy": "steps", "save_steps": 2}
TIMEOUT = 60  # seconds until a rank gives up one that does not answer


def made(case: str, folder: Path, results: Path) -> DPTrainer:
    settings: dict[str, Any] = {**SAVES, "ddp_timeout": TIMEOUT}
    if "each" in case:
        settings["save_on_each_node"] = True
    if case.startswith("fsdp"):
        dist.init_process_group("gloo")
        settings |= {"model": loaded(results / "base"), "save_strategy": "no"}
    return make(folder, **settings)


def stop_in_step(trainer: DPTrainer, number: int, action: Any) -> None:
    """Do something in a step, after the ledger was charged and before the sums are added up."""
    method, begun = trainer.create_method(), []
    begin = method.begin_step

    def begin_step(step: int) -> None:
        begin(step)
        begun.append(step)
        if len(begun) == number:
            action()

    method.begin_step = begin_step
    trainer.create_method = lambda: method


def main(case: str, output: str, results: str) -> None:
    torch.set_num_threads(1)
    trainer = made(case, Path(output), Path(results))
    rank = int(os.environ.get("RANK", "0"))
    if "dies" in case and rank == 1:
        stop_in_step(trainer, 4, lambda: os.kill(os.getpid(), signal.SIGKILL))
    if "cut" in case and rank == 1:
        stop_in_step(trainer, 4, lambda: os.system("ip link set dev eth0 down"))
    error = failure(lambda: trainer.train(resume_from_checkpoint="resume" in case or None))
    found = {"error": error, "steps": trainer.state.global_step, "weights": training.weights(trainer.model)}
    found["ledger"] = (Path(output) / "_dp" / "ledger.jsonl").is_file()
    torch.save(found, Path(results, f"{case}-{rank}.pt"))
    if error:
        sys.exit(f"{case}, rank {rank}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
