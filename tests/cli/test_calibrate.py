"""`hf-private calibrate`: a budget as an advantage, and the attack rates of what it prints."""

import json

import pytest

from hf_private.accounting.events import Event
from hf_private.accounting.risk import risk
from hf_private.cli.main import main

PLAN = ["calibrate", "--n", "1000", "--batch", "100", "--steps", "20", "--delta", "1e-5"]


def test_advantage_round_trip(capsys: pytest.CaptureFixture) -> None:
    assert main([*PLAN, "--advantage", "0.2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    sigma = report["noise_multiplier"]
    assert risk([Event(0.1, (sigma,), 20)], 1e-5).advantage <= 0.2
    assert risk([Event(0.1, (sigma - 1e-4,), 20)], 1e-5).advantage > 0.2
    assert report["target_advantage"] == 0.2 and report["target_epsilon"] is None
    assert report["risk"]["advantage"] <= 0.2 and report["epsilon"] > 0
    accuracy = {row["plan"]: row["risk"]["accuracy"] for row in report["neighbours"]}
    assert accuracy["half the epochs"] < report["risk"]["accuracy"] < accuracy["twice the epochs"]


def test_the_risk_is_printed_for_either_budget(capsys: pytest.CaptureFixture) -> None:
    assert main([*PLAN, "--epsilon", "3"]) == 0
    text = capsys.readouterr().out
    assert "keeps epsilon <= 3 " in text and "The best possible attacker" in text and "attacker is right" in text
    assert main([*PLAN, "--advantage", "0.2"]) == 0
    text = capsys.readouterr().out
    assert "<= 0.2" in text and "at most 60.0 %" in text
    assert main([*PLAN, "--advantage", "0.2", "--json"]) == 0
    sigma = json.loads(capsys.readouterr().out)["noise_multiplier"]
    assert float(text.split()[2]) == sigma, "all digits: fewer could be too little noise"


def test_budgets_exclude_each_other(capsys: pytest.CaptureFixture) -> None:
    for budget in ([], ["--epsilon", "3", "--advantage", "0.2"]):
        with pytest.raises(SystemExit) as stop:
            main([*PLAN, *budget])
        assert stop.value.code == 2
        assert "--advantage" in capsys.readouterr().err
