"""The recipe that follows a plan: it runs the code as it is printed, once, and reports all runs beside the plan."""

import json
from pathlib import Path
from typing import Any

import advice
import pytest

PLANS = [
    {"method": "LoRA", "rank": 4, "usefulness": 0.6, "noise_to_signal": 1.5, "code": "lora"},
    {"method": "head only", "rank": None, "usefulness": 0.3, "noise_to_signal": 0.3, "code": "head"},
]


def test_it_runs_the_recommended_code_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def follow(code: str, folder: Path, options: Any, seed: int) -> dict[str, Any]:
        ran.append(code)
        folder.mkdir(parents=True)
        score = {"accuracy": 0.79 + 0.02 * seed, "records": 872, "epsilon": 8.0, "delta": 1e-5, "steps": 400}
        return score | {"learning_rate": 8e-3, "batch": 256, "cpu_minutes": 20.0}

    planned = {"n": 5000, "epsilon": 8.0, "delta": 1e-5, "plans": PLANS}
    monkeypatch.setattr(advice, "plan", lambda *_: planned)
    monkeypatch.setattr(advice, "follow", follow)
    monkeypatch.setattr(advice, "model_path", str)
    line = ["--seeds", "2", "--folder", str(tmp_path / "runs"), "--output", str(tmp_path)]
    advice.main(line)
    advice.main([*line, "--follow", "LoRA r=4", "head only"])
    assert ran == ["lora", "lora", "head", "head"]
    found = json.loads((tmp_path / "advice.json").read_text())
    assert found["plan"]["plans"] == PLANS and [*found["runs"]] == ["LoRA r=4", "head only"]
    assert (
        "| LoRA r=4 | 0.60 | 1.50 | 256 | 400 | 0.008 | 8.00 | 80.0% ± 1.4 | 2 | 20.0 |"
        in (tmp_path / "advice.md").read_text()
    )
    with pytest.raises(SystemExit):
        advice.main([*line, "--follow", "BK"])


def test_the_printed_code_is_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where things are written may change."""

    class Trainer:
        def __init__(self, *given: Any) -> None:
            self.given = given
            raise StopIteration(given)

    code = "from types import SimpleNamespace\nargs = SimpleNamespace(max_steps=7)\ntrainer = Trainer(model, args)\n"
    monkeypatch.setattr(advice, "AutoTokenizer", type("T", (), {"from_pretrained": staticmethod(lambda _: "words")}))
    model = type("M", (), {"from_pretrained": staticmethod(lambda *_, **__: "model")})
    monkeypatch.setattr(advice, "AutoModelForSequenceClassification", model)
    monkeypatch.setattr(advice, "load_data", lambda *_: ("records", {"": "dev"}))
    monkeypatch.setattr("builtins.Trainer", Trainer, raising=False)
    monkeypatch.setattr(advice, "model_path", str)
    with pytest.raises(StopIteration) as stopped:
        advice.follow(code, tmp_path / "run", advice.GlueOptions(), 0)
    made, args = stopped.value.value
    assert made == "model" and args.max_steps == 7 and args.output_dir == str(tmp_path / "run")
