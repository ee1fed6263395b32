"""DPTrainer on several ranks, plain and under FSDP2: the same weights, checkpoints, errors that reach everybody."""

import json
from pathlib import Path

import pytest
import torch

from tests.support.launched import BOUND, STEPS, WORLDS

# ---- the same update


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["bk", "rgp", "lsg", "gep", "history", "average", "units", "units-records"])
def test_the_trainer_gives_the_same_weights(results: dict, name: str, world: int) -> None:
    wanted = results[1][0]["trainer"][name]["weights"]
    for rank in results[world]:
        found = rank["trainer"][name]
        assert (found["weights"] - wanted).norm() <= 1e-5 * wanted.norm()
        assert found["steps"] == found["global_step"] == STEPS


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["bk", "rgp", "units"])
def test_the_trainer_takes_a_model_that_transformers_has_sharded(results: dict, name: str, world: int) -> None:
    """FSDP2 by `from_pretrained(distributed_config=...)`, and the model that is saved is a plain one."""
    wanted = results[1][0]["trainer"][name]["weights"]
    for rank in results[world]:
        found = rank["trainer"][f"fsdp-{name}"]
        assert (found["weights"] - wanted).norm() <= 1e-5 * wanted.norm()
        assert (found["saved"] - wanted).norm() <= 1e-5 * wanted.norm()
        assert found["steps"] == STEPS


# ---- errors reach everybody


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
        assert "`train_dataset` must be the same on all ranks" in found["other split"]
        assert "`train_dataset` (Augmented) must give equal records for equal seeds" in found["own generator"]
        assert found["no checkpoint"].startswith("ValueError" if rank == 0 else "RankError")
        assert "no complete checkpoint" in found["no checkpoint"]
        assert "`seed` must be the same on all ranks, got 42 on rank 0 and 43 on rank 1" in found["other seed"]


@pytest.mark.parametrize("world", WORLDS)
def test_a_self_check_that_fails_on_one_rank_is_an_error_on_all(results: dict, world: int) -> None:
    for rank, found in enumerate(result["trainer"]["self-check"] for result in results[world]):
        assert found.startswith("RuntimeError" if rank == 1 else "RankError: Rank 1 failed")
        assert "the second rank has no batch" in found


@pytest.mark.parametrize("world", WORLDS)
def test_a_card_for_other_weights_is_an_error_on_all(results: dict, world: int) -> None:
    for rank, found in enumerate(result["trainer"]["other weights"] for result in results[world]):
        assert found.startswith("LedgerError" if rank == 0 else "RankError: Rank 0 failed")
        assert "trained elsewhere" in found


# ---- FSDP2: the self-check, and checkpoints in full and in shards


def test_the_self_check_works_on_shards(results: dict) -> None:
    for found in (rank["checked"] for rank in results[2]):
        assert "Self-check passed" in found["report"]
        assert found["coupled"].startswith("SelfCheckError: Records are not independent")
        assert found["wrong"].startswith("SelfCheckError: `classifier.weight`: the sum")
        assert all(found["unharmed"].values()), found["unharmed"]


@pytest.mark.parametrize(("kind", "method"), [("full", "history"), ("sharded", "history"), ("full", "lora")])
def test_two_ranks_of_fsdp2_stop_and_three_go_on(results: dict, kind: str, method: str) -> None:
    """By Accelerate's own code: weights, AdamW's moments, the ledger, and the weights that history begins with."""
    wanted = results[1][0]["trainer"][method]["weights"]
    assert [rank["trainer"][f"{kind}-{method}"]["steps"] for rank in results[2]] == [3, 3]
    for rank in results[3]:
        found = rank["trainer"][f"{kind}-{method}"]
        assert found["checked"] == [True] and found["steps"] == STEPS
        assert (found["weights"] - wanted).norm() <= 1e-5 * wanted.norm()
        assert (found["saved"] - wanted).norm() <= 1e-5 * wanted.norm()


def test_a_checkpoint_of_another_layout_is_refused_on_all_ranks(results: dict) -> None:
    plain, full, shards = "a plain checkpoint", "FSDP2's FULL_STATE_DICT", "FSDP2's SHARDED_STATE_DICT"
    for found in (rank["trainer"]["refused"] for rank in results[2]):
        for case, wanted, got in [
            ("full, plain", plain, full),
            ("sharded, plain", plain, shards),
            ("full, sharded", shards, full),
            ("plain, sharded", shards, plain),
        ]:
            assert f"must be {wanted} for this run, got {got}" in found[case]
        assert "sharded by `distributed_config`" in found["at load"]
        assert "`load_best_model_at_end` cannot be combined" in found["best"]


def test_an_average_of_sharded_weights_is_refused(results: dict) -> None:
    for found in (rank["trainer"]["refused"] for rank in results[2]):
        assert "without WeightAverage under FSDP2" in found["average"]


# ---- Trainer's own ways, on ranks


def test_workers_of_the_data_loader_change_nothing(results: dict) -> None:
    for rank in results[2]:
        assert torch.equal(rank["trainer"]["workers"]["weights"], rank["trainer"]["bk"]["weights"])


def test_ranks_drop_out_by_themselves_and_keep_the_same_weights(results: dict) -> None:
    first, second = (rank["trainer"]["dropout"] for rank in results[2])
    assert torch.equal(first["weights"], second["weights"]) and not torch.equal(first["random"], second["random"])


def test_the_best_model_is_loaded_and_saved_and_its_card_trusts_the_ranks(results: dict) -> None:
    first, second = (rank["trainer"]["best"] for rank in results[2])
    assert torch.equal(first["weights"], second["weights"])
    assert torch.equal(first["saved"], first["weights"]) and torch.equal(first["best"], first["weights"])
    assert "trained on several ranks: all of them, and the network between them, are trusted" in first["card"]


# ---- interrupted and resumed


def test_a_run_resumes_on_another_number_of_ranks(results: dict) -> None:
    wanted = results[1][0]["trainer"]["bk"]["weights"]
    assert results[2][0]["trainer"]["stopped"]["steps"] == 3
    for rank in results[3]:
        found = rank["trainer"]["resumed"]
        assert found["steps"] == found["global_step"] == STEPS
        assert (found["weights"] - wanted).norm() <= 1e-5 * wanted.norm()


def test_a_killed_rank_ends_the_job_and_the_step_is_charged(results: dict, launch_folder: Path) -> None:
    outcome = json.loads((launch_folder / "killed.json").read_text())
    assert outcome["code"] != 0 and outcome["seconds"] < BOUND
    assert "Signal 9 (SIGKILL)" in outcome["stderr"]
    wanted = results[1][0]["trainer"]["bk"]["weights"]
    for rank in results[3]:  # saved after 2, died in the 4th, and done again from the 3rd on
        assert rank["trainer"]["before"]["steps"] == 4
        found = rank["trainer"]["after kill"]
        assert found["global_step"] == STEPS and found["steps"] == 4 + 3
        assert (found["weights"] - wanted).norm() <= 1e-5 * wanted.norm()
