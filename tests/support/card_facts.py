"""Facts of invented runs, as `DPTrainer.privacy_record` reports them, and folders with a saved model and its card."""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_private.publishing.card import write_card

SETTINGS = {
    "target_epsilon": None,
    "target_delta": 1e-5,
    "noise_multiplier": 4.0,
    "clip_norm": 1.0,
    "clipping": "flat",
    "expected_batch_size": 500,
    "records_per_unit": 1,
    "accountant": "prv",
    "carriers": None,
    "anchors": None,
    "noise": "secure",
    "log_nonprivate": False,
    "micro_batch_tokens": None,
    "disjoint_data": False,
}


def event(sigma: float = 4.0, steps: int = 10, q: float = 0.1, releases: int = 1) -> dict[str, Any]:
    """One row of the ledger; with several releases, each has more noise, so that together they amount to `sigma`."""
    return {"sample_rate": q, "releases": [sigma * releases**0.5] * releases, "steps": steps, "sampling": "poisson"}


def facts(events: list[dict] | None = None, run: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Facts of a short run, whose epsilon is 0.309 at delta 1e-5 unless something is changed."""
    settings = {**copy.deepcopy(SETTINGS), **settings}
    run = {**settings, "num_records": 5000, "sample_rate": 0.1, "reproducible": False, **(run or {})}
    return {
        "ledger": {"events": events or [event()], "head": "ab" * 32, "length": 11},
        "runs": [run],
        "settings": settings,
        "optimizer": "adamw_torch",
        "base_model": "FacebookAI/roberta-base",
        "dataset": {"name": "nyu-mll/glue", "num_records": 5000},
        "evaluation": {"covered": False, "used": True, "chooses_model": False},
        "versions": {"hf_private": "0.1.0", "torch": "2.13.0", "transformers": "5.22.2"},
    }


def saved_model(folder: Path, given: dict[str, Any] | None = None) -> Path:
    """A folder with weights, a config and the card of `given`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.arange(6.0)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "bert"}\n')
    write_card(folder, given or facts())
    return folder
