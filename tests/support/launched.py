"""Ranks are launched once for all tests: what the workers in distributed/ found, for test_ranks*.py to judge."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "ranks" / "worker.py"
CPU2 = ROOT / "recipes" / "accelerate" / "cpu2.yaml"
BOUND = 400  # seconds, for a machine that is busy with other tests
STEPS = 5
WORLDS = [2, 3]


def environment() -> dict[str, str]:
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    rest = {key: value for key, value in os.environ.items() if key not in ours}
    return rest | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def kill(folder: Path) -> None:
    """Two ranks under `accelerate launch` with our YAML, one of which kills itself; what came of it, and how long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CPU2)]
    command = [*launch, "--main_process_port", str(port), str(WORKER), str(folder)]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=BOUND)
    outcome = {"code": done.returncode, "stderr": done.stderr, "seconds": time.perf_counter() - start}
    (folder / "killed.json").write_text(json.dumps(outcome))


def run(folder: Path) -> None:
    command = [sys.executable, str(WORKER), str(folder), "1", "2", "3"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=2 * BOUND)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="session")
def launch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all that was launched left its results; of several test processes the first one launches."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "many-ranks"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "killed.json").is_file():
            kill(folder)
            run(folder)
    return folder


@pytest.fixture(scope="session")
def results(launch_folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What every rank found, by the number of ranks; three ranks resume what two have left behind."""
    found = {
        world: [torch.load(launch_folder / f"{world}-{rank}.pt") for rank in range(world)] for world in (1, *WORLDS)
    }
    assert all(rank["world_size"] == world for world, ranks in found.items() for rank in ranks)
    return found
