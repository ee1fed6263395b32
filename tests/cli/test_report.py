"""`hf-private report`: files, formats and exit codes."""

import json
from pathlib import Path

import pytest
import yaml

from hf_private.cli.main import main
from tests.support.card_facts import event, facts, saved_model

CARDS = Path(__file__).parents[2] / "model_cards"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("models") / "first")


def test_html_file(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(model), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "report.html" in out and "epsilon = 0.309" in out
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>") and "the claim holds" in html
    assert str(model.parent) not in html, "no paths of this machine"


def test_markdown_is_the_default(model: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", str(model)]) == 0
    assert capsys.readouterr().out.startswith("# Privacy report: first\n")


def test_json(model: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", str(model), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "private" and report["epsilon"] == 0.309 and 0 < report["risk"]["advantage"] < 1
    assert len(report["sections"]) == 7


def test_formats(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", str(model), "--format", "registry"]) == 0
    entry = yaml.safe_load(capsys.readouterr().out)
    assert main(["report", str(model), "--format", "registry", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == entry
    page = tmp_path / "report.html"
    assert main(["report", str(model), "--format", "cyclonedx", "--html", str(page)]) == 0
    assert json.loads(capsys.readouterr().out)["bomFormat"] == "CycloneDX"
    assert page.is_file()


@pytest.mark.parametrize(("card", "code"), [("sst2_bk", 0), ("digits_rgp", 0), ("digits_np", 1)])
def test_published_cards(card: str, code: int, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", str(CARDS / card)]) == code
    out = capsys.readouterr().out
    assert ("[!CAUTION]" in out) == bool(code) and ("NOT PRIVATE" in out) == bool(code)


def test_an_edited_claim_fails(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    forged = saved_model(tmp_path / "forged")
    statement = json.loads((forged / "privacy.json").read_text())
    statement["guarantee"]["epsilon"] = 0.1
    (forged / "privacy.json").write_text(json.dumps(statement))
    assert main(["report", str(forged), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "wrong" and report["risk"] is None


def test_other_releases_are_charged_jointly(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    other = facts([event(3.0)], run={"noise_multiplier": 3.0}, noise_multiplier=3.0)
    other["ledger"]["head"] = "cd" * 32
    second = saved_model(tmp_path / "second", other)
    assert main(["compose", str(model), str(second), "--json"]) == 0
    together = json.loads(capsys.readouterr().out)
    assert main(["report", str(model), "--also", str(second)]) == 0
    text = capsys.readouterr().out
    assert f"All of them together: epsilon = {together['epsilon']}" in text and "| second |" in text
    assert main(["compose", str(model), str(second)]) == 0
    out = capsys.readouterr().out
    assert "The best possible attacker" in out
    assert out.splitlines()[-1] in text, "report and compose say the same of all releases"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["nowhere"], "PATH_OR_REPO"),
        ([str(CARDS / "digits_np"), "--format", "registry"], "--format"),
        ([str(CARDS / "digits_rgp"), "--html", "/nowhere/report.html"], "--html"),
        ([str(CARDS / "digits_rgp"), "--also", str(CARDS / "digits_rgp")], "PATH_OR_REPO"),
    ],
)
def test_bad_requests_are_one_line(arguments: list[str], name: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["report", *arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert name in error and error.count("\n") == 1


def test_a_statement_without_sense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = saved_model(tmp_path / "odd")
    statement = json.loads((folder / "privacy.json").read_text())
    statement["runs"][0]["set_aside"] = 7
    (folder / "privacy.json").write_text(json.dumps(statement))
    with pytest.raises(SystemExit) as stop:
        main(["report", str(folder)])
    assert stop.value.code == 2
    assert "makes no sense" in capsys.readouterr().err
