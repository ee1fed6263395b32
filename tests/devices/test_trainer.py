"""DPTrainer on an emulated accelerator against the CPU, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FLOAT32, BF16 = "float32", "bf16, gradient checkpointing"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("devices")
    command = [sys.executable, "-m", "tests.support.devices.run", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "found.pt")


def test_a_run_and_its_resumption_are_those_of_the_cpu_to_the_last_bit(found):
    here, there = found[FLOAT32, "cpu"], found[FLOAT32, "emu"]
    assert (here["device"], there["device"]) == ("cpu", "emu")
    assert torch.equal(here["first"], there["first"]) and torch.equal(here["weights"], there["weights"])
    assert not torch.equal(here["first"], here["weights"])
    for name in ("eval_loss", "charged", "files"):
        assert here[name] == there[name]
    assert there["charged"] == 4 and {"README.md", "privacy.json", "model.safetensors"} <= {*there["files"]}


def test_autocast_and_gradient_checkpointing_run_there(found):
    here, there = found[BF16, "cpu"], found[BF16, "emu"]
    torch.testing.assert_close(here["weights"], there["weights"], rtol=0, atol=1e-4)
    assert not torch.equal(there["weights"], found[FLOAT32, "emu"]["weights"])


@pytest.mark.parametrize("case", [FLOAT32, BF16])
def test_no_stage_mixes_devices(found, case):
    for counts in found[case, "emu"]["counts"].values():
        assert not counts["mixed"]


@pytest.mark.parametrize("case", [FLOAT32, BF16])
def test_a_step_waits_where_the_model_and_trainer_do_and_once_more(found, case):
    counts = found[case, "emu"]["counts"]["step"]
    own = {name: count for name, count in counts["syncs"].items() if not _of_others(name)}
    # whether anything else has written to the weights before the step, or to the gradients after the noise
    assert sum(own.values()) == 1 and all("fingerprints.py" in name for name in own), own
    assert not counts["copied_to_host"] and not counts["copied_to_device"]
    large = {name for name, size in counts["largest"].items() if size > 1000}
    assert all("mechanism/noise" in name for name in large), large


def _of_others(place: str) -> bool:
    """Whether the line calls the forward pass of the model or the loop of Trainer."""
    return _line(place).strip() in (
        "outputs = model(**inputs, **self._options)",
        "output = super().train(resume_from_checkpoint, None, ignore_keys_for_eval)",
    )


def _line(place: str) -> str:
    path, number = place.split(":")
    return (ROOT / path).read_text().splitlines()[int(number) - 1]
