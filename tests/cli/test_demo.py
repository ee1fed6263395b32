"""`hf-private demo`: its data, its model, and a run on the small fallback model, down to the folder that it leaves."""

import json
import math
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_private.cli.demo import command as demo
from hf_private.cli.demo import encoder, picture, tickets
from hf_private.cli.main import main


def test_tickets_are_the_same_every_time_and_differ_by_seed() -> None:
    assert tickets.generate(50) == tickets.generate(50)
    assert not {t.text for t in tickets.generate(500)} & {
        t.text for t in tickets.generate(500, seed=1) if "@" in t.text
    }


def test_tickets_are_varied_and_balanced() -> None:
    made = tickets.generate(4000)
    assert len({ticket.text for ticket in made}) > 3500
    counts = [sum(ticket.label == label for ticket in made) for label in range(len(tickets.TOPICS))]
    assert min(counts) > 400
    assert sum("@example.com" in ticket.text for ticket in made) > 800, "records carry personal data, invented"


def test_keywords_alone_do_not_decide() -> None:
    """Topics overlap: an opening sentence of a topic also appears, in passing, under other labels."""
    telltale = "charged twice"
    labels = {ticket.label for ticket in tickets.generate(4000) if telltale in ticket.text}
    assert len(labels) > 4


def test_pretrained_weights_are_checked(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"something else")
    with pytest.raises(ValueError, match="`model.safetensors`"):
        encoder.load_pretrained(tmp_path, tickets.TOPICS)


def test_pretrained_encoder_is_found_where_it_is_installed() -> None:
    pytest.importorskip(encoder.PACKAGE)
    folder = encoder.find_pretrained()
    found = encoder.load_pretrained(folder, tickets.TOPICS)
    assert found.pretrained
    assert found.model.config.num_labels == len(tickets.TOPICS)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pretrained model, and little data."""
    monkeypatch.setattr(encoder, "PACKAGE", "no_such_package")
    monkeypatch.setattr(demo, "TRAIN", 120)
    monkeypatch.setattr(demo, "TEST", 30)
    monkeypatch.setattr(demo, "BATCH", 20)


@pytest.mark.usefixtures("small")
def test_demo_leaves_a_private_model_with_card_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, drawn = tmp_path / "demo", []
    draw = picture.draw
    monkeypatch.setattr(picture, "draw", lambda *given, **named: drawn.append(given[1]) or draw(*given, **named))
    assert main(["demo", "--output-dir", str(folder), "--steps", "4"]) == 0
    out, err = capsys.readouterr()
    assert "small random model" in out, "the fallback is stated"
    assert "epsilon=" in err, "the progress bar shows what is spent"
    for word in ("before", "private", "not private", "What to look at next", str(folder)):
        assert word in out

    summary = json.loads((folder / "demo.json").read_text())
    assert 0 < summary["epsilon"] <= 8
    steps, epsilons = zip(*drawn[0], strict=True)
    assert steps == (0, 1, 2, 3, 4) and list(epsilons) == sorted(epsilons), "the picture has epsilon at every step"
    assert epsilons[-1] == summary["epsilon"]
    assert math.isfinite(summary["noise_multiplier"])
    assert set(summary["accuracy"]) == {"before", "private", "not_private"}

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.num_labels == len(tickets.TOPICS)
    assert AutoTokenizer.from_pretrained(folder)("my card was charged").input_ids
    card = (folder / "README.md").read_text()
    assert "epsilon" in card
    assert "1e-05" in card or "1e-5" in card
    assert "NOT PRIVATE" not in card
    assert json.loads((folder / "carrier_config.json").read_text())["r"] == 8
    assert (folder / "demo.png").stat().st_size > 5000
    assert not (folder / "twin").exists(), "the non-private model is not left behind"

    assert main(["verify", str(folder)]) == 0
    capsys.readouterr()
    assert main(["demo", "--output-dir", str(folder), "--steps", "2", "--json"]) == 0, "a demo may be repeated"
    assert json.loads(capsys.readouterr().out)["steps"] == 2


def test_demo_does_not_overwrite_other_folders(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--output-dir", str(tmp_path)])
    err = capsys.readouterr().err
    assert "--output-dir" in err
    assert err.count("\n") == 1
    assert (tmp_path / "thesis.tex").exists()
