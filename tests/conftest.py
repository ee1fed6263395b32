"""Settings that every test shares: no hub, one thread per process, quiet libraries."""

import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs a hub starts its own, in a child process
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.launched import launch_folder, results  # noqa: E402, F401  fixtures, for test_ranks*.py


@pytest.fixture
def quick_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card's accountants take seconds: for tests that save often and look at something else."""

    def write(folder: str, facts: dict) -> None:
        Path(folder, "privacy.json").write_text(json.dumps({"private": True, **facts}))

    monkeypatch.setattr("hf_private.trainer.publishing.write_card", write)
