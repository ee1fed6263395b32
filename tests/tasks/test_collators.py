"""Collators: a record's row must not depend on its neighbours, beyond padding that is marked."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_private.tasks.collators import HeldRandomness, check_collator
from hf_private.tasks.made_up import Ranges, sample, schema_of
from hf_private.tasks.micro_batches import CollatorError, LogicalCollator
from tests.support import training, zoo

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer() -> hf.PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(55))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, **dict(zip(names, SPECIAL, strict=True)))


def check(collator: Callable, records: Any, model: Any = None) -> None:
    logical = LogicalCollator(collator, max_rows=8, rows_of=("input_ids", "labels"))
    check_collator(logical.collate, records, model or zoo.small("bert"))


def choices(records: int = 12) -> list[dict[str, Any]]:
    made = []
    for index in range(records):
        rows = [[5 + index, *range(5, 6 + (index + choice) % 4)] for choice in range(3)]
        made.append({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows], "labels": index % 3})
    return made


def masked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**record, "attention_mask": [1] * len(record["input_ids"])} for record in records]


def words(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "input_ids": record["input_ids"],
            "offset_mapping": [(3 * i, 3 * i + 2) for i in range(len(record["input_ids"]))],
            "special_tokens_mask": [0] * len(record["input_ids"]),
        }
        for record in records
    ]


STOCK = {
    "default": (lambda t: hf.default_data_collator, training.images()),
    "default on equal lengths": (lambda t: hf.default_data_collator, [{"input_ids": [5, 6], "labels": 1}] * 9),
    "padding": (hf.DataCollatorWithPadding, training.text()),
    "padding to a multiple": (lambda t: hf.DataCollatorWithPadding(t, pad_to_multiple_of=8), training.text()),
    "tokens": (hf.DataCollatorForTokenClassification, training.text("tokens")),
    "seq2seq": (hf.DataCollatorForSeq2Seq, [{**r, "labels": r["input_ids"][1:]} for r in training.text()]),
    "causal": (lambda t: hf.DataCollatorForLanguageModeling(t, mlm=False), masked(training.text("itself"))),
    "causal without labels": (
        lambda t: hf.DataCollatorForLanguageModeling(t, mlm=False),
        [{"input_ids": r["input_ids"]} for r in training.text()],
    ),
    "masked": (hf.DataCollatorForLanguageModeling, masked([{"input_ids": r["input_ids"]} for r in training.text()])),
    "masked without replacement": (
        lambda t: hf.DataCollatorForLanguageModeling(t, mask_replace_prob=0.4, random_replace_prob=0.5),
        [{"input_ids": r["input_ids"]} for r in training.text()],
    ),
    "whole words": (
        lambda t: hf.DataCollatorForLanguageModeling(
            t, whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0.0
        ),
        words(training.text()),
    ),
    "choices": (hf.DataCollatorForMultipleChoice, choices()),
    "ours": (lambda t: training.Padding(), training.text()),
    "ours on tokens": (lambda t: training.Padding(), training.text("tokens")),
}


@pytest.mark.parametrize("name", STOCK)
def test_stock_collators_pass(name: str) -> None:
    build, records = STOCK[name]
    check(build(tokenizer()), records)


# ---- collators that couple records


class MixUp(training.Padding):
    """Images are mixed with those of another record, in some batches only."""

    def __init__(self, chance: float = 1.0, library: str = "torch") -> None:
        self.chance = chance
        self.library = library

    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        batch = {name: torch.stack([torch.as_tensor(r[name]) for r in records]) for name in records[0]}
        if self.library == "torch":
            happens, order = torch.rand(()) < self.chance, torch.randperm(len(records))
        elif self.library == "numpy":
            happens, order = np.random.rand() < self.chance, np.random.permutation(len(records))
        else:
            happens, order = random.random() < self.chance, random.sample(range(len(records)), len(records))
        if happens:
            batch["pixel_values"] = 0.7 * batch["pixel_values"] + 0.3 * batch["pixel_values"][order]
        return batch


class Normalised(MixUp):
    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        batch = {name: torch.stack([torch.as_tensor(r[name]) for r in records]) for name in records[0]}
        x = batch["pixel_values"]
        return batch | {"pixel_values": (x - x.mean((0, 2, 3), keepdim=True)) / x.std()}


class Shortest(training.Padding):
    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        shortest = min(len(record["input_ids"]) for record in records)
        return super().__call__([{**r, "input_ids": r["input_ids"][:shortest]} for r in records])


class OwnSeed(MixUp):
    """Draws from a generator of its own, whatever the global seeds are."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(1)

    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        batch = {name: torch.stack([torch.as_tensor(r[name]) for r in records]) for name in records[0]}
        batch["pixel_values"] = batch["pixel_values"] + float(self.generator.random())
        if self.generator.random() < 0.5:
            batch["pixel_values"] = batch["pixel_values"] + batch["pixel_values"].mean(0)
        return batch


def weighted(records: list[dict]) -> dict[str, Tensor]:
    """Class weights from the labels of the batch."""
    batch = training.Padding()(records)
    return batch | {"weights": 1 / (batch["labels"] == batch["labels"][:, None]).sum(1)}


def normaliser(records: list[dict]) -> dict[str, Any]:
    """A scalar that counts the tokens of the batch, as `num_items_in_batch` does."""
    batch = training.Padding()(records)
    return batch | {"num_items": batch["attention_mask"].sum()}


def sorted_labels(records: list[dict]) -> dict[str, Tensor]:
    batch = training.Padding()(records)
    return batch | {"labels": batch["labels"].sort().values}


COUPLED = {
    "MixUp": (MixUp(), training.images(), "`pixel_values` of a record changes"),
    "MixUp of numpy": (MixUp(library="numpy"), training.images(), "`pixel_values` of a record changes"),
    "MixUp of random, seldom": (MixUp(0.3, "random"), training.images(), "`pixel_values` of a record changes"),
    "normalised by the batch": (Normalised(), training.images(), "`pixel_values` of a record changes"),
    "cut to the shortest": (Shortest(), training.text(), "shortest"),
    "a generator of its own": (OwnSeed(), training.images(), "`pixel_values` of a record changes"),
    "class weights": (weighted, training.text(), "`weights` of a record changes"),
    "a count of tokens": (normaliser, training.text(), "`num_items` changes"),
    "sorted labels": (sorted_labels, training.text(), "`labels` of a record changes"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_collators_that_couple_records_are_refused(name: str) -> None:
    collator, records, message = COUPLED[name]
    with pytest.raises(CollatorError, match=message):
        check(collator, records)


# ---- finding 2: records whose lengths nobody can read


def text_records(kind: str) -> list[Any]:
    texts = [" ".join(f"w{token}" for token in record["input_ids"]) for record in training.text("itself")]
    return {
        "text": texts,
        "pairs": [(text, 1) for text in texts],
        "mappings": [{"text": text} for text in texts],
        "tensors": [torch.tensor(record["input_ids"]) for record in training.text()],
    }[kind]


def language_model_collator(masks: bool, labels: str) -> Callable[[list[Any]], dict[str, Tensor]]:
    """Tokenises, pads with an ordinary token as GPT-2 users do, and copies the tokens to the labels."""

    def collate(records: list[Any]) -> dict[str, Tensor]:
        encode = tokenizer()
        rows = []
        for record in records:
            record = record[0] if isinstance(record, tuple) else record
            record = record["text"] if isinstance(record, dict) else record
            rows.append(record if isinstance(record, Tensor) else torch.tensor(encode(record)["input_ids"]))
        ids = pad_sequence(rows, batch_first=True, padding_value=7)
        real = pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True).long()
        batch = {"input_ids": ids, "labels": ids.clone() if labels == "copied" else ids.where(real == 1, -100)}
        return batch | ({"attention_mask": real} if masks else {})

    return collate


@pytest.mark.parametrize("kind", ["text", "pairs", "mappings", "tensors"])
@pytest.mark.parametrize(
    ("masks", "labels", "message"),
    [
        (False, "copied", "`attention_mask`"),
        (False, "ignored", "`attention_mask`"),
        (True, "copied", "`labels` of a record grows"),
        (True, "ignored", None),
    ],
)
def test_tokens_made_in_the_collator_need_a_mask(kind: str, masks: bool, labels: str, message: str | None) -> None:
    collator = language_model_collator(masks, labels)
    if message is None:
        check(collator, text_records(kind), zoo.small("gpt2"))
        return
    with pytest.raises(CollatorError, match=message):
        check(collator, text_records(kind), zoo.small("gpt2"))


def test_a_batch_of_unknown_lengths_needs_a_mask_at_every_step() -> None:
    logical = LogicalCollator(language_model_collator(False, "ignored"), max_rows=8, rows_of=("input_ids",))
    texts = text_records("text")
    with pytest.raises(CollatorError, match="`attention_mask`"):
        logical(texts)
    logical(texts[:1])  # one record has no neighbour
    logical(text_records("tensors")[:1] * 4)  # tensors of one shape have one length
    LogicalCollator(language_model_collator(True, "ignored"), max_rows=8, rows_of=("input_ids",))(texts)


# ---- what the check runs on, and what it tells


class Lookup:
    """Needs real records: it reads a table by their ids."""

    def __init__(self, couples: bool) -> None:
        self.couples = couples
        self.table = {1000 + i: torch.randn(3, 8, 8) for i in range(training.RECORDS)}

    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        images = torch.stack([self.table[record["patient"]] for record in records])
        if self.couples:
            images = images - images.mean(0)
        return {"pixel_values": images, "labels": torch.tensor([record["labels"] for record in records])}


def test_a_collator_that_needs_real_records_is_tested_on_them() -> None:
    records = [{"patient": 1000 + i, "labels": i % 2} for i in range(training.RECORDS)]
    check(Lookup(couples=False), records, zoo.small("vit"))
    with pytest.raises(CollatorError, match="`pixel_values`") as caught:
        check(Lookup(couples=True), records, zoo.small("vit"))
    assert "1000" not in str(caught.value)


def test_no_message_quotes_a_record() -> None:
    """The collator's own error would: `could not convert string to float: 'secret...'`."""

    def collate(records: list[dict]) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[float(record["text"])] for record in records])}

    records = [{"text": f"secret diagnosis {i}", "labels": 0} for i in range(9)]
    with pytest.raises(CollatorError, match="ValueError.*`input_ids`") as caught:
        check(collate, records)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_made_up_records_have_the_schema_and_not_the_content() -> None:
    records = [{"input_ids": [50] * n, "labels": 1, "x": np.full((n, 2), 7.0), "fixed": [9, 9]} for n in (2, 5, 3)]
    make = schema_of(records, Ranges(torch.arange(5, 20), 2))
    made = make(11, torch.Generator().manual_seed(0))
    assert len(made["input_ids"]) == 11 and made["x"].shape == (11, 2) and len(made["fixed"]) == 2
    assert made["x"].dtype == np.float64 and 50 not in made["input_ids"] and 7.0 not in made["x"]


def test_samples_are_spread_over_the_dataset() -> None:
    assert sample(range(1000), 3) == [0, 500, 999] and sample([4], 3) == [4]
    assert sample(range(5), 16) == [0, 1, 2, 3, 4]


def test_the_check_leaves_the_generators_alone() -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    check(training.Padding(), training.text())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate() and states[2] == np.random.get_state()[1].tolist()


def test_held_randomness_does_not_depend_on_the_shape() -> None:
    with HeldRandomness(0.3):
        assert torch.rand(2).tolist() == pytest.approx([0.3, 0.3]) and torch.randint(9, (3,)).tolist() == [1, 1, 1]
        assert torch.bernoulli(torch.tensor([0.2, 0.8])).tolist() == [0.0, 1.0]
        assert torch.empty(2).bernoulli_(0.8).tolist() == [1.0, 1.0]
        assert torch.randperm(3).tolist() == [0, 1, 2]
