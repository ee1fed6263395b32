"""`hf-private doctor --device` on an emulated accelerator, in a process of its own, and on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_private.cli.doctor import acceptance
from hf_private.cli.main import main

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_the_acceptance_passes_on_an_emulated_device():
    command = [sys.executable, "-m", "tests.support.devices.doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(done.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert len(checks) == 6 and "emu" in report["environment"]
    assert checks["exactness against a loop"]["passed"] and checks["secure noise"]["passed"]
    assert checks["waits for the device in a step"]["found"] == "plain 2, private 2"


def test_a_wrong_sum_is_found(monkeypatch):
    assert acceptance._exact(CPU).passed
    original = acceptance.BookKeeper.weighted_sum
    monkeypatch.setattr(acceptance.BookKeeper, "weighted_sum", lambda book, c: original(book, c * 1.001))
    assert not acceptance._exact(CPU).passed


@pytest.mark.parametrize("kind", acceptance.NOISE_KINDS)
def test_noise_of_a_wrong_scale_is_found(monkeypatch, kind):
    assert acceptance._noise(CPU, kind).passed
    original = acceptance.NoiseSource.add_
    monkeypatch.setattr(
        acceptance.NoiseSource, "add_", lambda self, step, sums, stds: original(self, step, sums, {"w": 0.98})
    )
    assert not acceptance._noise(CPU, kind).passed


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "some/model", "--device", "cpu"]])
def test_a_model_or_a_device_is_given(arguments, capsys):
    assert pytest.raises(SystemExit, main, arguments).value.code == 2
    assert "--device" in capsys.readouterr().err


def test_an_unknown_device_is_refused(capsys):
    assert pytest.raises(SystemExit, main, ["doctor", "--device", "nothing"]).value.code == 2
    assert "--device" in capsys.readouterr().err
