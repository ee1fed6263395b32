"""The real Trainer and the real huggingface_hub client against a Hub on the loopback interface."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from transformers import Trainer

from hf_private.publishing.release import reason_to_stay
from hf_private.trainer.publishing import PublishingMixin
from tests.support.hub_stub import Commit, HubStub

TOKEN = "hf_" + "t" * 34


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HubStub, dict[str, Any]]]:
    """A hub after four runs that pushed twice while they trained and once at their end, and what they read back."""
    folder = tmp_path_factory.mktemp("hub")
    with HubStub() as hub:
        environment = {
            **{name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(folder / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        child = subprocess.run(
            [sys.executable, "-m", "tests.support.hub_run", folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert child.returncode == 0, child.stderr[-3000:]
        yield hub, json.loads((folder / "results.json").read_text())


@pytest.fixture(params=["full", "lora", "carriers", "gep"])
def pushed(request: pytest.FixtureRequest, runs: tuple) -> tuple[list[Commit], dict[str, Any], str]:
    """The commits of one run, what it read back, and its method."""
    hub, results = runs
    commits = [commit for commit in hub.commits if commit.repo == f"someone/{request.param}"]
    return commits, results[request.param], request.param


@pytest.mark.parametrize("name", ["push_to_hub", "_push_from_checkpoint", "_save"])
def test_overrides_keep_trainers_signatures(name: str) -> None:
    theirs, ours = (inspect.signature(getattr(cls, name)).parameters for cls in (Trainer, PublishingMixin))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_trainer_pushes_nowhere_else() -> None:
    """Where Trainer uploads: both places are overridden."""
    functions = {name: value for name, value in vars(Trainer).items() if inspect.isfunction(value)}
    uploading = {name for name, value in functions.items() if "upload_folder(" in inspect.getsource(value)}
    assert uploading == {"push_to_hub", "_push_from_checkpoint"}
    assert all(name in vars(PublishingMixin) for name in uploading)


def test_what_arrives_can_be_verified(pushed) -> None:
    _, result, method = pushed
    assert result["codes"] == [0, 0, 0], result["findings"]
    weights = "adapter_model.safetensors" if method == "lora" else "model.safetensors"
    config = "adapter_config.json" if method == "lora" else "config.json"
    assert {"README.md", "privacy.json", "privacy_curve.svg", weights, config} <= {*result["names"]}
    assert method != "carriers" or "carrier_config.json" in result["names"]


def test_a_card_of_gep_names_its_public_data(runs) -> None:
    hub, _ = runs
    last = [commit for commit in hub.commits if commit.repo == "someone/gep"][-1]
    anchors = json.loads(last.files["privacy.json"])["settings"]["anchors"]
    card = last.files["README.md"].decode()
    assert anchors["dataset_fingerprint"] and anchors["dataset_fingerprint"] in card
    assert (anchors["dataset_name"] or "not named") in card


def test_periodic_pushes_carry_card_and_record(pushed) -> None:
    commits, result, _ = pushed
    assert [commit.message for commit in commits] == [
        "Training in progress, step 2",
        "Training in progress, step 4",
        "End of training",
    ]
    for steps, commit in zip((2, 4, 4), commits, strict=True):
        record = json.loads(commit.files["privacy.json"])
        assert record["mechanism"]["steps"] == steps
        assert f"epsilon = {record['guarantee']['epsilon']}" in commit.files["README.md"].decode()
    assert result["staged"] == [], "nothing is left over from staging"


def test_nothing_forbidden_is_uploaded(pushed) -> None:
    commits, result, _ = pushed
    names = {name for commit in commits for name in commit.files}
    assert "README.md" in names
    assert [name for name in names if reason_to_stay(name)] == []
    there = {"training_args.bin", "all_results.json", "trainer_state.json", "rng_state.pth", "_dp/ledger.jsonl"}
    assert there <= {*result["kept"]}, "the guard had something to keep back"
    assert not names & there
    for commit in commits:
        card = commit.files["README.md"].decode()
        assert "Training Loss" not in card and "seed" not in card and "train_loss" not in card
        assert "/tmp/" not in card and "/tmp/" not in commit.files["privacy.json"].decode()


def test_nothing_forbidden_is_even_announced(runs) -> None:
    """The client sends the first bytes of every file before it uploads any."""
    hub, _ = runs
    assert "README.md" in hub.seen
    assert [name for name in hub.seen if reason_to_stay(name)] == []
    sent = b"".join([*hub.bodies, *(data for commit in hub.commits for data in commit.files.values())])
    assert TOKEN.encode() not in sent


def test_metadata_is_valid(runs, pushed) -> None:
    commits, _, method = pushed
    assert runs[0].yaml_errors == []
    data = yaml.safe_load(commits[-1].files["README.md"].decode().split("---")[1])
    assert data["differential_privacy"]["private"] is True
    assert "differential-privacy" in data["tags"]
    assert ("lora" in data["tags"]) is (method == "lora")
    words = {"full": "BK", "lora": "LoRA", "carriers": "LSG", "gep": "GEP"}
    assert words[method] in data["differential_privacy"]["method"]
