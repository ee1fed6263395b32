"""Two machines, emulated: each a network namespace of Linux with its own address and, if asked, its own disk.

    make test-machines        # needs root, iproute2 (`ip`) and util-linux (`unshare`)
    python recipes/machines.py --only ddp dies

A cable (a veth pair) joins the machines. Their ranks meet over it by `torchrun` or `accelerate launch`, and train over
gloo. Every run trains the same five steps as a single process does, so its weights must be those. Results go to
recipes/results/machines.{md,json}; the command fails if one of them is not what recipes/README.md promises.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from tests.support import training, zoo

RESULTS = Path(__file__).parent / "results"
WORKER = Path(__file__).parents[1] / "tests" / "support" / "ranks" / "machine.py"
NAMES = ("hfp-one", "hfp-two")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = "29555"
STEPS = 5
BOUND = 600  # seconds for a run
SOON = 180  # seconds in which a run must notice that its other half is gone; `ddp_timeout` is 60

Found = list[dict[str, Any]]  # what each rank found


class Outcome(NamedTuple):
    """What is left of a run on both machines."""

    codes: list[int]  # of the launchers
    seconds: float
    said: list[str]
    found: list[dict[str, Any] | None]  # None: the rank left nothing
    charged: int  # steps, by the ledger of the first machine


class Case(NamedTuple):
    """A run on both machines: what it shows, and whether it does."""

    shows: str
    passes: Callable[[Outcome, torch.Tensor], bool]
    disk: str = "shared"  # or "own"
    launcher: str = "torchrun"
    after: str = ""  # the case whose output this one continues


# ---- what a run must show


def same(outcome: Outcome, wanted: torch.Tensor) -> bool:
    """Both ranks took all steps and have the weights of a single process."""
    return outcome.codes == [0, 0] and all(
        found is not None
        and found["steps"] == STEPS
        and bool((found["weights"] - wanted).norm() <= 1e-5 * wanted.norm())
        for found in outcome.found
    )


def same_and_one_ledger(outcome: Outcome, wanted: torch.Tensor) -> bool:
    """The same, and only the first machine has a ledger."""
    return same(outcome, wanted) and [found and found["ledger"] for found in outcome.found] == [True, False]


def ended(outcome: Outcome, wanted: torch.Tensor) -> bool:
    """Both launchers ended soon with an error, and the step that was interrupted is charged."""
    return 0 not in outcome.codes and outcome.charged == 4 and outcome.seconds < SOON


def refused(outcome: Outcome, wanted: torch.Tensor) -> bool:
    """Both launchers ended with an error, and both ranks say that there is no checkpoint."""
    said = [found and found["error"] or "" for found in outcome.found]
    return 0 not in outcome.codes and all("no complete checkpoint" in text for text in said)


CASES = {
    "ddp": Case("DDP gives the weights of one process", same),
    "accelerate": Case("the same by `accelerate launch`", same, launcher="accelerate"),
    "fsdp": Case("FSDP2 gives the weights of one process", same),
    "ddp-own": Case("each machine has its own disk: only the first has a ledger", same_and_one_ledger, disk="own"),
    "dies": Case("a rank dies: both launchers end, the step is charged", ended),
    "dies-resume": Case("and the run goes on from its checkpoint", same, after="dies"),
    "cut": Case("the cable is cut: both launchers end, the step is charged", ended),
    "own-dies": Case("a rank dies, each machine has its own disk", ended, disk="own"),
    "own-resume": Case("the second machine cannot read the checkpoint: both refuse", refused, "own", after="own-dies"),
    "own-each-dies": Case("a rank dies, with `save_on_each_node`", ended, disk="own"),
    "own-each-resume": Case("the second machine has no weights: both refuse", refused, "own", after="own-each-dies"),
}  # fmt: skip


# ---- two machines


@contextmanager
def machines() -> Iterator[None]:
    """Two network namespaces joined by a veth pair."""
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        connect()
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def connect() -> None:
    """Lay the cable, in place of one that was cut."""
    subprocess.run(["ip", "-n", NAMES[0], "link", "delete", "eth0"], check=False, capture_output=True)
    _ip("link", "add", "eth0", "netns", NAMES[0], "type", "veth", "peer", "name", "eth0", "netns", NAMES[1])
    for name, address in zip(NAMES, ADDRESSES, strict=True):
        _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def start(machine: int, case: str, folder: Path, log: Path) -> subprocess.Popen:
    """Start the launcher of one machine."""
    chosen = CASES[case]
    output = folder / "output"
    disk = folder / (chosen.after or case) / (str(machine) if chosen.disk == "own" else "both")
    disk.mkdir(parents=True, exist_ok=True)
    output.mkdir(exist_ok=True)
    torchrun = [
        "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(machine), "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}",
    ]  # fmt: skip
    accelerate = [
        "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "2", "--num_processes", "2",
        "--machine_rank", str(machine), "--main_process_ip", ADDRESSES[0], "--main_process_port", PORT,
    ]  # fmt: skip
    launcher = torchrun if chosen.launcher == "torchrun" else accelerate
    run = [sys.executable, *launcher, str(WORKER), case, str(output), str(folder)]
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for a, n in zip(ADDRESSES, NAMES, strict=True)))
    # A name, names of others and a disk of its own: the same path is another folder on each machine, unless shared.
    setup = 'hostname "$0" && mount --bind "$1" /etc/hosts && mount --bind "$2" "$3" && shift 3 && exec "$@"'
    own = ["unshare", "--mount", "--uts", "sh", "-c", setup, NAMES[machine], str(hosts), str(disk), str(output)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = ["ip", "netns", "exec", NAMES[machine], *own, *run]
    return subprocess.Popen(command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT)


def run(case: str, folder: Path) -> Outcome:
    """Run a case on both machines to its end."""
    logs = [folder / f"{case}-{machine}.log" for machine in range(2)]
    began = time.perf_counter()
    started = [start(machine, case, folder, log) for machine, log in enumerate(logs)]
    try:
        codes = [process.wait(timeout=BOUND) for process in started]
    except subprocess.TimeoutExpired:
        codes = [0, 0]  # it hangs, which no case may
        for process in started:
            process.kill()
    seconds = time.perf_counter() - began
    files = [folder / f"{case}-{rank}.pt" for rank in range(2)]
    found = [torch.load(file) if file.is_file() else None for file in files]
    chosen = CASES[case]
    first = folder / (chosen.after or case) / ("0" if chosen.disk == "own" else "both")
    charged = training.steps(first) if (first / "_dp").is_dir() else 0
    return Outcome(codes, seconds, [log.read_text() for log in logs], found, charged)


# ---- results


def single(folder: Path) -> torch.Tensor:
    """The weights after the same steps in one process."""
    command = [sys.executable, str(WORKER), "single", str(folder / "single"), str(folder)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    return torch.load(folder / "single-0.pt")["weights"]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "Two network namespaces joined by a veth pair, one rank on each, gloo. Every run has the five steps of a",
        "single process; a rank gives up one that does not answer after 60 s (`ddp_timeout`).",
        "",
        "| disk | launcher | what it shows | as promised | seconds | steps charged |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['disk']} | {row['launcher']} | {row['shows']} | {'yes' if row['passed'] else '**no**'}"
        f" | {row['seconds']:.0f} | {row['charged']} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--output", default="machines", help="name of the results")
    own = parser.parse_args()
    if os.geteuid() or not all(shutil.which(tool) for tool in ("ip", "unshare")):
        parser.error("network namespaces need root, and `ip` (Debian: iproute2) and `unshare` (util-linux)")
    rows = []
    with TemporaryDirectory() as name, machines():
        folder = Path(name)
        zoo.small("bert").save_pretrained(folder / "base")
        wanted = single(folder)
        for case in own.only:
            chosen = CASES[case]
            outcome = run(case, folder)
            passed = chosen.passes(outcome, wanted)
            rows.append(
                {"case": case, "shows": chosen.shows, "disk": chosen.disk, "launcher": chosen.launcher}
                | {"passed": passed, "seconds": outcome.seconds, "charged": outcome.charged}
            )
            print(f"{case}: {'as promised' if passed else 'NOT as promised'}, {outcome.seconds:.0f} s", flush=True)
            if not passed:
                print(outcome.codes, outcome.charged, [found and found["error"] for found in outcome.found])
                print("\n".join(text[-3000:] for text in outcome.said))
            connect()
    text = f"`{' '.join(['python', 'recipes/machines.py'])}`\n\n{table(rows)}\n"
    (RESULTS / f"{own.output}.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / f"{own.output}.md").write_text(text)
    print(text)
    if not all(row["passed"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
