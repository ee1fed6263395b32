"""A card never claims less than its weights have cost: whose weights they are, what was set aside, what was tuned."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import BertForSequenceClassification

from hf_private.cli.main import main
from hf_private.spending.costs import Past
from hf_private.spending.ledger import LedgerError
from hf_private.spending.spending import Spending
from hf_private.spending.statement import build_statement, read_statement
from hf_private.trainer.trainer import DPTrainer
from tests.support import training

pretrained = BertForSequenceClassification.from_pretrained
quick = pytest.mark.usefixtures("quick_cards")
SAVE = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture(autouse=True)
def other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded here stands for a later process, which knows no copies by their content."""
    monkeypatch.setattr("hf_private.trainer.provenance.recognise", lambda model: None)


def steps(folder: Path) -> int:
    """What the record of a saved model has charged."""
    return sum(event["steps"] for event in read_statement(folder)["ledger"]["events"])


def trained(folder: Path, model: Any = None, dp: dict | None = None, **settings: Any) -> DPTrainer:
    made = training.trainer(folder, model, dp=dp, **settings)
    made.train()
    made.save_model()
    return made


# ---- a card is for its own weights


@quick
def test_weights_that_were_trained_on_are_not_saved_with_an_old_card(tmp_path: Path) -> None:
    first = trained(tmp_path / "first")
    second = trained(tmp_path / "second", first.model)
    before = {path: path.read_bytes() for path in training.files(tmp_path / "first")}
    for save in (first.save_model, lambda: first.save_model(tmp_path / "other"), first.push_to_hub):
        first.hub_model_id = "me/model"
        with pytest.raises(LedgerError, match=" 8 private steps"):
            save()
    assert {path: path.read_bytes() for path in training.files(tmp_path / "first")} == before
    assert not (tmp_path / "other").exists()
    second.save_model(tmp_path / "other")
    assert steps(tmp_path / "other") == 8
    first.train()
    first.save_model()
    assert steps(tmp_path / "first") >= 12


@quick
def test_a_trainer_that_has_not_trained_saves_what_its_ledger_has(tmp_path: Path) -> None:
    costly = trained(tmp_path / "costly").model
    costly.save_pretrained(tmp_path / "by_hand")
    trained(tmp_path / "cheap", max_steps=1)
    for folder, error in (("costly", " 4 private steps"), ("by_hand", "`DPTrainer.continues=")):
        for target in ("cheap", "unused"):
            with pytest.raises(LedgerError, match=error):
                training.trainer(tmp_path / target, pretrained(tmp_path / folder)).save_model()
    assert steps(tmp_path / "cheap") == 1 and not (tmp_path / "unused" / "config.json").exists()
    training.trainer(tmp_path / "costly", pretrained(tmp_path / "costly")).save_model(tmp_path / "copy")
    assert steps(tmp_path / "copy") == 4
    training.trainer(tmp_path / "fresh").save_model()
    training.trainer(tmp_path / "stated", pretrained(tmp_path / "costly"), dp={"disjoint_data": True}).save_model()
    with pytest.raises(LedgerError, match="`DPTrainer.continues="):  # this one says nothing of them
        training.trainer(tmp_path / "next", pretrained(tmp_path / "stated")).train()


@quick
@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_no_training_is_lost_because_a_folder_has_vanished(tmp_path: Path, kind: str) -> None:
    """The base model's during the run, and even the output folder after it."""
    trained(tmp_path / "base")
    model = pretrained(tmp_path / "base")
    if kind == "adapter":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    made = training.trainer(tmp_path / "out", model, **SAVE)
    step = made.training_step
    made.training_step = lambda *args: (shutil.rmtree(tmp_path / "base", ignore_errors=True), step(*args))[1]
    made.train()
    made.save_model()
    assert steps(tmp_path / "out" / "checkpoint-2") == 6 and steps(tmp_path / "out") == 8
    shutil.rmtree(tmp_path / "out")
    made.save_model(tmp_path / "elsewhere")
    assert steps(tmp_path / "elsewhere") == 8


@quick
def test_what_a_resumed_run_leaves_can_be_saved(tmp_path: Path) -> None:
    evaluated = {"eval_dataset": training.text(seed=1)[:8], "eval_strategy": "steps", "eval_steps": 2}
    training.trainer(tmp_path, callbacks=[training.Stop(2)], **SAVE).train()
    for _ in range(2):  # the second time it is complete already
        again = training.trainer(tmp_path, load_best_model_at_end=True, **SAVE, **evaluated)
        again.train(resume_from_checkpoint=True)
        again.save_model()
        assert steps(tmp_path) == 4


@quick
def test_a_run_that_was_refused_is_refused_again_in_a_folder_with_a_history(tmp_path: Path) -> None:
    trained(tmp_path / "costly").model.save_pretrained(tmp_path / "by_hand")
    trained(tmp_path / "cheap", max_steps=1)
    made = training.trainer(tmp_path / "cheap", pretrained(tmp_path / "by_hand"))
    for attempt in (made.train, made.train, made.save_model):
        with pytest.raises(LedgerError, match="`DPTrainer.continues="):
            attempt()


# ---- what was set aside


@quick
def test_what_was_set_aside_is_charged_when_the_same_people_come_again(tmp_path: Path) -> None:
    trained(tmp_path / "one")
    trained(tmp_path / "two", pretrained(tmp_path / "one"), {"disjoint_data": True}, max_steps=2)
    (debt,) = read_statement(tmp_path / "two")["runs"][0]["set_aside"]
    assert debt["private"] and [event["steps"] for event in debt["events"]] == [4]
    assert steps(tmp_path / "two") == 2
    trained(tmp_path / "three", pretrained(tmp_path / "two"), max_steps=1)
    assert steps(tmp_path / "three") == 4 + 2 + 1
    trained(tmp_path / "one", pretrained(tmp_path / "two"), max_steps=1)
    assert steps(tmp_path / "one") == 4 + 2 + 1, "this ledger has the first part"
    trained(tmp_path / "four", pretrained(tmp_path / "two"), {"disjoint_data": True}, max_steps=1)
    assert steps(tmp_path / "four") == 1
    trained(tmp_path / "five", pretrained(tmp_path / "four"), max_steps=1)
    assert steps(tmp_path / "five") == 4 + 2 + 1 + 1, "over two such statements"


@quick
def test_what_was_set_aside_is_charged_to_a_later_run_of_the_same_folder(tmp_path: Path) -> None:
    trained(tmp_path / "one")
    trained(tmp_path / "two", pretrained(tmp_path / "one"), {"disjoint_data": True}, max_steps=2)
    for expected in (2 + 4 + 2, 2 + 4 + 2 + 2):  # whatever is trained there: its records may be those of the first
        trained(tmp_path / "two", max_steps=2)
        assert steps(tmp_path / "two") == expected


@quick
def test_a_past_that_was_set_aside_without_being_found_must_be_named(tmp_path: Path) -> None:
    trained(tmp_path / "one").model.save_pretrained(tmp_path / "by_hand")
    trained(tmp_path / "two", pretrained(tmp_path / "by_hand"), {"disjoint_data": True}, max_steps=2)
    made = training.trainer(tmp_path / "three", pretrained(tmp_path / "two"), max_steps=1)
    with pytest.raises(LedgerError, match=r"`disjoint_data=True`.*continues="):
        made.train()
    made.continues = tmp_path / "one"
    made.train()
    assert training.steps(tmp_path / "three") == 4 + 2 + 1


def test_records_of_older_versions_have_set_nothing_aside(tmp_path: Path) -> None:
    event = {"sample_rate": 0.1, "releases": [1.0], "steps": 3, "sampling": "poisson"}
    old = {
        "private": True,
        "ledger": {"events": [event], "head": "ab", "length": 5},
        "runs": [{"disjoint_data": True}],
    }
    spent = Spending(tmp_path, 1e-5)
    with spent.open(0.1, 0, lambda s: (s,), 1.0, past=Past((old,))):
        pass
    assert [one.steps for one in spent.events] == [3]


# ---- the runs that were tried


def test_the_charge_for_tuning_goes_along_with_the_weights(tmp_path: Path) -> None:
    first = trained(tmp_path / "base")
    assert main(["card", str(tmp_path / "base"), "--tuning-runs", "3"]) == 0
    claimed = read_statement(tmp_path / "base")["guarantee"]["epsilon"]
    first.save_model(tmp_path / "copy")
    first.save_model()
    for folder in ("base", "copy"):
        assert read_statement(tmp_path / folder)["guarantee"]["epsilon"] == claimed
    next_, same = training.trainer(tmp_path / "next", pretrained(tmp_path / "copy"), max_steps=1), first.model
    next_.train()
    assert training.steps(tmp_path / "next") == 3 * 4 + 1 and next_.privacy_spent().epsilon > claimed
    training.trainer(tmp_path / "same", same, max_steps=1).train()
    assert training.steps(tmp_path / "same") == 3 * 4 + 1, "the object in memory, too"


@quick
def test_tuning_that_was_charged_later_is_charged_where_the_rest_was(tmp_path: Path) -> None:
    def tuned(folder: str, **tuning: Any) -> None:
        path = tmp_path / folder / "privacy.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tuning": tuning}))

    first = trained(tmp_path / "base")
    for runs, expected in ((1, 4 + 1), (3, 3 * 4 + 2), (3, 3 * 4 + 3), (2, 3 * 4 + 4)):
        tuned("base", runs=runs, law="fixed")
        training.trainer(tmp_path / "next", pretrained(tmp_path / "base"), max_steps=1).train()
        assert training.steps(tmp_path / "next") == expected
    first.save_model(tmp_path / "copy")
    tuned("copy", runs=5, law="fixed")
    training.trainer(tmp_path / "base", pretrained(tmp_path / "copy"), max_steps=1).train()
    assert training.steps(tmp_path / "base") == 5 * 4 + 1, "the copy says more than the folder's own card"
    tuned("copy", runs=5, law="geometric")
    with pytest.raises(LedgerError, match=r"\(geometric, mean 5\).*--law fixed.*`disjoint_data="):
        training.trainer(tmp_path / "other", pretrained(tmp_path / "copy")).train()


# ---- admissions


def test_all_that_a_base_models_card_admits_is_on_those_of_its_descendants(tmp_path: Path) -> None:
    made = trained(tmp_path / "base")
    record = {**read_statement(tmp_path / "base"), "evaluation": {"chooses_model": True}}
    unchecked = {"base_model_unchecked": True, "adapter_unchecked": True}
    record["runs"][0] |= {"anchors": {"k": 1}, "ranks": 2, "noise": "fast", "disjoint_data": True, **unchecked}
    admitted = build_statement(record, {})["caveats"]
    (tmp_path / "base" / "privacy.json").write_text(json.dumps(record))
    del made
    trained(tmp_path / "child", pretrained(tmp_path / "base"), max_steps=1)
    trained(tmp_path / "grandchild", pretrained(tmp_path / "child"), max_steps=1)
    fresh = trained(tmp_path / "fresh").privacy_record()
    own = set(admitted) - set(build_statement(fresh, {})["caveats"])
    assert len(own) == 7
    for folder in ("child", "grandchild"):
        assert own <= set(read_statement(tmp_path / folder)["caveats"])
