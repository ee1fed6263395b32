"""`--unit-counts` of calibrate and plan: both samplings for the numbers in a file."""

import json
from pathlib import Path

import pytest
from transformers import BertConfig, BertForSequenceClassification

from hf_private.cli.main import main

CALIBRATE = ["calibrate", "--batch", "20", "--steps", "30", "--epsilon", "8", "--delta", "1e-5", "--accountant", "rdp"]


@pytest.fixture
def counts(tmp_path: Path) -> str:
    (tmp_path / "counts.txt").write_text("3\n1\n3\n2\n" * 50)
    return str(tmp_path / "counts.txt")


def test_calibrate_compares_both_ways_to_draw(counts: str, capsys: pytest.CaptureFixture) -> None:
    assert main([*CALIBRATE, "--unit-counts", counts, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(one["sampling"], one["k"]) for one in report["unit_sampling"]] == [
        (sampling, k) for k in (1, 2) for sampling in ("units", "records")
    ]
    assert report["sample_rate"] == 20 / 200 and report["adjacency"] == "add or remove one unit"
    assert {one["noise_multiplier"] for one in report["unit_sampling"][::2]} == {report["noise_multiplier"]}
    assert main([*CALIBRATE, "--unit-counts", counts, "--records-per-unit", "2"]) == 0
    text = capsys.readouterr().out
    assert "Try first: unit_sampling=" in text and "records_per_unit=2" in text


def test_plan_names_the_unit_in_its_code(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "ones.txt").write_text("1\n" * 200)
    counts = str(tmp_path / "ones.txt")
    size = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8}
    BertForSequenceClassification(BertConfig(**size, vocab_size=50)).save_pretrained(tmp_path / "model")
    plan = ["plan", "--unit-counts", counts, "--epsilon", "8", "--model", str(tmp_path / "model"), "--length", "8"]
    assert main([*plan, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    best = min(report["unit_sampling"], key=lambda one: one["unlike"])
    assert report["n"] == 200 and {one["sampling"] for one in report["unit_sampling"]} == {"units", "records"}
    for line in (
        'unit_column="unit"', f"records_per_unit={best['k']}", f"unit_sampling={best['sampling']!r}",
        f"expected_batch_size={best['batch']}",
    ):  # fmt: skip
        assert line in report["code"]
    assert main(plan) == 0
    assert "unit_column" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "word"), [("3\n0\n", "line 2"), ("3\nann\n", "line 2"), ("", "empty"), ("2.5", "line 1")]
)
def test_a_file_with_something_else_is_refused(
    content: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "counts.txt").write_text(content)
    with pytest.raises(SystemExit):
        main([*CALIBRATE, "--unit-counts", str(tmp_path / "counts.txt")])
    err = capsys.readouterr().err
    assert "--unit-counts" in err and word in err


def test_what_does_not_go_together_is_refused(counts: str, capsys: pytest.CaptureFixture) -> None:
    advantage = ["calibrate", "--batch", "20", "--steps", "3", "--advantage", "0.1", "--delta", "1e-5"]
    for arguments in ([*CALIBRATE, "--n", "5", "--unit-counts", counts], [*advantage, "--unit-counts", counts]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "--unit-counts" in capsys.readouterr().err
