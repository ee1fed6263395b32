"""`hf-private verify`: a true claim holds, and every edit that makes it look better, or only different, is named."""

import hashlib
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from hf_private.accounting.events import Event
from hf_private.cli.main import main
from hf_private.publishing.card import CARD, write_files
from hf_private.publishing.curve import CURVE_FILE
from hf_private.publishing.verify import verify
from hf_private.spending.ledger import PrivacyLedger
from hf_private.spending.statement import STATEMENT, build_statement, read_statement, rebuild
from tests.support.card_facts import event, facts, saved_model

EPSILON = "0.309"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved_model(tmp_path / "model")


def wrong(folder: Path) -> list[str]:
    return [finding.message for finding in verify(str(folder)).findings if finding.status == "wrong"]


def edit_record(folder: Path, change: Callable[[dict], Any]) -> None:
    record = read_statement(folder)
    change(record)
    (folder / STATEMENT).write_text(json.dumps(record, indent=2) + "\n")


def fix_hash(folder: Path) -> None:
    """Make the card's hash fit privacy.json again."""
    digest = hashlib.sha256((folder / STATEMENT).read_bytes()).hexdigest()
    edit_card(folder, r"record_sha256: \w+", f"record_sha256: {digest}")


def edit_card(folder: Path, pattern: str, new: str) -> None:
    text, count = re.subn(pattern, new, (folder / CARD).read_text())
    assert count, f"{pattern} is not in the card"
    (folder / CARD).write_text(text)


def put(path: str, value: Any) -> Callable[[dict], None]:
    """An edit of one leaf of the record, `a.b[0].c`."""

    def change(record: dict) -> None:
        *keys, last = [int(key) if key.isdigit() else key for key in re.findall(r"\w+", path)]
        for key in keys:
            record = record[key]
        assert record[last] != value
        record[last] = value

    return change


def test_a_true_claim_holds(folder: Path) -> None:
    verdict = verify(str(folder))
    assert verdict.code == 0 and verdict.status == "holds"
    assert {finding.check for finding in verdict.findings} == {
        "private", "epsilon", "facts", "card", "ledger", "weights", "files", "caveats",
    }  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        facts(carriers={"r": 8, "sparsity": 0.3}),
        facts([event(releases=2)], anchors={"k": 20, "residual": True}),
        facts(records_per_unit=2),
    ],
    ids=["LSG", "GEP", "person"],
)
def test_true_claims_of_other_runs_hold(given: dict, tmp_path: Path) -> None:
    assert wrong(saved_model(tmp_path, given)) == []


def test_words_of_an_unknown_version_cannot_be_told_and_its_numbers_are_checked(folder: Path) -> None:
    def older(record: dict) -> None:
        record["versions"]["hf_private"] = "0.0.9"
        record["scope"]["not_covered"] = ["the weather"]
        record["setting"] = "central"

    edit_record(folder, older)
    fix_hash(folder)
    assert wrong(folder) == []
    assert verify(str(folder)).code == 2
    edit_record(folder, put("mechanism.steps", 2))
    fix_hash(folder)
    assert any("mechanism.steps" in line for line in wrong(folder))


RECORD_EDITS = [  # (what is changed in privacy.json, words of the answer)
    ("guarantee.epsilon", 0.1, "guarantee.epsilon` is 0.1"),
    ("guarantee.epsilon_unrounded", 0.2, "guarantee.epsilon_unrounded` is 0.2"),
    ("guarantee.delta", 1e-6, "guarantee.delta"),
    ("settings.target_delta", 1e-3, "guarantee.delta"),
    ("guarantee.accountants.prv.upper", 0.1, "guarantee.accountants.prv.upper"),
    ("guarantee.curve[9].delta", 1e-9, "guarantee.curve"),
    ("ledger.events[0].releases", [8.0], "mechanism.phases[0].noise_multiplier"),
    ("ledger.events[0].steps", 5, "mechanism.phases[0].steps"),
    ("ledger.events[0].sample_rate", 0.01, "mechanism.phases[0].sample_rate"),
    ("ledger.events", [], "private"),
    ("ledger.events[0].sampling", "shuffle", "not_private_because"),
    ("mechanism.steps", 2, "mechanism.steps"),
    ("mechanism.phases[0].noise_multiplier", 9.0, "mechanism.phases[0].noise_multiplier"),
    ("mechanism.clip_norm", 0.1, "mechanism.clip_norm"),
    ("runs[0].noise_multiplier", 9.0, "`mechanism.phases[0]`"),
    ("runs[0].num_records", 900000, "runs[0].sample_rate"),
    ("runs[0].reproducible", True, "private"),
    ("runs", [], "`runs` is empty"),
    ("settings.clip_norm", 0.1, "settings.clip_norm"),
    ("settings.noise", "fast", "settings.noise"),
    ("runs[0].log_nonprivate", True, "private"),
    ("private", False, "NOT PRIVATE"),
    ("settings.records_per_unit", 2, "privacy_unit.records_per_unit"),
    ("privacy_unit.unit", "person", "privacy_unit.unit"),
    ("tuning.runs", 3, "`law`"),
    ("caveats", [], "caveats"),
    ("scope.not_covered", [], "scope.not_covered"),
    ("randomness.keys", "from a vault", "randomness.keys"),
    ("schema_version", None, "schema_version"),
    ("guarantee.epsilon", "small", "guarantee.epsilon"),
    ("weights", {"model.safetensors": "0"}, "weights.model.safetensors"),
]


@pytest.mark.parametrize(("path", "value", "words"), RECORD_EDITS, ids=[f"{p}={v}" for p, v, _ in RECORD_EDITS])
@pytest.mark.parametrize("fixed_up", [False, True], ids=["", "hash fixed up"])
def test_an_edit_of_the_record_is_named(folder: Path, path: str, value: Any, words: str, fixed_up: bool) -> None:
    edit_record(folder, put(path, value))
    if fixed_up:
        fix_hash(folder)
    verdict = verify(str(folder))
    if path == "schema_version":
        assert verdict.code == 2
        return
    found = wrong(folder)
    assert verdict.code == 1
    assert any(words in message for message in found), found
    if not fixed_up and verdict.statement:
        assert any("record_sha256" in message for message in found), found


def test_a_removed_event_is_named(tmp_path: Path) -> None:
    second = {"noise_multiplier": 2.0, "sample_rate": 0.1, "num_records": 5000, "expected_batch_size": 500}
    given = facts([event(), event(2.0, 3)])
    given["runs"].append(second)
    folder = saved_model(tmp_path, given)
    assert wrong(folder) == []
    edit_record(folder, lambda record: record["ledger"]["events"].pop())
    fix_hash(folder)
    assert any("mechanism.phases" in message for message in wrong(folder))
    assert any("guarantee.epsilon_unrounded" in message for message in wrong(folder))


CARD_EDITS = [  # (pattern, replacement, words of the answer)
    (rf"\*\*epsilon = {EPSILON}", "**epsilon = 0.1", "privacy section says"),
    (rf"\| epsilon, delta \| {EPSILON}", "| epsilon, delta | 0.1", "privacy section says"),
    (r"delta = 1e-05\*\*", "delta = 1e-09**", "privacy section says"),
    (r"per record\. Smaller", "per person. Smaller", "privacy section says"),
    (rf"(differential_privacy:\n  private: true\n  epsilon: ){EPSILON}", r"\g<1>0.1", "differential_privacy.epsilon"),
    (r"  delta: 1\.0e-05", "  delta: 1.0e-07", "differential_privacy.delta"),
    (r"  noise_multiplier:\n  - 4\.0", "  noise_multiplier:\n  - 8.0", "differential_privacy.noise_multiplier"),
    (r"differential_privacy:\n", "other:\n", "no YAML block"),
    (r"\n# Fine-tuned", "\nWith epsilon = 0.05!\n\n# Fine-tuned", "claims epsilon 0.05"),
    (r"\n# Fine-tuned", "\nprivate (ε ≤ 0.1)\n\n# Fine-tuned", "claims epsilon 0.1"),
    (r"\n# Fine-tuned", "\nIt is (0.1, 1e-5)-DP.\n\n# Fine-tuned", "claims epsilon 0.1"),
    (r"\n# Fine-tuned", "\nWith eps below 0.1.\n\n# Fine-tuned", "claims epsilon 0.1"),
    (r"^---\n", "---\nepsilon: 0.1\n", "metadata: claims epsilon 0.1"),
    (
        r"(?s)(<!-- hf-private: begin section -->.*end section -->\n)",
        r"\1\n<!-- hf-private: begin section -->\n**epsilon = 0.1**\n<!-- hf-private: end section -->\n",
        "claims epsilon 0.1",
    ),
    (r"(?s)<!-- hf-private: begin section.*end section -->", "", "no privacy section"),
    (r"record_sha256: \w+", "record_sha256: " + "0" * 64, "record_sha256"),
    (r"- the evaluation data, and the metrics measured on it\n", "", "privacy section says"),
]


@pytest.mark.parametrize(
    ("pattern", "new", "words"), CARD_EDITS, ids=[words + new[:9] for _, new, words in CARD_EDITS]
)
def test_an_edit_of_the_card_is_named(folder: Path, pattern: str, new: str, words: str) -> None:
    edit_card(folder, pattern, new)
    found = wrong(folder)
    assert verify(str(folder)).code == 1
    assert any(words in message for message in found), found


def test_trainers_own_words_are_no_claims(folder: Path) -> None:
    text = "\n- optimizer: adamw with betas=(0.9,0.999) and epsilon=1e-08\n- Accuracy: 0.5\n"
    (folder / CARD).write_text((folder / CARD).read_text() + text)
    assert verify(str(folder)).code == 0


def test_a_missing_or_other_curve_is_named(folder: Path) -> None:
    picture = folder / CURVE_FILE
    picture.write_text(picture.read_text().replace("<circle", "<ellipse"))
    assert any(CURVE_FILE in message for message in wrong(folder))


def test_a_not_private_card_whose_warning_is_removed(tmp_path: Path) -> None:
    folder = saved_model(tmp_path, facts(run={"reproducible": True}))
    assert verify(str(folder)).code == 1, "no claim holds where none is made"
    assert len(wrong(folder)) == 1
    edit_card(folder, r"(?s)<!-- hf-private: begin caution.*end caution -->\n\n", "")
    edit_card(folder, "- hf_private\n", "- hf_private\n- differential-privacy\n")
    assert any("no warning" in message for message in wrong(folder))
    assert any("has the tag `differential-privacy`" in message for message in wrong(folder))


@pytest.mark.parametrize("swap", ["swapped", "merged", "removed", "added", "unnamed"])
def test_about_other_weights_nothing_can_be_told(folder: Path, swap: str) -> None:
    weights = folder / "model.safetensors"
    if swap in ("swapped", "merged"):
        save_file({"weight": torch.arange(6.0) + 1}, weights)
    elif swap == "removed":
        weights.unlink()
    elif swap == "added":
        save_file({"weight": torch.zeros(1)}, folder / "adapter_model.safetensors")
    else:
        write_files(folder, build_statement(facts(), {}))
    verdict = verify(str(folder))
    assert verdict.code == 2
    assert wrong(folder) == []
    assert [finding.check for finding in verdict.findings if finding.status == "cannot tell"] == ["weights"]


def test_warnings(tmp_path: Path) -> None:
    folder = saved_model(tmp_path, facts([event(0.7, 40, 0.3)], run={"sample_rate": None}, target_delta=1e-3))
    verdict = verify(str(folder))
    text = " ".join(finding.message for finding in verdict.findings if finding.status == "warning")
    assert verdict.code == 0
    assert "above 10" in text and "not below 1 / 5000" in text and "how many runs were tried" in text


# ---- the ledger, where it lies


@pytest.fixture
def with_ledger(tmp_path: Path) -> Path:
    given = facts()
    with PrivacyLedger(tmp_path / "model" / "_dp" / "ledger.jsonl") as ledger:
        ledger.record("run", given["runs"][0])
        for _ in range(10):
            ledger.charge(Event(0.1, (4.0,)))
        given["ledger"] = {
            "events": [e.to_dict() for e in ledger.events],
            "head": ledger.head,
            "length": ledger.length,
        }
    return saved_model(tmp_path / "model", given)


def test_the_chain_agrees(with_ledger: Path) -> None:
    assert verify(str(with_ledger)).code == 0


def test_a_forged_record_is_caught_by_the_ledger(with_ledger: Path) -> None:
    """Facts and claims changed together, consistently: only the ledger can tell."""
    record = read_statement(with_ledger)
    record["ledger"]["events"][0]["releases"] = [8.0]
    record["runs"][0]["noise_multiplier"] = 8.0
    write_files(with_ledger, rebuild(record))
    assert wrong(with_ledger) == [
        "`ledger.events` are not the steps in the ledger",
        "`runs` are not the runs in the ledger",
    ]
    (with_ledger / "_dp" / "ledger.jsonl").rename(with_ledger.parent / "gone")
    assert verify(str(with_ledger)).code == 0, "the claim follows from the record, which is not what ran"


def test_edits_of_the_ledger_are_caught(with_ledger: Path) -> None:
    path = with_ledger / "_dp" / "ledger.jsonl"
    original = path.read_text()
    lines = original.splitlines(keepends=True)
    path.write_text(original.replace("4.0", "8.0", 1))
    assert any("ledger is broken" in message for message in wrong(with_ledger))
    path.write_text("".join(lines[:-3]))
    assert any("ledger.head" in message for message in wrong(with_ledger))
    path.write_text("".join(lines[:4] + lines[5:]))
    assert any("ledger is broken" in message for message in wrong(with_ledger))
    path.write_text(original)
    assert wrong(with_ledger) == []


def test_an_old_card_of_a_ledger_that_went_on_is_warned_about(with_ledger: Path) -> None:
    with PrivacyLedger(with_ledger / "_dp" / "ledger.jsonl") as ledger:
        ledger.charge(Event(0.1, (4.0,)))
    verdict = verify(str(with_ledger))
    assert verdict.code == 0
    assert any("more lines" in finding.message for finding in verdict.findings)


# ---- the commands


def test_exit_codes_and_json(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["status"], report["epsilon"]) == ("holds", float(EPSILON))
    assert "not that the statement describes what ran" in report["scope"]
    assert main(["verify", str(folder)]) == 0
    assert "not that the statement describes what ran" in capsys.readouterr().out.replace("\n", " ")
    edit_record(folder, put("guarantee.epsilon", 0.1))
    assert main(["verify", str(folder)]) == 1
    assert "does not hold" in capsys.readouterr().out
    assert main(["verify", str(tmp_path)]) == 2, "no record: cannot tell"
    assert main(["verify", "nobody/nothing"]) == 2, "offline: cannot tell"
    (tmp_path / STATEMENT).write_text("{")
    assert main(["verify", str(tmp_path)]) == 1
    (tmp_path / STATEMENT).write_text('{"schema_version": 2}')
    assert main(["verify", str(tmp_path), "--json"]) == 2


def test_nothing_is_unpickled(folder: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    for name in ("training_args.bin", "pytorch_model.bin", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    edit_card(folder, "library_name: transformers", "library_name: !!python/object/apply:os.getcwd []")
    assert verify(str(folder)).code == 1
    assert not (tmp_path / "exploded").exists()


def test_card_writes_the_card_again(folder: Path, capsys: pytest.CaptureFixture) -> None:
    before = (folder / CARD).read_text()
    edit_card(folder, rf"epsilon = {EPSILON}", "epsilon = 0.1")
    edit_card(folder, r"\n# Fine-tuned[^\n]*", "\n# My own title")
    assert main(["card", str(folder)]) == 0
    assert EPSILON in capsys.readouterr().out
    assert (folder / CARD).read_text() == re.sub(r"\n# Fine-tuned[^\n]*", "\n# My own title", before)
    assert verify(str(folder)).code == 0
    save_file({"weight": torch.zeros(6)}, folder / "model.safetensors")
    assert main(["card", str(folder)]) == 0
    assert verify(str(folder)).code == 2, "writing the card again does not bless other weights"


def test_card_takes_the_claim_from_the_facts(folder: Path) -> None:
    before = (folder / STATEMENT).read_text()
    edit_record(folder, put("guarantee.epsilon", 0.1))
    edit_record(folder, put("scope.not_covered", ["in other words"]))
    assert main(["card", str(folder)]) == 0
    assert (folder / STATEMENT).read_text() == before


def test_card_charges_for_tuning(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["card", str(folder), "--tuning-runs", "2", "--law", "fixed", "--json"]) == 0
    twice = json.loads(capsys.readouterr().out)["epsilon"]
    assert main(["card", str(folder), "--tuning-runs", "20", "--law", "geometric", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["epsilon"]
    assert float(EPSILON) < twice < chosen
    assert verify(str(folder)).code == 0
    metadata = yaml.safe_load((folder / CARD).read_text().split("---")[1])
    assert metadata["differential_privacy"]["epsilon"] == chosen
    edit_record(folder, put("tuning.runs", 1))
    fix_hash(folder)
    assert verify(str(folder)).code == 1


def test_compose_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    paths = []
    for index in range(2):
        given = facts()
        given["ledger"]["head"] = str(index) * 64
        paths.append(str(saved_model(tmp_path / str(index), given)))
    assert main(["compose", *paths, "--json"]) == 0
    joint = json.loads(capsys.readouterr().out)
    together = build_statement(facts([event(steps=20)]), {})["guarantee"]
    assert joint["epsilon"] == together["epsilon"] > float(EPSILON)
    assert main(["compose", *paths, "--delta", "1e-3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] < joint["epsilon"]
    assert main(["compose", *paths]) == 0
    assert "Together: epsilon" in capsys.readouterr().out
    not_private = saved_model(
        tmp_path / "n", facts(run={"reproducible": True}) | {"ledger": {**facts()["ledger"], "head": "9"}}
    )
    assert main(["compose", paths[0], str(not_private), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == "inf"
    for arguments in ([paths[0], paths[0]], [paths[0], str(tmp_path / "nothing")]):
        with pytest.raises(SystemExit):
            main(["compose", *arguments])
        assert "PATH_OR_REPO" in capsys.readouterr().err
