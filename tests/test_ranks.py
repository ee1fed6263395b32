"""One, two and three ranks: the same update, noise once, one ledger, and errors that reach everybody.

The cases run in tests/distributed/worker.py, all of them in one launch for each number of ranks; this compares them.
"""

import fcntl
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from scipy import stats
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_private import ranks as ranks_module
from hf_private.config import refusals
from hf_private.ranks import Ranks, _buckets, fingerprint
from hf_private.shards import Shards

ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).parent / "distributed" / "worker.py"
CPU2 = ROOT / "recipes" / "accelerate" / "cpu2.yaml"
BOUND = 400  # seconds, for a machine that is busy with other tests
SIGMA, CLIP, STEPS = 1.5, 0.25, 5
METHODS = ["bk", "bk-adam", "bk-llama", "lora", "rgp", "history", "lsg", "gep"]
SHARDED = [name for name in METHODS if name != "gep"]
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What every rank found, by the number of ranks; three ranks resume what two have left behind."""
    found = {world: [torch.load(folder / f"{world}-{rank}.pt") for rank in range(world)] for world in (1, *WORLDS)}
    assert all(rank["world_size"] == world for world, ranks in found.items() for rank in ranks)
    return found


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])


def assert_same_update(result: dict[str, Any], reference: dict[str, Any]) -> None:
    before, after, got = flat(reference["before"]), flat(reference["after"]), flat(result["after"])
    assert (after - before).norm() > 0.05 * before.norm()  # or there is nothing to compare
    assert (got - after).norm() <= 1e-5 * after.norm()
    assert (got - after).norm() <= 1e-4 * (after - before).norm()


# ---- the same update


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", METHODS)
def test_the_number_of_ranks_changes_the_speed_only(results: dict, name: str, world: int) -> None:
    """Draws in which one rank is empty, and all are, are among the five steps."""
    for rank in results[world]:
        assert_same_update(rank["engine"][name], results[1][0]["engine"][name])
        assert torch.equal(flat(rank["engine"][name]["after"]), flat(results[world][0]["engine"][name]["after"]))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", SHARDED)
def test_shards_change_the_memory_only(results: dict, name: str, world: int) -> None:
    for rank in results[world]:
        assert_same_update(rank["fsdp"][name], results[1][0]["engine"][name])
    whole = results[1][0]["engine"][name]["drawn"]
    drawn = [rank["fsdp"][name]["drawn"] for rank in results[world]]
    if name in ("bk", "lora"):  # each element's noise is drawn on one rank
        assert sum(drawn) == whole and max(drawn) < whole


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["bk", "rgp", "lsg", "gep"])
def test_the_trainer_gives_the_same_weights(results: dict, name: str, world: int) -> None:
    wanted = results[1][0]["trainer"][name]["weights"]
    for rank in results[world]:
        found = rank["trainer"][name]
        assert (found["weights"] - wanted).norm() <= 1e-5 * wanted.norm()
        assert found["steps"] == found["global_step"] == STEPS


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["bk", "rgp"])
def test_the_trainer_takes_a_model_that_transformers_has_sharded(results: dict, name: str, world: int) -> None:
    """FSDP2 by `from_pretrained(distributed_config=...)`, and the model that is saved is a plain one."""
    wanted = results[1][0]["trainer"][name]["weights"]
    for rank in results[world]:
        found = rank["trainer"][f"fsdp-{name}"]
        assert (found["weights"] - wanted).norm() <= 1e-5 * wanted.norm()
        assert (found["saved"] - wanted).norm() <= 1e-5 * wanted.norm()
        assert found["steps"] == STEPS


def test_different_updates_would_be_noticed(results: dict) -> None:
    """The control: another method's weights are far away."""
    reference = results[1][0]["engine"]
    with pytest.raises(AssertionError):
        assert_same_update(reference["rgp"], reference["lsg"])


# ---- noise, once


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["noise", "fsdp noise"])
def test_the_summed_noise_has_the_scale_that_is_accounted(results: dict, kind: str, world: int) -> None:
    noise = results[world][0][kind].double() / (SIGMA * CLIP)
    assert all(torch.equal(rank[kind], results[world][0][kind]) for rank in results[world])
    assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-4
    for wrong in (math.sqrt(world), 1 / math.sqrt(world), world, 0.9, 1.1):  # from each rank, averaged, ...
        assert stats.kstest(noise.numpy() * wrong, "norm").pvalue < 1e-6
    assert len(noise.unique()) > 0.99 * len(noise)  # shards do not repeat each other's


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_share_secret_keys(results: dict, world: int) -> None:
    keys = [rank["key"] for rank in results[world]]
    assert all(torch.equal(key, keys[0]) for key in keys)
    assert not any(torch.equal(keys[0], rank["key"]) for other in {1, 2, 3} - {world} for rank in results[other])


# ---- what travels


def test_carriers_reduce_what_is_thin(results: dict) -> None:
    """RGP: r (p + d) numbers for each target instead of p d."""
    before = results[1][0]["engine"]["rgp"]["before"]
    targets = {name: p for name, p in before.items() if "layer" in name and p.dim() == 2}
    others = sum(p.numel() for name, p in before.items() if name not in targets)
    thin = sum(2 * (p.shape[0] + p.shape[1]) for p in targets.values())
    for world in WORLDS:
        engine = results[world][0]["engine"]
        assert engine["bk"]["bytes"] == 4 * sum(p.numel() for p in before.values())
        assert engine["rgp"]["bytes"] == 4 * (others + thin)
        assert engine["lsg"]["bytes"] < engine["rgp"]["bytes"]
    assert results[1][0]["engine"]["bk"]["bytes"] == 0


# ---- errors reach everybody


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("case", "own", "others"),
    [
        ("agree", "RuntimeError: the second rank is unwell", "RankError: Rank 1 failed.*second rank is unwell"),
        ("same", "ValueError: `answer` must be the same.*41 on rank 1", None),
        ("weights", "RankError: `classifier.bias` must be the same on all ranks.*1 of", None),
        ("micro-batch", "Error", "RankError: Rank 1 failed"),
        ("tensor parallel", "ValueError: `classifier.weight`.*Tensor parallelism", None),
        ("gep sharded", "ValueError: `method` must work on sharded weights.*Anchors", None),
        ("no dummy", "ValueError: `dummy` must be given", None),
        ("wrapped", "ValueError: .*DistributedDataParallel.*\\.module", None),
        ("uncovered", "UncoveredError: `table`.*all ranks' records", None),
    ],
)
def test_errors_reach_every_rank(results: dict, world: int, case: str, own: str, others: str | None) -> None:
    for rank, found in enumerate(results[world]):
        expected = own if others is None or rank == 1 else others
        assert found["errors"][case] is not None
        assert re.search(expected, found["errors"][case], re.DOTALL), found["errors"][case]


@pytest.mark.parametrize("world", WORLDS)
def test_a_ledger_that_cannot_be_written_stops_all_ranks_before_the_step(results: dict, world: int) -> None:
    found = [rank["trainer"]["ledger"] for rank in results[world]]
    assert found[0]["error"].startswith("LedgerError")
    assert all("RankError" in other["error"] and "the disk is full" in other["error"] for other in found[1:])
    for rank in found:
        assert rank["charges"] == 3 and rank["global_step"] == 2 and not rank["moved"]
    assert [rank["writes"] for rank in found] == [True] + [False] * (world - 1)


@pytest.mark.parametrize("world", WORLDS)
def test_the_budget_stops_all_ranks_at_the_same_step(results: dict, world: int) -> None:
    for rank, found in enumerate(result["trainer"]["budget"] for result in results[world]):
        assert 0 < found["epsilon"] <= 3.0
        assert found["stopped_at"] == 2
        assert found["refused"].startswith("BudgetExceeded" if rank == 0 else "RankError: Rank 0 failed")
        assert found["steps"] == STEPS + 2


@pytest.mark.parametrize("world", WORLDS)
def test_other_data_or_no_checkpoint_is_an_error_on_all(results: dict, world: int) -> None:
    for rank, found in enumerate(result["trainer"] for result in results[world]):
        assert "`train_dataset` must be the same on all ranks" in found["other data"]
        assert found["no checkpoint"].startswith("ValueError" if rank == 0 else "RankError")
        assert "no complete checkpoint" in found["no checkpoint"]


# ---- interrupted and resumed


def test_a_run_resumes_on_another_number_of_ranks(results: dict) -> None:
    wanted = results[1][0]["trainer"]["bk"]["weights"]
    assert results[2][0]["trainer"]["stopped"]["steps"] == 3
    for rank in results[3]:
        found = rank["trainer"]["resumed"]
        assert found["steps"] == found["global_step"] == STEPS
        assert (found["weights"] - wanted).norm() <= 1e-5 * wanted.norm()


def test_a_killed_rank_ends_the_job_and_the_step_is_charged(results: dict, folder: Path) -> None:
    outcome = json.loads((folder / "killed.json").read_text())
    assert outcome["code"] != 0 and outcome["seconds"] < BOUND
    assert "Signal 9 (SIGKILL)" in outcome["stderr"]
    wanted = results[1][0]["trainer"]["bk"]["weights"]
    for rank in results[3]:  # saved after 2, died in the 4th, and done again from the 3rd on
        assert rank["trainer"]["before"]["steps"] == 4
        found = rank["trainer"]["after kill"]
        assert found["global_step"] == STEPS and found["steps"] == 4 + 3
        assert (found["weights"] - wanted).norm() <= 1e-5 * wanted.norm()


# ---- without a launch


def test_alone_nothing_is_collective() -> None:
    ranks = Ranks()
    sums = {"w": torch.ones(2)}
    ranks.add_up(sums)
    ranks.check_weights({"w": torch.ones(2)})
    assert ranks.first(lambda: 3) == 3 and ranks.any(True) and not ranks.any(False)
    assert torch.equal(sums["w"], torch.ones(2)) and ranks.reduced_bytes == 0
    with pytest.raises(KeyError):
        ranks.agree({}.__getitem__, "missing")


def test_buckets_hold_neighbours_of_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "BUCKET", 10)
    blocks = [torch.zeros(size, dtype=dtype) for size, dtype in [(4, torch.float32), (4, torch.float32)] * 2]
    blocks += [torch.zeros(30), torch.zeros(2, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    assert [[block.numel() for block in bucket] for bucket in _buckets(blocks)] == [[4, 4], [4, 4], [30], [2, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_fingerprint_sees_one_bit_and_an_exchange(dtype: torch.dtype) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = x.clone()
    y[7] = torch.nextafter(x[7].float(), torch.tensor(9.0)).to(dtype) if dtype != torch.bfloat16 else x[7] * 1.01
    z = y.clone()
    z[8] = x[8] - (y[7] - x[7])
    assert torch.equal(fingerprint(x), fingerprint(x.clone()))
    assert not torch.equal(fingerprint(x), fingerprint(y)) and not torch.equal(fingerprint(x), fingerprint(z))


def test_wrapped_models_are_refused() -> None:
    with pytest.raises(ValueError, match="DataParallel"):
        Shards(nn.DataParallel(nn.Linear(2, 2)), Ranks())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"deepspeed": {"train_batch_size": 1}}, "owns backward"),
        ({"fsdp": "full_shard", "fsdp_config": {"version": 1}}, "FSDP1 flattens"),
    ],
)
def test_other_ways_to_spread_a_model_are_refused(tmp_path: Path, settings: dict, reason: str) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    for name, value in settings.items():
        setattr(args, name, value)
    assert any(reason in line for line in refusals(args))


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "owns backward"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "FSDP1 flattens"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP1 flattens"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, None),
    ],
)
def test_what_a_launcher_sets_up_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], refused: str | None
) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = " ".join(refusals(args))
    assert refused in found if refused else not found


@pytest.mark.parametrize("name", ["cpu2", "ddp", "ddp_bf16", "fsdp2"])
def test_launch_settings_can_be_read(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = CPU2.with_name(f"{name}.yaml")
    config = load_config_from_file(str(path))
    assert config.num_processes == 2
    kind = yaml.safe_load(path.read_text())["distributed_type"]
    assert kind == ("FSDP" if name == "fsdp2" else "MULTI_GPU")
    assert config.mixed_precision == ("no" if name in ("cpu2", "ddp") else "bf16")
