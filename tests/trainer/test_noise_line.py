"""The line about noise and signal at the start of `train()`."""

import math
from pathlib import Path
from typing import Any

import pytest

from hf_private.trainer import setup as module
from tests.support import training


def said(folder: Path, monkeypatch: pytest.MonkeyPatch, **dp: Any) -> dict[str, list[str]]:
    """What a run of one step says about its noise, by level."""
    found: dict[str, list[str]] = {"info": [], "warning": []}
    for level, lines in found.items():
        monkeypatch.setattr(module.logger, level, lambda text, lines=lines: lines.append(str(text)))
    made = training.trainer(folder, dp=dp, max_steps=1)
    made.train()
    noised = sum(p.numel() for p in made.model.parameters() if p.requires_grad)
    found["expected"] = [f"{dp['noise_multiplier'] * math.sqrt(noised) / dp['expected_batch_size']:.2f} on {noised:,}"]
    return {name: [line for line in lines if "expected" in name or "signal" in line] for name, lines in found.items()}


@pytest.mark.parametrize(("noise", "level"), [(0.5, "info"), (50.0, "warning")])
def test_one_line_with_the_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: float, level: str) -> None:
    found = said(tmp_path, monkeypatch, noise_multiplier=noise, expected_batch_size=16)
    other = {"info": "warning", "warning": "info"}[level]
    assert len(found[level]) == 1 and not found[other]
    assert f"Noise to signal: {found['expected'][0]} numbers" in found[level][0]


def test_the_twin_has_no_noise_to_speak_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = said(tmp_path, monkeypatch, noise_multiplier=0, expected_batch_size=16, clip_norm=math.inf)
    assert not found["info"] and not found["warning"]
