"""What DPTrainer refuses, before and while it trains."""

import copy
import math
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Subset
from transformers import Trainer, TrainerCallback

from hf_private.config import DPConfig
from hf_private.trainer.guards import order_of
from hf_private.trainer.trainer import DPTrainer
from tests.support import training, zoo

# ---- guards


def test_an_optimizer_of_another_copy_is_refused(tmp_path: Path) -> None:
    model, copy = zoo.small("bert"), zoo.small("bert")
    optimizer = torch.optim.SGD(copy.parameters(), lr=0.1)
    made = training.trainer(tmp_path, model, optimizers=(optimizer, None))
    with pytest.raises(ValueError, match="`optimizers`.*`bert.embeddings"):
        made.train()
    both = torch.optim.SGD([*model.parameters(), *copy.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="`optimizers`"):
        training.trainer(tmp_path / "both", model, optimizers=(both, None)).train()
    assert not training.files(tmp_path / "_dp") or training.steps(tmp_path) == 0, "nothing was spent"


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_an_optimizer_that_has_taken_steps_is_refused(tmp_path: Path, name: str) -> None:
    """Its momentum may be made of private gradients without noise."""
    model = zoo.small("bert")
    kind = getattr(torch.optim, name)
    optimizer = kind(model.parameters(), lr=0.01, **({"momentum": 0.9} if name == "SGD" else {}))
    model(**training.Padding()(training.text())).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match="`optimizers` must hold an optimizer without a state"):
        training.trainer(tmp_path, model, optimizers=(optimizer, None)).train()
    assert not training.files(tmp_path / "_dp") or training.steps(tmp_path) == 0
    for fresh in (kind(model.parameters(), lr=0.01), torch.optim.Adagrad(model.parameters())):
        made = training.trainer(tmp_path / "fresh", model, optimizers=(fresh, None), max_steps=1)
        made.train()
        made.train()  # its own steps were private


class WritesFrozen(TrainerCallback):
    """Gives a frozen weight a gradient, which an optimizer of all weights would take."""

    def on_step_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        frozen = model.bert.embeddings.word_embeddings.weight
        frozen.grad = torch.ones_like(frozen)


def test_a_gradient_of_a_frozen_weight_stops_the_step(tmp_path: Path) -> None:
    model = zoo.small("bert")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.bert.embeddings.requires_grad_(False)
    before = training.weights(model)
    with pytest.raises(RuntimeError, match="`bert.embeddings.word_embeddings.weight`"):
        training.trainer(tmp_path, model, optimizers=(optimizer, None), callbacks=[WritesFrozen()]).train()
    assert torch.equal(before, training.weights(model))


@pytest.mark.parametrize(("value", "named"), [(None, "none"), (0.0, "zero"), (math.nan, "not finite")])
def test_a_parameter_without_a_gradient_is_an_error(tmp_path: Path, value: float | None, named: str) -> None:
    made = training.trainer(tmp_path)
    attach = made._attach

    def broken(*args: Any) -> None:
        attach(*args)
        step, parameter = made._mechanism.step, made.model.classifier.bias

        def wrong(batches: Any) -> None:
            step(batches)
            parameter.grad = None if value is None else torch.full_like(parameter, value)

        made._mechanism.step = wrong

    made._attach = broken
    with pytest.raises(RuntimeError, match=f"`classifier.bias`.*got .*{named}"):
        made.train()


@pytest.mark.parametrize("change", ["frozen", "unfrozen", "replaced"])
def test_what_is_trained_stays_so_in_a_run(tmp_path: Path, change: str) -> None:
    """As a callback for gradual unfreezing would have it: the engine knows only what it was attached to."""

    class Change(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
            if state.global_step == 2 and change == "replaced":
                model.classifier = nn.Linear(8, 2)
            elif state.global_step == 2:
                model.classifier.requires_grad_(change == "unfrozen")

    made = training.trainer(tmp_path, callbacks=[Change()])
    made.model.classifier.requires_grad_(change != "unfrozen")
    with pytest.raises(RuntimeError, match=f"`classifier.weight`.*got {change} \\(2 "):
        made.train()
    assert training.steps(tmp_path) == 2


class Packing(training.Padding):
    """Two records in a row."""

    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        pairs = [records[i : i + 2] for i in range(0, len(records), 2)]
        joined = [{**pair[0], "input_ids": sum((r["input_ids"][:4] for r in pair), [])} for pair in pairs]
        return super().__call__(joined)


class Splitting(training.Padding):
    """Several rows for a long record, each of which would be clipped by itself."""

    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        parts = [{**r, "input_ids": r["input_ids"][i : i + 3]} for r in records for i in range(0, 9, 3)]
        return super().__call__([part for part in parts if part["input_ids"]])


@pytest.mark.parametrize("collator", [Packing(), Splitting()], ids=["packing", "splitting"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_must_be_a_record(tmp_path: Path, collator: Any, workers: int) -> None:
    made = training.trainer(tmp_path, data_collator=collator, dataloader_num_workers=workers)
    with pytest.raises(ValueError, match="`data_collator`.*, got"):
        made.train()


class Noisy(Dataset):
    """Augments by numpy's global generator."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, np.random.rand()


def test_the_order_of_records_shows() -> None:
    """By it ranks see whether they share the records, whatever class holds them."""
    records = training.text()
    orders = [order_of(x) for x in (records, records[::-1], Subset(records, range(9)), Subset(records, range(1, 10)))]
    assert len(set(orders)) == 4 and all(order[1] for order in orders)
    assert order_of(datasets.Dataset.from_list(records)) == order_of(datasets.Dataset.from_list(records))
    assert order_of(Noisy()) == order_of(Noisy()) and order_of(Noisy())[1]


class Unmasked(training.Padding):
    """Padding that nothing marks."""

    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        batch = super().__call__(records)
        del batch["attention_mask"]
        return batch


class AllMarked(training.Padding):
    """Padding that is marked as text, in a mask of ones."""

    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        batch = super().__call__(records)
        return batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}


class Embedded(training.Padding):
    """Vectors instead of tokens, padded with zeros, their mask as `marked`: None, of ones, or right."""

    def __init__(self, marked: str | None) -> None:
        self.marked = marked

    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        vectors = [record["inputs_embeds"] for record in records]
        batch = {"inputs_embeds": pad_sequence(vectors, True), "labels": torch.tensor([r["labels"] for r in records])}
        mask = pad_sequence([torch.ones(len(x)) for x in vectors], True)
        masks = {None: {}, "all": {"attention_mask": torch.ones_like(mask)}, "right": {"attention_mask": mask}}
        return batch | masks[self.marked]


@pytest.mark.parametrize("marked", [None, "all", "right"])
def test_padding_of_what_is_not_tokens_must_be_marked_too(tmp_path: Path, marked: str | None) -> None:
    records = [{"inputs_embeds": torch.randn(n, 8), "labels": n % 2} for n in range(2, 16)]
    model = zoo.small("bert", hidden_size=8)
    model.get_input_embeddings().requires_grad_(False)  # nobody looks a word up
    made = training.trainer(tmp_path, model, records=records, data_collator=Embedded(marked))
    if marked == "right":
        made.train()
        return
    with pytest.raises(ValueError, match="`inputs_embeds`.*`per_device_train_batch_size=1`"):
        made.train()


class Ending(training.Padding):
    """A token more for each record, which is no padding."""

    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        return super().__call__([{**record, "input_ids": [*record["input_ids"], 4]} for record in records])


class Images(training.Padding):
    """Records with two images and with none, in one tensor."""

    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        return super().__call__(records) | {"pixel_values": torch.zeros(2 * (len(records) // 2 + 1), 3)}


@pytest.mark.parametrize(
    ("collator", "message"),
    [
        (Unmasked(), "`attention_mask`.*got none"),
        (AllMarked(), "`attention_mask`.*got a record of"),
        (Images(), "got .* rows of `pixel_values`"),
    ],
    ids=["unmasked", "all marked", "images"],
)
def test_padding_must_be_marked_and_nothing_flattened(tmp_path: Path, collator: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training.trainer(tmp_path, data_collator=collator).train()


def test_a_run_that_failed_before_its_first_step_can_be_tried_again(tmp_path: Path) -> None:
    made = training.trainer(tmp_path, data_collator=Unmasked())
    with pytest.raises(ValueError, match="`attention_mask`"):
        made.train()
    made.data_collator = training.Padding()
    made.train()
    assert training.steps(tmp_path) == 4


def test_a_collator_may_add_a_token_to_every_record(tmp_path: Path) -> None:
    training.trainer(tmp_path, data_collator=Ending()).train()
    assert training.steps(tmp_path) == 4


def test_gradient_hooks_are_refused(tmp_path: Path) -> None:
    """A micro-batch of one record lets autograd compute some gradients: a hook would see them."""
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        made = training.trainer(tmp_path / register)
        getattr(made.model.classifier.weight, register)(lambda _: None)
        with pytest.raises(RuntimeError, match="`classifier.weight`"):
            made.train()


def test_what_is_set_later_is_checked_too(tmp_path: Path) -> None:
    for name, value in (("auto_find_batch_size", True), ("gradient_accumulation_steps", 2), ("max_grad_norm", 0.3)):
        made = training.trainer(tmp_path)
        setattr(made.args, name, value)
        with pytest.raises(ValueError, match=f"`{name}` = "):
            made.train()
    made = training.trainer(tmp_path)
    made.dp_config.clip_norm = -1.0
    with pytest.raises(ValueError, match="`clip_norm`.*got -1"):
        made.train()
    made = training.trainer(tmp_path)
    made.data_collator.tokenizer = type("Left", (), {"padding_side": "left"})
    with pytest.raises(ValueError, match="`padding_side`"):
        made.train()
    assert not (tmp_path / "_dp").exists(), "nothing was spent"


def test_a_budget_that_is_raised_later_is_the_one_enforced(tmp_path: Path) -> None:
    made = training.trainer(tmp_path, dp={"noise_multiplier": None, "target_epsilon": 3.0})
    made.train()
    made.dp_config.target_epsilon = 6.0
    made.train()
    assert 5.5 < made.privacy_spent().epsilon <= 6.0
    assert [run["target_epsilon"] for run in made.spending.runs] == [3.0, 6.0]


def test_a_run_that_begins_anew_within_train_would_repeat_its_noise(tmp_path: Path) -> None:
    """As `auto_find_batch_size` does after an error: the loop runs again, under the keys of the first time."""
    made = training.trainer(tmp_path, max_steps=2)
    loop = made._inner_training_loop
    made._inner_training_loop = lambda *args, **kwargs: (loop(*args, **kwargs), loop(*args, **kwargs))[1]
    with pytest.raises(RuntimeError, match=r"`train\(\)`"):
        made.train()
    assert training.steps(tmp_path) == 2


def test_the_training_set_is_not_evaluated_on(tmp_path: Path) -> None:
    records, other = training.text(), training.text(seed=1)[:8]
    for evaluation in (records, {"dev": other, "train": records}):
        with pytest.raises(ValueError, match="`eval_dataset`"):
            training.trainer(tmp_path, None, records, eval_dataset=evaluation)
    made = training.trainer(tmp_path, None, records, eval_dataset=other)
    with pytest.raises(ValueError, match="`eval_dataset`"):
        made.evaluate(records)
    loaded = datasets.Dataset.from_list(records)
    with pytest.raises(ValueError, match="`eval_dataset`"):
        training.trainer(tmp_path, None, loaded, eval_dataset=copy.copy(loaded))
    assert "eval_loss" in made.evaluate()
    made.eval_dataset = records
    with pytest.raises(ValueError, match="`eval_dataset`"):
        made.evaluate()
    open_ = training.trainer(tmp_path, None, records, eval_dataset=records, dp={"log_nonprivate": True})
    assert "eval_loss" in open_.evaluate()


def test_refusals_come_before_the_hub_repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda *_: pytest.fail("the repo was created"))
    for settings, named in (
        ({"hub_strategy": "checkpoint"}, "`hub_strategy`"),
        ({"max_grad_norm": 0.3}, "`max_grad_norm`"),
        ({"dp": {"expected_batch_size": 41}}, "`expected_batch_size`.*got 41"),
    ):
        with pytest.raises(ValueError, match=named):
            training.trainer(tmp_path, push_to_hub=True, **settings)


def test_a_subclass_with_its_own_loss_is_refused(tmp_path: Path) -> None:
    class Mine(DPTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any: ...

    with pytest.raises(ValueError, match="`compute_loss`.*`per_sample_loss="):
        Mine(
            zoo.small("bert"),
            training.arguments(tmp_path),
            dp_config=DPConfig(noise_multiplier=1.0),
            train_dataset=training.text(),
        )


def test_a_missing_config_and_a_search_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`dp_config`.*got None"):
        DPTrainer(zoo.small("bert"), training.arguments(tmp_path))
    with pytest.raises(NotImplementedError, match="`hyperparameter_search`"):
        training.trainer(tmp_path).hyperparameter_search()


def test_a_delta_that_promises_nothing_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # The logger's own level, for the command line, run in this process by other tests, raises the root's.
    with caplog.at_level("WARNING", logger="hf_private.trainer.guards"):
        training.trainer(tmp_path, dp={"target_delta": 1 / training.RECORDS})
        assert "`target_delta` = 0.025 is not below 1 / 40" in caplog.text
        caplog.clear()
        training.trainer(tmp_path)
        assert "target_delta" not in caplog.text
