"""Steps on an emulated accelerator against the CPU, in a process of their own."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.devices.engine import NOISES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("devices") / "found.pt"
    command = [sys.executable, "-m", "tests.support.devices.engine", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(path)


@pytest.mark.parametrize(("case", "noise"), [(case, noise) for case, noises in NOISES.items() for noise in noises])
def test_a_step_on_a_device_is_that_of_the_cpu_to_the_last_bit(found, case, noise):
    result = found[case, noise]
    for here, there in zip(result["cpu"], result["emu"], strict=True):
        assert torch.equal(there, here) and here.isfinite().all()
    assert not torch.equal(result["cpu"][0], result["cpu"][1])
    assert not result["mixed"] and not result["copied_to_host"] and not result["copied_to_device"]


# What a step may add: a pass of the model over public records, whether GEP's basis is orthonormal, an SVD.
ALLOWED = {"GEP": 2, "B-GEP": 2, "RGP, public": 1, "RGP, momentum": 1}


@pytest.mark.parametrize(("case", "noise"), [(case, noise) for case, noises in NOISES.items() for noise in noises])
def test_a_step_waits_for_the_device_only_where_the_model_itself_does(found, case, noise):
    added = Counter(found[case, noise]["syncs"]) - Counter(found[case, noise]["own_syncs"])
    assert added.total() <= ALLOWED.get(case, 0), added


@pytest.mark.parametrize(("case", "noise"), [(case, noise) for case, noises in NOISES.items() for noise in noises])
def test_nothing_of_the_size_of_the_model_is_copied_but_noise(found, case, noise):
    large = {line for line, size in found[case, noise]["largest"].items() if size > 100}
    assert all(line.startswith("hf_private/mechanism/noise.py:") for line in large), large
