"""A card is bound to its weights: it has all that they have cost, and weights that were changed since are refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback

from hf_private.gradients.selfcheck import LENGTH
from hf_private.spending.admissions import admitted
from hf_private.spending.fingerprints import BITS, fingerprint
from hf_private.spending.ledger import LedgerError
from hf_private.spending.statement import build_statement, read_statement
from hf_private.trainer.trainer import DPTrainer
from tests.support import training, zoo
from tests.tasks.test_collators import tokenizer

quick = pytest.mark.usefixtures("quick_cards")
LORA = {"r": 2, "target_modules": ["query", "value"], "task_type": "SEQ_CLS"}


def steps(folder: Path) -> int:
    """What the statement of a saved model has charged."""
    return sum(event["steps"] for event in read_statement(folder)["ledger"]["events"])


def trained(folder: Path, model: Any = None, dp: dict | None = None, **settings: Any) -> DPTrainer:
    made = training.trainer(folder, model, dp=dp, **settings)
    made.train()
    return made


def train_without_privacy(model: nn.Module, folder: Path, records: list | None = None) -> None:
    stock = Trainer(
        model,
        training.arguments(folder, max_steps=3),
        train_dataset=records or training.text(),
        data_collator=training.Padding(),
    )
    stock.train()


def at(event: str, action: Any) -> TrainerCallback:
    """A callback that does something once, at some event."""
    calls: list[None] = []

    def once(self: Any, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if not calls:
            calls.append(None)
            action(model)

    return type("At", (TrainerCallback,), {event: once})()


def assert_refused(made: DPTrainer, folder: Path, match: str = "declare_post_processing") -> None:
    with pytest.raises(LedgerError, match=match):
        made.save_model(str(folder))
    assert not (folder / "privacy.json").exists() and not (folder / "model.safetensors").exists()


# ---- spending is found by parameter


@quick
def test_a_part_that_is_moved_into_another_model_brings_its_spending(tmp_path: Path) -> None:
    """Finding 9."""
    first = trained(tmp_path / "mlm", zoo.small("bert-mlm"), records=training.text("itself"))
    clf = zoo.small("bert-token", num_labels=3)
    clf.bert = first.model.bert
    second = trained(tmp_path / "clf", clf, records=training.text("tokens"))
    second.save_model()
    assert steps(tmp_path / "clf") == 8


@quick
@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end", "on_train_end"])
@pytest.mark.parametrize("declared", [False, True])
def test_a_trainer_inside_a_callback_of_another(tmp_path: Path, event: str, declared: bool) -> None:
    """Finding 11. A declaration covers changes of values, not the steps of another ledger."""
    inner: list[DPTrainer] = []

    def train_inside(model: nn.Module) -> None:
        inner.append(trained(tmp_path / "inner", model))
        inner[0].save_model()

    outer = training.trainer(tmp_path / "outer", callbacks=[at(event, train_inside)])
    if declared:
        outer.declare_post_processing("average")
        outer.train()
    elif event == "on_train_end":
        outer.train()
    else:
        with pytest.raises(LedgerError, match="`bert.embeddings.*`trainer.declare_post_processing"):
            outer.train()
    assert steps(tmp_path / "inner") == 4 + {"on_train_begin": 0, "on_step_end": 1, "on_train_end": 4}[event]
    if declared or event == "on_train_end":
        assert_refused(outer, tmp_path / "out", "trained elsewhere")
        outer.declare_post_processing("average")
        outer.train()
        outer.save_model(str(tmp_path / "out"))
        assert steps(tmp_path / "out") >= 12


@quick
def test_a_copy_of_a_trained_model_brings_its_spending(tmp_path: Path) -> None:
    """A copy shares neither parameters nor counters with the model: it is found by its content."""
    model = copy.deepcopy(trained(tmp_path / "first").model)
    second = trained(tmp_path / "second", model)
    second.save_model()
    assert steps(tmp_path / "second") == 8


@quick
def test_weights_that_are_loaded_by_hand_in_this_process_bring_their_spending(tmp_path: Path) -> None:
    first = trained(tmp_path / "first")
    fresh = zoo.small("bert")
    fresh.load_state_dict(first.model.state_dict())
    assert sum(event.steps for event in trained(tmp_path / "second", fresh).spending.events) == 8
    part = zoo.small("bert")
    part.classifier = copy.deepcopy(first.model.classifier)
    assert sum(event.steps for event in trained(tmp_path / "third", part).spending.events) == 8


def test_a_changed_copy_of_a_part_is_refused(tmp_path: Path) -> None:
    """The config of the whole says nothing, that of the part says that it was trained."""
    first = trained(tmp_path / "first")
    whole = zoo.small("bert")
    whole.bert = copy.deepcopy(first.model.bert)
    with torch.no_grad():
        for p in whole.bert.parameters():
            p.mul_(1.5)
    with pytest.raises(LedgerError, match="`DPTrainer"):
        training.trainer(tmp_path / "second", whole).train()


def test_a_fresh_model_is_not_taken_for_a_copy(tmp_path: Path) -> None:
    """Zeros and ones that training left alone are in every model: they say nothing."""
    frozen = zoo.small("bert")
    frozen.bert.requires_grad_(False)
    trained(tmp_path / "first", frozen)
    assert sum(event.steps for event in trained(tmp_path / "second").spending.events) == 4
    still = trained(tmp_path / "third", learning_rate=0.0)
    assert sum(event.steps for event in still.spending.events) == 4
    assert sum(event.steps for event in trained(tmp_path / "fourth").spending.events) == 4


# ---- weights that were changed since


@quick
def test_weights_that_were_trained_without_privacy_after_the_run_are_not_saved(tmp_path: Path) -> None:
    """Finding 10, and the same with one more private step behind it."""
    made = trained(tmp_path / "run")
    made.save_model(str(tmp_path / "before"))
    train_without_privacy(made.model, tmp_path / "stock")
    assert_refused(made, tmp_path / "out")
    for trainer in (made, training.trainer(tmp_path / "next", made.model)):
        with pytest.raises(LedgerError, match="`trainer.declare_post_processing"):
            trainer.train()
    assert_refused(made, tmp_path / "out")
    assert_refused(training.trainer(tmp_path / "run", made.model), tmp_path / "out")


def scale_one_element(model: nn.Module) -> None:
    model.bert.embeddings.word_embeddings.weight.data[7, 3] *= 1 + 1e-6


def load_others(model: nn.Module) -> None:
    model.load_state_dict({name: x + 1 if x.is_floating_point() else x for name, x in model.state_dict().items()})


def replace_head(model: nn.Module) -> None:
    model.classifier = nn.Linear(8, 2)


def add_buffer(model: nn.Module) -> None:
    model.register_buffer("seen", torch.ones(3))


@quick
@pytest.mark.parametrize("change", [scale_one_element, load_others, replace_head, add_buffer])
@pytest.mark.parametrize("frozen", [False, True])
def test_any_change_by_hand_is_noticed(tmp_path: Path, change: Any, frozen: bool) -> None:
    model = zoo.small("bert")
    model.bert.requires_grad_(not frozen)
    made = trained(tmp_path / "run", model)
    made.save_model(str(tmp_path / "before"))
    change(made.model)
    assert_refused(made, tmp_path / "out")


@quick
@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end", "on_train_end"])
def test_training_without_privacy_inside_a_callback(tmp_path: Path, event: str) -> None:
    inside = at(event, lambda model: train_without_privacy(model, tmp_path / "stock"))
    made = training.trainer(tmp_path / "run", callbacks=[inside])
    if event == "on_train_end":
        made.train()
    else:
        with pytest.raises(LedgerError, match="`trainer.declare_post_processing"):
            made.train()
    if event == "on_train_begin":  # no private step was taken, and the statement says so
        made.save_model(str(tmp_path / "out"))
        assert steps(tmp_path / "out") == 0
    else:
        assert_refused(made, tmp_path / "out")


@quick
def test_a_frozen_weight_that_a_callback_writes_to_is_not_saved(tmp_path: Path) -> None:
    model = zoo.small("bert")
    model.bert.requires_grad_(False)
    made = trained(tmp_path / "run", model, callbacks=[at("on_step_end", scale_one_element)])
    assert_refused(made, tmp_path / "out", "`bert.embeddings.word_embeddings.weight`")


@quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_single_element_that_a_callback_writes_to_is_noticed_in_the_run(tmp_path: Path, dtype: torch.dtype) -> None:
    """A write to `.data` leaves torch's counters as they are."""

    def change_last_bit(model: nn.Module) -> None:
        weight = model.bert.embeddings.word_embeddings.weight.data
        weight.view(BITS[weight.element_size()])[7, 3] ^= 1

    made = training.trainer(
        tmp_path, zoo.small("bert").to(dtype), callbacks=[at("on_step_end", change_last_bit)], max_steps=3
    )
    with pytest.raises(LedgerError, match="`trainer.declare_post_processing"):
        made.train()


@quick
def test_unknown_weights_do_not_get_the_card_of_a_folder(tmp_path: Path) -> None:
    """Weights that were trained without privacy, in a trainer that has not trained, on a folder that has a history."""
    trained(tmp_path / "run").save_model()
    model = zoo.small("bert")
    train_without_privacy(model, tmp_path / "stock")
    assert_refused(
        training.trainer(tmp_path / "run", model), tmp_path / "out", "no run in .* is known to have trained"
    )


def test_a_complete_run_that_is_resumed_is_bound_to_its_weights(tmp_path: Path) -> None:
    trained(tmp_path / "run", save_strategy="steps", save_steps=4)
    again = training.trainer(tmp_path / "run", save_strategy="no")
    again.train(resume_from_checkpoint=True)
    again.save_model(str(tmp_path / "before"))
    train_without_privacy(again.model, tmp_path / "stock")
    assert_refused(again, tmp_path / "out")
    with pytest.raises(LedgerError, match="`trainer.declare_post_processing"):
        training.trainer(tmp_path / "next", again.model).train()


@quick
@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_a_loaded_model_that_was_changed_does_not_get_the_card_of_its_folder(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a later process, by a trainer that has not trained it."""
    monkeypatch.setattr("hf_private.trainer.provenance.recognise", lambda model: None)
    folder = tmp_path / "run"
    trained(folder, get_peft_model(zoo.small("bert"), LoraConfig(**LORA)) if kind == "adapter" else None).save_model()

    def loaded() -> DPTrainer:
        if kind == "whole":
            return training.trainer(folder, BertForSequenceClassification.from_pretrained(folder))
        made = training.trainer(folder, PeftModel.from_pretrained(zoo.small("bert"), str(folder), is_trainable=True))
        made.continues = folder
        return made

    loaded().save_model(str(tmp_path / "same"))
    assert steps(tmp_path / "same") == 4
    made = loaded()
    with torch.no_grad():
        next(p for p in made.model.parameters() if p.requires_grad)[0, 0] += 1e-3
    assert_refused(made, tmp_path / "out")


def test_no_card_is_written_for_files_that_were_saved_by_hand(tmp_path: Path) -> None:
    made = trained(tmp_path)
    made.save_model()
    made.create_model_card()
    changed = copy.deepcopy(made.model)
    scale_one_element(changed)
    changed.save_pretrained(tmp_path)
    with pytest.raises(LedgerError, match=r"`trainer.save_model\(\)`"):
        made.create_model_card()


# ---- buffers


class Leaking(BertForSequenceClassification):
    """Keeps the tokens of a record in a buffer that is saved, if it is longer than those of the self-check."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.register_buffer("last", torch.zeros(12, dtype=torch.long))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **rest: Any) -> Any:
        if input_ids.shape[1] > LENGTH:
            self.last.copy_(input_ids[0, :12])
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **rest)


@quick
@pytest.mark.parametrize("save", [{}, {"save_strategy": "steps", "save_steps": 1}], ids=["at the end", "during"])
def test_a_buffer_that_training_writes_to_is_not_saved(tmp_path: Path, save: dict) -> None:
    """Finding 12."""
    records = [{"input_ids": [*range(5, 17), 20 + i], "labels": i % 2} for i in range(30)]
    model = Leaking(zoo.small("bert").config)
    made = training.trainer(tmp_path / "run", model, records, dp={"expected_batch_size": 20}, **save)
    if save:
        with pytest.raises(LedgerError, match="`last`"):
            made.train()
    else:
        made.train()
    assert model.last.tolist() == list(range(5, 17)), "a record can be read"
    made.declare_post_processing("dtype")
    assert_refused(made, tmp_path / "out", "`last`")


@quick
def test_a_buffer_that_stays_is_saved(tmp_path: Path) -> None:
    model = zoo.small("bert")
    model.register_buffer("constant", torch.tensor([1.5, 0.1]))
    made = trained(tmp_path / "run", model)
    made.save_model()
    made.model.half()
    assert_refused(made, tmp_path / "out")
    made.declare_post_processing("dtype")
    made.save_model(str(tmp_path / "out"))
    assert steps(tmp_path / "out") == 4


# ---- what is saved beside weights


class Noting(BertForSequenceClassification):
    """Notes in its config what it has seen; config.json is saved and pushed."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **rest: Any) -> Any:
        if input_ids.shape[1] > LENGTH:
            self.config.seen = input_ids[0].tolist()
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **rest)


class Adding(training.Padding):
    """Adds the words of its records to a tokenizer."""

    def __init__(self, words: Any) -> None:
        self.words = words

    def __call__(self, records: list[dict[str, Any]]) -> dict[str, Tensor]:
        self.words.add_tokens([f"secret{record['input_ids'][-1]}" for record in records])
        return super().__call__(records)


@quick
@pytest.mark.parametrize("save", [{}, {"save_strategy": "steps", "save_steps": 1}], ids=["at the end", "during"])
@pytest.mark.parametrize("where", ["config.seen", "processing_class"])
def test_data_in_settings_or_a_vocabulary_is_not_saved(tmp_path: Path, where: str, save: dict) -> None:
    records = [{"input_ids": [*range(5, 17), 20 + i], "labels": i % 2} for i in range(30)]
    words = tokenizer()
    settings: dict[str, Any] = {"model": Noting(zoo.small("bert").config)}
    if where == "processing_class":
        settings = {"data_collator": Adding(words), "processing_class": words}
    made = training.trainer(tmp_path, records=records, dp={"expected_batch_size": 20}, **settings, **save)
    if save:
        with pytest.raises(LedgerError, match=f"`{where}` was changed while training ran"):
            made.train()
    else:
        made.train()
        assert_refused(made, tmp_path / "out", f"`{where}` was changed while training ran")
    assert not list(tmp_path.rglob("config.json")) and not list(tmp_path.rglob("tokenizer.json"))


class Writes(TrainerCallback):
    """Writes what it has seen into something that is saved beside the weights."""

    def __init__(self, write: Callable[[Any], None]) -> None:
        self.write = write

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        self.write(kwargs)


BESIDE: dict[str, tuple[str, Callable[[Any], None]]] = {
    "generation": (
        "generation_config.suppress_tokens",
        lambda k: _set(k["model"].generation_config, "suppress_tokens"),
    ),
    "adapter": ("peft_config.default.revision", lambda k: _set(k["model"].peft_config["default"], "revision")),
    "chat template": ("processing_class", lambda k: _set(k["processing_class"], "chat_template")),
    "tokenizer": ("processing_class", lambda k: k["processing_class"].init_kwargs.update(note="seen")),
}


def _set(config: Any, name: str) -> None:
    setattr(config, name, "seen")


@quick
@pytest.mark.parametrize("kind", BESIDE)
def test_data_in_a_file_beside_the_weights_is_not_saved(tmp_path: Path, kind: str) -> None:
    name, write = BESIDE[kind]
    model = zoo.small("gpt2")
    if kind == "adapter":
        model = get_peft_model(model, LoraConfig(target_modules=["c_attn"]))
    made = training.trainer(
        tmp_path / "run", model, training.text("itself"), callbacks=[Writes(write)], processing_class=tokenizer()
    )
    made.train()
    assert_refused(made, tmp_path / "out", f"`{name}` was changed while training ran")


@quick
def test_a_checkpoint_names_the_class_of_a_new_model(tmp_path: Path) -> None:
    made = training.trainer(tmp_path / "run", save_strategy="steps", save_steps=2)
    made.model.config.architectures = None
    made.train()
    made.save_model(str(tmp_path / "out"))
    assert steps(tmp_path / "out") == 4


@quick
def test_settings_may_change_before_and_after_a_run(tmp_path: Path) -> None:
    words = tokenizer()
    made = training.trainer(tmp_path / "run", processing_class=words)
    made.model.config.note = "before"
    made.train()
    made.model.config.id2label = {0: "no", 1: "yes"}
    words.add_tokens(["public"])
    made.save_model(str(tmp_path / "out"))
    assert steps(tmp_path / "out") == 4


@quick
def test_a_ledger_that_was_put_back_after_the_run_gives_no_card(tmp_path: Path) -> None:
    made = training.trainer(tmp_path / "run", max_steps=1)
    made.train()
    ledger = tmp_path / "run" / "_dp" / "ledger.jsonl"
    earlier = ledger.read_bytes()
    made.train()
    ledger.write_bytes(earlier)
    assert_refused(made, tmp_path / "out", "it was replaced, as by a backup")


# ---- declared post-processing


def average(made: DPTrainer) -> None:
    start = zoo.small("bert").state_dict()
    now = made.model.state_dict()
    made.model.load_state_dict({name: (x + start[name]) / 2 for name, x in now.items()})


def merge(made: DPTrainer) -> None:
    made.model = made.model.merge_and_unload()


def to_half(made: DPTrainer) -> None:
    made.model.half()


def quantize(made: DPTrainer) -> None:
    """Weights that are rounded, in new parameters."""
    made.model = copy.deepcopy(made.model)
    for p in made.model.parameters():
        p.data = (p.data * 64).round() / 64


@quick
@pytest.mark.parametrize(
    ("kind", "change"), [("average", average), ("merge", merge), ("dtype", to_half), ("quantization", quantize)]
)
def test_declared_post_processing_passes_and_the_card_says_so(tmp_path: Path, kind: str, change: Any) -> None:
    model = get_peft_model(zoo.small("bert"), LoraConfig(**LORA)) if kind == "merge" else None
    made = trained(tmp_path / "run", model)
    change(made)
    assert_refused(made, tmp_path / "out")
    with pytest.raises(ValueError, match="`post_processing`.*'average'"):
        made.declare_post_processing("epsilon = 0.1")
    assert_refused(made, tmp_path / "out")
    made.declare_post_processing(kind)
    made.save_model(str(tmp_path / "out"))
    assert steps(tmp_path / "out") == 4
    statement = read_statement(tmp_path / "out")
    assert statement["settings"]["post_processing"] == [kind]
    said = set(build_statement(statement, {})["caveats"])
    plain = {**statement, "settings": {k: v for k, v in statement["settings"].items() if k != "post_processing"}}
    assert len(said - set(build_statement(plain, {})["caveats"])) == 2


@quick
def test_what_was_declared_is_on_the_cards_of_descendants(tmp_path: Path) -> None:
    made = trained(tmp_path / "base")
    average(made)
    made.declare_post_processing("average")
    made.save_model()
    child = trained(tmp_path / "child", BertForSequenceClassification.from_pretrained(tmp_path / "base"))
    (source,) = child.privacy_record()["ledger"]["continues"]
    assert source["post_processing"] == ["average"]
    child.declare_post_processing("dtype")
    assert admitted(child.privacy_record())["post_processing"] == ["average", "dtype"], "and their own"
    made.train()
    assert made.spending.last_run["post_processing"] == ["average"]


# ---- what must go on working


@quick
def test_what_a_run_leaves_is_saved_as_often_as_one_likes(tmp_path: Path) -> None:
    made = trained(tmp_path, eval_dataset=training.text(seed=1)[:8], eval_strategy="steps", eval_steps=2)
    for folder in ("one", "two"):
        made.evaluate()
        made.save_model(str(tmp_path / folder))
    made.train()
    made.save_model()
    assert steps(tmp_path) == 8


@quick
def test_a_run_that_fails_leaves_weights_that_can_be_saved(tmp_path: Path) -> None:
    def fail(_: nn.Module) -> None:
        raise KeyboardInterrupt

    made = training.trainer(tmp_path, callbacks=[at("on_step_end", fail)])
    with pytest.raises(KeyboardInterrupt):
        made.train()
    made.save_model()
    assert steps(tmp_path) == 1
    train_without_privacy(made.model, tmp_path / "stock")
    assert_refused(made, tmp_path / "out")


def test_a_fingerprint_sees_every_element_and_type() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        x = torch.zeros(5, 4, dtype=dtype)
        seen = {fingerprint(x), fingerprint(x.reshape(4, 5))}
        for row in range(5):
            for column in range(4):
                other = x.clone()
                other[row, column] = 1
                seen.add(fingerprint(other))
                assert fingerprint(other.T.contiguous().T) == fingerprint(other), "the layout in memory does not count"
        assert len(seen) == 22
    assert fingerprint(torch.tensor(0.0)) != fingerprint(torch.tensor(-0.0))
    assert fingerprint(torch.zeros(0)) != fingerprint(torch.zeros(0, 2))
