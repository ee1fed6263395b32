"""TRL's own scripts run privately with two changed lines: the import, and the line that makes the trainer."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the extra `trl`")

from hf_private.publishing.verify import verify  # noqa: E402
from tests.support import chats, zoo  # noqa: E402

MODELS = {"sft": ("llama", "chat"), "dpo": ("llama", "pair-chat"), "reward": ("llama", "pair-chat")}


@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        ("sft", "SFTTrainer"),
        pytest.param("dpo", "DPOTrainer", marks=pytest.mark.slow),
        pytest.param("reward", "RewardTrainer", marks=pytest.mark.slow),
    ],
)
def test_a_script_of_trl_runs_with_two_changed_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, trainer: str
) -> None:
    spec = find_spec(f"trl.scripts.{name}")
    assert spec is not None and spec.origin is not None
    before = Path(spec.origin).read_text()
    text = before.replace(
        f"    from trl import {trainer}, ",
        f"    from hf_private.integrations.trl import DP{trainer}; from hf_private import DPConfig; from trl import ",
    ).replace(
        f"    trainer = {trainer}(",
        f"    trainer = DP{trainer}(dp_config=DPConfig(noise_multiplier=1.0, expected_batch_size=4),",
    )
    changed = [pair for pair in zip(before.splitlines(), text.splitlines(), strict=True) if pair[0] != pair[1]]
    assert len(changed) == 2

    model, kind = MODELS[name]
    zoo.small(model).save_pretrained(tmp_path / "model")
    chats.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.json").write_text("\n".join(map(json.dumps, chats.made(kind, 40))))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    options: dict[str, Any] = {
        "model_name_or_path": tmp_path / "model",
        "dataset_name": tmp_path / "data",
        "output_dir": tmp_path / "out",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
    }
    words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    exec(compile(text, f"{name}.py", "exec"), {"__name__": "__main__"})
    verdict = verify(tmp_path / "out")
    assert verdict.status == "holds" and verdict.statement is not None
    assert "pair" in verdict.statement["mechanism"]["objective"] or name == "sft"
