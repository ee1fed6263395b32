"""Two ranks on emulated accelerators against two on the CPU, in processes of their own."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.support.devices.two_ranks", str(folder)]
    ranks = [subprocess.Popen([*command, rank], cwd=ROOT, stderr=subprocess.PIPE, text=True) for rank in "01"]
    errors = [rank.communicate(timeout=400)[1] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), errors
    return [torch.load(folder / f"{rank}.pt") for rank in "01"]


def test_two_ranks_get_the_gradient_of_two_on_the_cpu(found):
    first, second = found
    assert torch.equal(first["emu"], second["emu"]) and first["emu"].isfinite().all()
    assert torch.equal(first["emu"], first["cpu"])


def test_ranks_wait_for_the_device_only_where_the_model_does(found):
    for rank, micro_batches in zip(found, (1, 2), strict=True):
        assert not rank["mixed"]
        assert Counter(rank["syncs"]).total() == micro_batches
