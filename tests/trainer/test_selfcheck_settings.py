"""The self-check knows how clipping scales a gradient."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import training


@pytest.mark.parametrize("gamma", [0.01, 1e-6, 0.0])
def test_the_floor_follows_gamma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gamma: float) -> None:
    """Automatic clipping with a small gamma scales tiny gradients up, and with them what couples records."""
    seen: list[tuple[Any, ...]] = []

    def watch(*args: Any) -> str:
        seen.append(args[4:6])
        return "checked"

    monkeypatch.setattr("hf_private.trainer.setup.self_check", watch)
    training.trainer(tmp_path, dp={"clipping": "automatic", "gamma": gamma, "clip_norm": 0.5}, max_steps=1).train()
    assert seen == [(0.5, gamma)]


@pytest.mark.parametrize(
    ("clipping", "group"),
    [("flat", ""), ("automatic", ""), ("automatic-per-layer", "bert.layer.0.query"), ("per-block", "bert.layer.0")],
)
def test_the_groups_follow_clipping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clipping: str, group: str
) -> None:
    """A layer that is scaled by its own norm is compared by its own norm."""
    seen: list[str] = []

    def watch(*args: Any) -> str:
        seen.append(args[6]("bert.layer.0.query.weight"))
        return "checked"

    monkeypatch.setattr("hf_private.trainer.setup.self_check", watch)
    training.trainer(tmp_path, dp={"clipping": clipping}, max_steps=1).train()
    assert seen == [group]
