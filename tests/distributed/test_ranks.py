"""One, two and three ranks: the same update, noise once, one ledger, and errors that reach everybody.

The cases run in tests/distributed/worker.py, all of them in one launch for each number of ranks; this compares them.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from scipy import stats
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_private.distributed import ranks as ranks_module
from hf_private.distributed.fsdp import Shards
from hf_private.distributed.ranks import Ranks, _buckets, fingerprint
from hf_private.trainer.guards import check_ranks
from hf_private.trainer.refusals import refusals
from tests.support.launched import CPU2, WORLDS

SIGMA, CLIP = 1.5, 0.25
METHODS = ["bk", "bk-adam", "bk-llama", "lora", "rgp", "history", "lsg", "gep"]
SHARDED = [name for name in METHODS if name != "gep"]


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


def test_replicas_of_shards_get_the_same_update(results: dict) -> None:
    for rank in results[2]:
        assert_same_update(rank["fsdp"]["replicated"], results[1][0]["engine"]["bk"])


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
        ("gep sharded", "ValueError: `method`.*Anchors", None),
        ("no dummy", "ValueError: `dummy` must be given", None),
        ("wrapped", "ValueError: .*DistributedDataParallel.*\\.module", None),
        ("uncovered", "UncoveredError: `table`", None),
        ("begin_step", "RuntimeError: the second rank is unwell", "RankError: Rank 1 failed"),
        ("key", "ValueError: `key` must be the same on all ranks", None),
        ("half", "ValueError: `bert.*` must be spread over all [23] ranks, got a mesh of 1", None),
        ("replica", "RankError: `classifier.bias` must be the same on all ranks.*1 of", None),
    ],
)
def test_errors_reach_every_rank(results: dict, world: int, case: str, own: str, others: str | None) -> None:
    for rank, found in enumerate(results[world]):
        expected = own if others is None or rank == 1 else others
        assert found["errors"][case] is not None
        assert re.search(expected, found["errors"][case], re.DOTALL), found["errors"][case]


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_that_fails_in_shards_ends_the_others_and_nothing_is_released(
    results: dict, launch_folder: Path, world: int
) -> None:
    for rank in range(world):
        found = torch.load(launch_folder / f"died-{world}-{rank}.pt")
        assert found["error"] is not None and not found["released"]
        assert found["error"].startswith("MemoryError") == (rank == 1)


# ---- without a launch


def test_alone_nothing_is_collective() -> None:
    ranks = Ranks()
    sums = {"w": torch.ones(2)}
    ranks.all_reduce_(sums)
    ranks.check_weights({"w": torch.ones(2)})
    assert ranks.run_on_first(lambda: 3) == 3 and ranks.any(True) and not ranks.any(False)
    assert torch.equal(sums["w"], torch.ones(2)) and ranks.reduced_bytes == 0
    with pytest.raises(KeyError):
        ranks.run_on_all({}.__getitem__, "missing")


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


def test_ranks_that_the_trainer_does_not_know_of_are_refused(tmp_path: Path) -> None:
    """Each would take the whole draw, and a record would count as often as there are ranks."""
    ranks = Ranks.alone()
    ranks.world_size = 2
    with pytest.raises(ValueError, match="`world_size`.*got 1.* 2 "):
        check_ranks(ranks, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))


def test_wrapped_models_are_refused() -> None:
    with pytest.raises(ValueError, match="`.*`.*DataParallel"):
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
