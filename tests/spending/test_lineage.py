"""What the weights have cost before: found where they came from, asked for where nobody can see it."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import _CACHED_NO_EXIST
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import BertForSequenceClassification, BertModel, PreTrainedConfig

from hf_private.spending import lineage, statement
from hf_private.spending.costs import Past, sources
from hf_private.spending.ledger import LedgerError
from hf_private.spending.lineage import past_of
from hf_private.spending.spending import Spending
from hf_private.spending.statement import read_statement
from tests.support import training, zoo

EVENT = {"sample_rate": 0.1, "releases": [1.0], "steps": 3, "sampling": "poisson"}
LORA = {"r": 2, "target_modules": ["query", "value"], "task_type": "SEQ_CLS"}


def record(head: str = "ab", **ledger: Any) -> dict[str, Any]:
    return {"private": True, "runs": [], "ledger": {"events": [EVENT], "head": head, "length": 5, **ledger}}


def published(folder: Path, **ledger: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "privacy.json").write_text(json.dumps(record(**ledger)))
    return folder


def loaded(folder: Path | str | None, commit: str | None = None) -> nn.Module:
    """A model that says it came from `folder`, as from_pretrained makes it."""
    model = nn.Linear(1, 1)
    model.config = PreTrainedConfig()
    model.config._name_or_path = folder if folder is None else str(folder)
    model.config._commit_hash = commit
    return model


@pytest.fixture(autouse=True)
def other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded here stands for a later process, which knows no copies by their content."""
    monkeypatch.setattr("hf_private.trainer.provenance.recognise", lambda model: None)


def steps(trainer: Any) -> int:
    return sum(event.steps for event in trainer.spending.events)


# ---- folders


def test_a_folder_with_a_record(tmp_path: Path) -> None:
    assert past_of(loaded(published(tmp_path))) == Past((record(),))


def test_models_without_a_past(tmp_path: Path) -> None:
    for name in (None, "", "gpt2", tmp_path):
        assert past_of(loaded(name)) == Past()
    assert past_of(nn.Linear(1, 1)) == Past()


def test_a_record_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for text in ("{", "{}", '{"ledger": {"events": [{"sample_rate": 2}]}}', '{"ledger": {"events": []}}'):
        (tmp_path / "privacy.json").write_text(text)
        with pytest.raises(LedgerError, match="`disjoint_data=True`"):
            past_of(loaded(tmp_path))


def test_a_folder_that_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="`DPTrainer.continues=.*`disjoint_data=True`"):
        past_of(loaded(tmp_path / "gone"))
    assert past_of(loaded(tmp_path / "gone"), resumed=True) == Past()


def test_a_trained_model_that_was_moved_or_saved_by_hand_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """Its config says that there is a record. A relative path could also be a repository's name, so proves nothing."""
    made = training.trainer(tmp_path / "first")
    made.train()
    made.save_model()
    made.model.save_pretrained(tmp_path / "by_hand")
    monkeypatch.chdir(tmp_path)
    assert past_of(BertForSequenceClassification.from_pretrained("first")).statements
    moved = BertForSequenceClassification.from_pretrained("first")
    Path("first").rename("second")
    for model in (moved, BertForSequenceClassification.from_pretrained("by_hand")):
        made = training.trainer(tmp_path / "new", model=model)
        for _ in range(2):  # to try again does not help
            with pytest.raises(LedgerError, match="`DPTrainer.continues=.*`disjoint_data="):
                made.train()
        assert past_of(model, resumed=True) == Past()
    assert len(past_of(moved, continues="second").statements) == 1


# ---- the Hub


@pytest.mark.parametrize("answer", ["has one", "has none", "is known to have none", "offline", "broken"])
def test_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    def download(repo: str, name: str, revision: str) -> str:
        assert (repo, name, revision) == ("me/model", "privacy.json", "c0ffee")
        if answer == "has one":
            return str(published(tmp_path) / name)
        raise {
            "has none": EntryNotFoundError("404"),
            "offline": LocalEntryNotFoundError("offline"),
            "broken": RuntimeError("500"),
        }[answer]

    cached = _CACHED_NO_EXIST if answer == "is known to have none" else None
    monkeypatch.setattr(statement, "hf_hub_download", download)
    monkeypatch.setattr(statement, "try_to_load_from_cache", lambda *_, **__: cached)
    unchecked = ("base_model_unchecked",) if answer in ("offline", "broken") else ()
    wanted = Past((record(),) if answer == "has one" else (), unchecked)
    assert past_of(loaded("me/model", "c0ffee")) == wanted


# ---- adapters


def test_a_trained_adapter_must_be_named(tmp_path: Path) -> None:
    """PEFT keeps no trace of the folder: fresh adapters pass, loaded ones are refused until their record is named."""
    first = training.trainer(tmp_path / "first", get_peft_model(zoo.small("bert"), LoraConfig(**LORA)))
    first.train()
    first.save_model()

    def again(folder: str, dp: dict | None = None, **rest: Any) -> Any:
        adapted = PeftModel.from_pretrained(zoo.small("bert"), str(tmp_path / "first"), is_trainable=True)
        made = training.trainer(tmp_path / folder, adapted, dp=dp)
        made.continues = rest.get("continues")
        made.train()
        return made

    for folder in ("second", "first"):  # that a folder has a history does not make it that of these weights
        for _ in range(2):
            with pytest.raises(LedgerError, match="`base_model.*lora_B.*continues=.*disjoint_data=True"):
                again(folder)
    assert steps(again("second", continues=tmp_path / "first")) == 8
    assert steps(again("second", continues=tmp_path / "first")) == 12, "it is charged once"
    assert steps(again("first", continues=tmp_path / "first")) == 8, "and not at all where it was trained"
    assert steps(again("other", dp={"disjoint_data": True})) == 4
    with pytest.raises(LedgerError, match="`continues` = .* has no privacy.json"):
        again("third", continues=tmp_path)


@pytest.mark.usefixtures("quick_cards")
def test_a_trained_adapter_of_another_kind_must_be_named(tmp_path: Path) -> None:
    """IA3 begins at one."""
    settings = IA3Config(target_modules=["key", "value"], feedforward_modules=[], task_type="SEQ_CLS")
    first = training.trainer(tmp_path / "first", get_peft_model(zoo.small("bert"), settings))
    first.train()
    first.save_model()
    again = PeftModel.from_pretrained(zoo.small("bert"), str(tmp_path / "first"), is_trainable=True)
    with pytest.raises(LedgerError, match="ia3_l.*`DPTrainer"):
        past_of(again)
    assert len(past_of(again, tmp_path / "first").statements) == 1


@pytest.mark.parametrize(
    "settings",
    [
        LoraConfig(**LORA, init_lora_weights="orthogonal"),
        PrefixTuningConfig(num_virtual_tokens=2, task_type="SEQ_CLS"),
    ],
    ids=lambda settings: settings.peft_type.value,
)
def test_an_adapter_that_shows_nothing_is_admitted(tmp_path: Path, settings: PeftConfig) -> None:
    """It begins at random. A name, or a resumed run, settles it."""
    adapted = get_peft_model(zoo.small("bert"), settings)
    assert past_of(adapted) == Past((), ("adapter_unchecked",))
    assert past_of(adapted, resumed=True) == Past()
    assert past_of(adapted, published(tmp_path / "named")).unchecked == ()
    made = training.trainer(tmp_path / "out", adapted)
    made.train()
    made.save_model()
    assert any("adapter's past cannot be seen" in text for text in read_statement(tmp_path / "out")["caveats"])


def test_a_trained_adapter_that_is_loaded_beside_others(tmp_path: Path) -> None:
    """The base model's object was trained in this process. That says nothing of an adapter that came later."""
    costly = training.trainer(tmp_path / "costly", get_peft_model(zoo.small("bert"), LoraConfig(**LORA)))
    costly.train()
    costly.save_model()
    model = get_peft_model(zoo.small("bert"), LoraConfig(**LORA))
    training.trainer(tmp_path / "cheap", model).train()
    assert len(past_of(model).statements) == 1, "its own adapter is settled"
    model.load_adapter(str(tmp_path / "costly"), adapter_name="x")
    for active in ("default", "x"):  # an idle adapter is saved, too
        model.set_adapter(active)
        with pytest.raises(LedgerError, match=r"lora_B\.x"):
            past_of(model)
    assert len(past_of(model, tmp_path / "costly").statements) == 2


def test_an_adapters_record_that_has_the_base_models_in_it(tmp_path: Path) -> None:
    base = published(tmp_path / "base")
    alone = published(tmp_path / "alone", head="cd")
    both = published(tmp_path / "both", head="ef", continues=[{"head": "ab", "length": 5}])
    for folder, heads in ((None, ["ab"]), (alone, ["ab", "cd"]), (both, ["ef"])):
        spent = Spending(tmp_path / f"out{heads}", 1e-5)
        with spent.open(0.1, 0, lambda s: (s,), 1.0, past=past_of(loaded(base), folder)):
            pass
        assert [source["head"] for source in sources(spent.ledger)] == heads
        assert sum(event.steps for event in spent.events) == 3 * len(heads)


# ---- parts, and objects that are shared


def test_a_trained_model_that_is_a_part_of_another(tmp_path: Path) -> None:
    """The config of the whole says nothing of it."""
    first = training.trainer(tmp_path / "first")
    first.train()
    first.save_model()
    for whole in (nn.Module(), zoo.small("bert")):
        whole.bert = BertModel.from_pretrained(tmp_path / "first")
        assert [len(past["ledger"]["events"]) for past in past_of(whole).statements] == [1]
    (tmp_path / "first" / "privacy.json").unlink()
    with pytest.raises(LedgerError, match="`DPTrainer.continues="):
        past_of(whole)


def test_a_trained_part_that_is_put_into_a_model_of_this_process(tmp_path: Path) -> None:
    first = training.trainer(tmp_path / "first")
    first.train()
    first.save_model()
    second = training.trainer(tmp_path / "second")
    second.train()
    second.model.bert = BertModel.from_pretrained(tmp_path / "first")
    third = training.trainer(tmp_path / "third", second.model)
    third.train()
    assert steps(third) == 12


def test_a_new_model_from_a_config_that_a_trained_one_was_built_from(tmp_path: Path) -> None:
    """As in a loop over epsilons: its weights are new, and owe nothing."""
    config = zoo.small("bert").config
    for name in ("first", "second"):
        trainer = training.trainer(tmp_path / name, BertForSequenceClassification(config))
        trainer.train()
        assert steps(trainer) == 4
        assert hasattr(trainer.model.config, lineage.MARK) and not hasattr(config, lineage.MARK)
        assert trainer.model.bert.config is trainer.model.config


# ---- this process


def test_a_model_that_another_trainer_has_trained(tmp_path: Path) -> None:
    """No file tells it: the object itself goes from one output folder to the next."""
    first = training.trainer(tmp_path / "first")
    first.train()
    second = training.trainer(tmp_path / "second", first.model)
    second.train()
    assert (steps(first), steps(second)) == (4, 8)
    first.train()
    assert steps(first) >= 12, "and back again; its own four may be counted twice, never not at all"
    spent = steps(first)
    third = training.trainer(tmp_path / "third", get_peft_model(first.model, LoraConfig(**LORA)))
    third.train()
    assert steps(third) == spent + 4, "under an adapter, too"


def test_a_run_that_failed_is_remembered(tmp_path: Path) -> None:
    first = training.trainer(tmp_path / "first")
    step, calls = first.training_step, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        return step(*args) if len(calls) < 3 else pytest.fail("an error in the third step")

    first.training_step = failing
    with pytest.raises(pytest.fail.Exception):
        first.train()
    second = training.trainer(tmp_path / "second", first.model)
    second.train()
    assert steps(second) == 2 + 4
