"""Attacks on the guarantee, and mistakes that would cost budget: each is refused, before anything is charged."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset
from transformers import DataCollatorWithPadding, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback

from hf_private.config import DPConfig
from hf_private.tasks.training_records import TrainingRecords
from hf_private.trainer.log_filter import LogFilter
from hf_private.trainer.trainer import DPTrainer
from tests.support import training, zoo
from tests.tasks.test_collators import MixUp, tokenizer


def charged(folder: Path) -> int:
    return training.steps(folder) if (folder / "_dp" / "ledger.jsonl").exists() else 0


def mixed(cls: type, folder: Path, **settings: Any) -> DPTrainer:
    """A trainer of a class of its own, on the usual records."""
    return cls(
        model=zoo.small("bert"),
        args=settings.pop("args", None) or training.arguments(folder),
        dp_config=DPConfig(**{"noise_multiplier": 1.0, "accountant": "rdp", **settings.pop("dp", {})}),
        train_dataset=training.text(),
        data_collator=training.Padding(),
        **settings,
    )


# ---- collators


def test_a_collator_that_mixes_records_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    made = training.trainer(tmp_path, zoo.small("vit"), training.images(), data_collator=MixUp())
    with pytest.raises(ValueError, match="`data_collator`.*`pixel_values`"):
        made.train()
    assert charged(tmp_path) == 0
    alone = training.trainer(
        tmp_path, zoo.small("vit"), training.images(), data_collator=MixUp(), per_device_train_batch_size=1,
        dp={"expected_batch_size": 4}, max_steps=1,
    )  # fmt: skip
    alone.train()  # a record that is alone has nobody to be mixed with


@pytest.mark.parametrize("name", ["packing", "padding_free"])
def test_trl_arguments_that_join_records_are_refused(tmp_path: Path, name: str) -> None:
    args = training.arguments(tmp_path)
    setattr(args, name, True)
    with pytest.raises(ValueError, match=f"`{name}` = True"):
        training.trainer(tmp_path, args=args)


def test_a_collator_with_a_seed_of_its_own_is_refused(tmp_path: Path) -> None:
    """Whoever knows the seed knows the masks."""
    collator = training.Padding()
    collator.seed = 42
    with pytest.raises(ValueError, match="`data_collator.seed` = 42"):
        training.trainer(tmp_path, data_collator=collator)


def test_untokenized_text_is_told(tmp_path: Path) -> None:
    records = [{"text": f"secret {i}", "labels": i % 2} for i in range(40)]
    made = training.trainer(
        tmp_path, records=records, data_collator=DataCollatorWithPadding(tokenizer()), remove_unused_columns=False
    )
    with pytest.raises(ValueError, match="`data_collator`.*`input_ids`") as caught:
        made.train()
    assert "secret" not in str(caught.value) and charged(tmp_path) == 0


# ---- mistakes in the data


def spoiled(field: str, value: Any, kind: str = "class") -> list[dict[str, Any]]:
    records = training.text(kind)
    records[17][field] = value
    return records


MISTAKES = {
    "too long": ("input_ids", [5] * 17, "`input_ids` in row 17.*at most 16 elements .`max_position_embeddings`"),
    "no token": ("input_ids", [], "`input_ids` in row 17.*at least 1 element"),
    "unknown word": ("input_ids", [5, 60], "`input_ids` in row 17.*below 60 .`vocab_size`"),
    "negative word": ("input_ids", [5, -1], "`input_ids` in row 17.*at least 0"),
    "unknown class": ("labels", 2, "`labels` in row 17.*below 2 .`num_labels`"),
    "no class": ("labels", None, "`labels` in row 17.*must not be missing"),
    "class of text": ("labels", "malignant", "`labels` in row 17.*must hold numbers, got text"),
    "words of text": ("input_ids", "a secret", "`input_ids` in row 17.*must hold numbers, got text"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("container", ["list", "dataset", "subset"])
def test_a_mistake_in_the_data_costs_nothing(tmp_path: Path, name: str, container: str) -> None:
    field, value, message = MISTAKES[name]
    records: Any = spoiled(field, value)
    if container == "dataset":
        if isinstance(value, str):  # a column has one type
            pytest.skip("Arrow refuses it")
        records = datasets.Dataset.from_list(records)
    elif container == "subset":
        records = Subset(records, range(40))
    with pytest.raises(ValueError, match=message) as caught:
        training.trainer(tmp_path, records=records).train()
    assert charged(tmp_path) == 0
    assert "malignant" not in str(caught.value) and "secret" not in str(caught.value)


def test_a_column_of_text_labels_is_told(tmp_path: Path) -> None:
    texts = [{**record, "labels": "malignant"} for record in training.text()]
    with pytest.raises(ValueError, match="`labels` in row 0.*got text"):
        training.trainer(tmp_path, records=datasets.Dataset.from_list(texts)).train()


def test_labels_of_tokens_are_checked_too(tmp_path: Path) -> None:
    for value, message in (([3, 3, 3], "below 3 .`num_labels`"), ([0] * 5, "one element for each of `input_ids`")):
        records = spoiled("labels", value, "tokens")
        records[17]["input_ids"] = [5, 6, 7]
        for dataset in (records, datasets.Dataset.from_list(records)):
            with pytest.raises(ValueError, match=f"`labels` in row 17.*{message}"):
                training.trainer(tmp_path, zoo.small("bert-token", num_labels=3), dataset).train()
    assert charged(tmp_path) == 0


class Truncating(training.Padding):
    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        return super().__call__([{**record, "input_ids": record["input_ids"][:9]} for record in records])


def test_what_the_collator_repairs_is_no_mistake(tmp_path: Path) -> None:
    for dataset in (spoiled("input_ids", [5] * 30), datasets.Dataset.from_list(spoiled("input_ids", [5] * 30))):
        training.trainer(tmp_path, records=dataset, data_collator=Truncating(), max_steps=1).train()


WRONG: dict[str, tuple[Callable[[dict], dict], str, str]] = {  # what is done to a record, the model, what is told
    "float tokens": (lambda r: {**r, "input_ids": [*map(float, r["input_ids"])]}, "bert", "input_ids float32"),
    "float classes": (lambda r: {**r, "labels": float(r["labels"])}, "bert", "`labels`.*labels float32"),
    "no labels": (lambda r: {"input_ids": r["input_ids"]}, "bert", "must hold labels"),
    "another size": (lambda r: {**r, "pixel_values": torch.zeros(3, 40, 40)}, "vit", r"\(2, 3, 40, 40\)"),
    "no colours": (lambda r: {**r, "pixel_values": torch.zeros(1, 12, 12)}, "vit", r"\(2, 1, 12, 12\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_records_that_the_model_cannot_take_cost_nothing(tmp_path: Path, name: str) -> None:
    change, model, message = WRONG[name]
    records = [change(record) for record in (training.images() if model == "vit" else training.text())]
    padding = training.Padding() if "labels" in records[0] else DataCollatorWithPadding(tokenizer())
    collator = None if model == "vit" else padding
    made = training.trainer(tmp_path, zoo.small(model), records, data_collator=collator)
    with pytest.raises(ValueError, match=f"`train_dataset` must hold records that the model takes.*{message}"):
        made.train()
    assert charged(tmp_path) == 0


class Quoting(training.Padding):
    """As `int("malignant")` does."""

    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        if len(records) == 2:
            raise ValueError(f"no such class: {records[0]['labels']}, malignant")
        return super().__call__(records)


class QuotingAlone(training.Padding):
    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        raise ValueError(f"no such class: {records[0]['labels']}, malignant")


def test_an_error_of_the_users_code_is_not_quoted(tmp_path: Path) -> None:
    made = training.trainer(tmp_path, data_collator=Quoting(), public_examples=training.text(seed=4))
    with pytest.raises(ValueError, match="`data_collator`.*ValueError") as caught:
        made.train()
    alone = training.trainer(tmp_path, per_device_train_batch_size=1, data_collator=QuotingAlone())
    with pytest.raises(ValueError, match="`train_dataset`.*ValueError") as alone_caught:
        alone.train()
    assert (
        "malignant" not in str(alone_caught.value)
        and "malignant" not in str(caught.value)
        and caught.value.__suppress_context__
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("labels", 7, "`labels`"),
        ("input_ids", [5] * 17, "`input_ids`"),
    ],
)
def test_what_fails_inside_a_step_names_the_field(tmp_path: Path, field: str, value: Any, message: str) -> None:
    dp = {"check_dataset": False, "expected_batch_size": 40}
    made = training.trainer(tmp_path, records=spoiled(field, value), dp=dp, per_device_train_batch_size=40)
    with pytest.raises(ValueError, match=message) as caught:
        made.train()
    assert caught.value.__suppress_context__, "torch's own message may quote the label"


# ---- training records that are evaluated


def copies(dataset: datasets.Dataset) -> dict[str, Any]:
    rows = dataset.to_list()
    padded = [{**row, "input_ids": row["input_ids"] + [0] * (12 - len(row["input_ids"]))} for row in rows]
    return {
        "select": dataset.select(range(5)),
        "shuffled": dataset.shuffle(seed=1),
        "with_format": dataset.with_format("torch"),
        "list": copy.deepcopy(rows),
        "subset": Subset(dataset, range(3, 30)),
        "tensors": [{name: torch.tensor(value) for name, value in row.items()} for row in rows],
        "arrays": [{name: np.array(value) for name, value in row.items()} for row in rows[:4]],
        "padded": padded,
        "relabelled": [{**row, "labels": 1 - row["labels"]} for row in rows],
        "other columns": dataset.add_column("idx", list(range(100, 100 + len(dataset)))),
        "another class": Rows(rows),
        "half of it": [*training.text(seed=5)[:20], *rows[:20]],
        "a tenth of it": [*training.text(seed=5), *training.text(seed=6), *rows[:8]],
    }


class Rows:
    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.rows[index]


@pytest.mark.parametrize("kind", copies(datasets.Dataset.from_list(training.text())))
def test_training_records_are_not_evaluated_in_any_container(tmp_path: Path, kind: str) -> None:
    dataset = datasets.Dataset.from_list(training.text())
    for records in (dataset, training.text()):
        made = training.trainer(tmp_path, records=records)
        for action in (made.evaluate, made.predict):
            with pytest.raises(ValueError, match="`eval_dataset`"):
                action(copies(dataset)[kind])
        made = training.trainer(tmp_path, records=records, eval_dataset=copies(dataset)[kind], eval_strategy="steps")
        with pytest.raises(ValueError, match="`eval_dataset`"):
            made.train()
    assert charged(tmp_path) == 0


def test_a_hand_made_loader_of_training_records_is_not_evaluated(tmp_path: Path) -> None:
    made = training.trainer(tmp_path)
    loader = DataLoader(copy.deepcopy(training.text()), batch_size=8, collate_fn=training.Padding())
    with pytest.raises(ValueError, match="`eval_dataset`"):
        made.evaluation_loop(loader, "Evaluation")


class Stream(IterableDataset):
    def __init__(self, records: list[dict]) -> None:
        self.records = records

    def __iter__(self) -> Any:
        return iter(self.records)


@pytest.mark.parametrize("kind", [Stream, lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset()])
def test_a_stream_of_training_records_is_not_evaluated(tmp_path: Path, kind: Callable[[list[dict]], Any]) -> None:
    made = training.trainer(tmp_path)
    with pytest.raises(ValueError, match="`eval_dataset`"):
        made.evaluate(kind(copy.deepcopy(training.text())))
    assert "eval_loss" in made.evaluate(kind(training.text(seed=3)))


def test_training_records_are_not_taken_for_public_ones(tmp_path: Path) -> None:
    """The self-check depends on `public_examples`, and a public subspace on `anchor_dataset`, without noise."""
    copied = [{**row, "input_ids": row["input_ids"] + [0] * 3} for row in training.text()[:20]]
    public = training.text(seed=4)
    with pytest.raises(ValueError, match="`public_examples` must hold public records"):
        training.trainer(tmp_path, public_examples=copied).train()
    with pytest.raises(ValueError, match="`anchor_dataset` must hold public records"):
        training.trainer(tmp_path, anchor_dataset=copied, dp={"anchors": {"k": 20}}).train()
    assert charged(tmp_path) == 0
    training.trainer(tmp_path, public_examples=public, max_steps=1).train()


def test_other_records_are_evaluated_and_predicted(tmp_path: Path) -> None:
    made = training.trainer(tmp_path)
    other = training.text(seed=3)
    assert "eval_loss" in made.evaluate(other) and "test_loss" in made.predict(other).metrics
    assert "eval_loss" in made.evaluate([*other, training.text()[0]]), "a short text may be written twice"
    assert "eval_dev_loss" in made.evaluate({"dev": other})
    open_ = training.trainer(tmp_path, dp={"log_nonprivate": True})
    assert "eval_loss" in open_.evaluate(copy.deepcopy(training.text()))


def test_equal_content_has_equal_hashes_in_columns_and_in_rows() -> None:
    rows = [{"x": [1.5, 2.5], "text": f"t{i}", "n": [i, [1][0]]} for i in range(30)]
    dataset = datasets.Dataset.from_list(rows)
    for known, other in ((rows, dataset), (dataset, rows), (dataset, dataset.with_format("torch"))):
        assert TrainingRecords(known, "input_ids").overlap(other).share == 1.0
    assert TrainingRecords(rows[:15], "input_ids").overlap(dataset).share == 0.5
    images = training.images()
    assert TrainingRecords(images, "pixel_values").overlap(copy.deepcopy(images)[:7]).share == 1.0


def dialogues(seed: int, records: int) -> list[dict[str, Any]]:
    """Turns of which 30 % are one of twenty short ones."""
    draw = np.random.default_rng(seed)
    short = [[5 + n, 6] for n in range(20)]
    return [
        {"input_ids": short[draw.integers(20)] if draw.random() < 0.3 else draw.integers(5, 50, 6).tolist()}
        for _ in range(records)
    ]


def test_records_may_recur_in_an_evaluation_set_as_often_as_in_the_training_set() -> None:
    train = dialogues(0, 2000)
    known = TrainingRecords(train, "input_ids")
    honest = known.overlap(dialogues(1, 500))
    assert 0.2 < honest.share <= honest.allowed
    mixed = known.overlap([*dialogues(1, 500), *train[:60]])
    assert mixed.share > mixed.allowed
    repeated = TrainingRecords([*train, *train], "input_ids").overlap([*dialogues(1, 500), *train[:150]])
    assert repeated.natural == 1.0 and repeated.share > repeated.allowed, "repeating the training set hides nothing"


# ---- what is logged


class AddsMetrics(Trainer):
    """As SFTTrainer: metrics of the training tokens are added behind the back of the class before it."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        prefix = "" if "eval_loss" not in logs else "eval_"
        super().log(logs | {f"{prefix}mean_token_accuracy": 0.123, f"{prefix}entropy": 4.56}, start_time)


class Reporter(TrainerCallback):
    """Sees what a reporter would."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **_: Any) -> None:
        self.seen |= logs or {}


class Combined(DPTrainer, AddsMetrics):
    pass


@pytest.mark.parametrize("attack", ["none", "removed", "before"])
def test_metrics_that_a_subclass_adds_are_not_logged(tmp_path: Path, attack: str) -> None:
    reporter = Reporter()
    args = training.arguments(tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=4)
    made = mixed(Combined, tmp_path, args=args, eval_dataset=training.text(seed=1))
    if attack == "removed":
        made.remove_callback(LogFilter)
    if attack == "before":
        made.callback_handler.callbacks.insert(0, reporter)
    else:
        made.add_callback(reporter)
    made.train()
    names = {name for entry in made.state.log_history for name in entry}
    for seen in (names, set(reporter.seen)):
        assert not seen & {"mean_token_accuracy", "entropy", "loss", "train_loss"}
        assert {"eval_mean_token_accuracy", "eval_loss", "learning_rate"} <= seen
    assert '"entropy"' not in (tmp_path / "checkpoint-4" / "trainer_state.json").read_text()


def test_a_callback_that_pushes_ahead_sees_filtered_entries(tmp_path: Path) -> None:
    class PushesAhead(Reporter):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            made.callback_handler.callbacks.remove(self)
            made.callback_handler.callbacks.insert(0, self)

    reporter = PushesAhead()
    made = mixed(Combined, tmp_path, callbacks=[reporter])
    made.train()
    assert "learning_rate" in reporter.seen and "entropy" not in reporter.seen


def test_metrics_that_a_subclass_adds_are_logged_by_name_if_asked_for(tmp_path: Path) -> None:
    made = mixed(Combined, tmp_path, dp={"log_nonprivate": True})
    made.train()
    names = {name for entry in made.state.log_history for name in entry}
    assert {"nonprivate_entropy", "nonprivate_loss"} <= names and "entropy" not in names


# ---- what Trainer's users expect


def test_overrides_that_would_have_no_effect_are_refused(tmp_path: Path) -> None:
    class Sampler(DPTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    class Loader(DPTrainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset)

    for cls, name in ((Sampler, "_get_train_sampler"), (Loader, "get_train_dataloader")):
        with pytest.raises(ValueError, match=f"`{name}`"):
            mixed(cls, tmp_path)
    made = training.trainer(tmp_path)
    made.get_train_dataloader = lambda: DataLoader(training.text())
    with pytest.raises(ValueError, match="`get_train_dataloader`"):
        made.train()


def test_arguments_that_would_have_no_effect_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`dataloader_drop_last` = True"):
        training.trainer(tmp_path, dataloader_drop_last=True)
    args = Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match="`predict_with_generate` = True.*Seq2SeqTrainer"):
        training.trainer(tmp_path, zoo.small("t5"), training.text("itself"), args=args)

    class Generates(DPTrainer, Seq2SeqTrainer):
        pass

    mixed(Generates, tmp_path, args=args)


def test_a_step_that_leaves_the_mechanism_out_is_stopped(tmp_path: Path) -> None:
    class Bypass(DPTrainer):
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = torch.zeros(())
            for batch in inputs.micro_batches:
                loss = model(**batch).loss
                loss.backward()
            return loss.detach()

    made = mixed(Bypass, tmp_path)
    before = training.weights(made.model)
    with pytest.raises(RuntimeError, match="`training_step`"):
        made.train()
    assert torch.equal(before, training.weights(made.model))


class TwoLabels(nn.Module):
    """A model that Transformers does not know, with labels of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(zoo.VOCABULARY, 8)
        self.heads = nn.Linear(8, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        mask = attention_mask.unsqueeze(-1)
        return {"logits": self.heads((self.words(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1))}


class TwoLabelPadding(training.Padding):
    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        batch = super().__call__([{**record, "labels": 0} for record in records])
        del batch["labels"]
        return batch | {name: torch.tensor([record[name] for record in records]) for name in ("mood", "topic")}


def test_several_label_names_and_a_custom_head_with_its_loss(tmp_path: Path) -> None:
    """Nothing has to be overridden: the self-check makes up records with the dataset's schema."""
    records = [{"input_ids": r["input_ids"], "mood": i % 2, "topic": i % 2} for i, r in enumerate(training.text())]
    seen: list[set[str]] = []

    def loss(outputs: dict[str, Tensor], labels: dict[str, Tensor]) -> Tensor:
        seen.append(set(labels))
        first, second = outputs["logits"].split(2, -1)
        cross_entropy = nn.functional.cross_entropy
        return cross_entropy(first, labels["mood"], reduction="none") + cross_entropy(
            second, labels["topic"], reduction="none"
        )

    made = training.trainer(
        tmp_path, TwoLabels(), records, per_sample_loss=loss, data_collator=TwoLabelPadding(),
        label_names=["mood", "topic"], remove_unused_columns=False,
    )  # fmt: skip
    made.train()
    assert training.steps(tmp_path) == 4 and all(names == {"mood", "topic"} for names in seen)


def test_a_custom_head_that_cannot_be_made_up_is_told_what_to_override(tmp_path: Path) -> None:
    class Opaque:
        pass

    def collate(records: list[Any]) -> dict[str, Tensor]:
        return {"input_ids": torch.ones(len(records), 3).long(), "labels": torch.ones(len(records)).long()}

    made = training.trainer(
        tmp_path, TwoLabels(), [Opaque() for _ in range(40)], data_collator=collate,
        per_sample_loss=lambda outputs, labels: outputs["logits"].sum(-1), per_device_train_batch_size=1,
        dp={"expected_batch_size": 4},
    )  # fmt: skip
    with pytest.raises(ValueError, match="`public_examples`.*TwoLabels"):
        made.train()


def test_adalora_is_refused_while_it_has_a_regulariser() -> None:
    from hf_private.tasks.losses import PerSampleLoss

    base = {"target_modules": ["query"], "init_r": 4, "target_r": 2, "total_step": 9, "tinit": 1, "tfinal": 1}
    with pytest.raises(ValueError, match="`orth_reg_weight`"):
        PerSampleLoss(get_peft_model(zoo.small("bert"), AdaLoraConfig(**base)))
    PerSampleLoss(get_peft_model(zoo.small("bert"), AdaLoraConfig(**base, orth_reg_weight=0.0)))
    PerSampleLoss(get_peft_model(zoo.small("bert"), LoraConfig(target_modules=["query"])))


# ---- rehearsal


def test_a_rehearsal_runs_everything_and_charges_nothing(tmp_path: Path) -> None:
    computed: list[int] = []

    def metrics(predicted: Any) -> dict[str, float]:
        computed.append(len(predicted.predictions))
        return {"accuracy": 1.0}

    made = training.trainer(tmp_path, eval_dataset=training.text(seed=1), compute_metrics=metrics)
    before, files = training.weights(made.model), training.files(tmp_path)
    made.rehearse(steps=2)
    assert torch.equal(before, training.weights(made.model)) and training.files(tmp_path) == files
    assert computed and charged(tmp_path) == 0
    made.train()
    assert training.steps(tmp_path) == 4


def test_a_rehearsal_fails_where_the_run_would(tmp_path: Path) -> None:
    broken = training.trainer(tmp_path, zoo.small("vit"), training.images(), data_collator=MixUp())
    with pytest.raises(ValueError, match="`data_collator`"):
        broken.rehearse()
    assert not training.files(tmp_path)


def test_a_rehearsal_does_not_read_content(tmp_path: Path) -> None:
    secret = 59
    records = [{"input_ids": [secret] * (3 + i % 5), "labels": i % 2} for i in range(40)]
    seen: list[set[int]] = []

    class Watching(training.Padding):
        def __call__(self, batch: list[dict]) -> dict[str, Tensor]:
            seen.extend(set(record["input_ids"]) for record in batch)
            return super().__call__(batch)

    training.trainer(tmp_path, records=records, data_collator=Watching()).rehearse(steps=1)
    assert seen and {secret} not in seen
