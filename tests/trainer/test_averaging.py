"""WeightAverage: the averages against sums over the steps, where they are used, and that other writes are noticed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification, TrainerCallback

from hf_private.publishing.verify import verify
from hf_private.spending.ledger import LedgerError
from hf_private.trainer.averaging import FILE, WeightAverage
from hf_private.trainer.trainer import DPTrainer
from tests.support import training, zoo

STEPS = 8
ADAM = {"max_steps": STEPS, "learning_rate": 0.05, "lr_scheduler_type": "constant"}


class Weights(TrainerCallback):
    """Keeps the weights after each step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.seen.append(training.weights(model))


def expected(seen: list[torch.Tensor], decay: float | None = None, tail: int | None = None) -> torch.Tensor:
    """The average, as a sum over all steps."""
    if decay is None:
        return torch.stack(seen[len(seen) - (tail or 0) :]).mean(0)
    weights = torch.tensor([decay**k for k in reversed(range(len(seen)))], dtype=torch.float64)
    return (weights[:, None] * torch.stack(seen)).sum(0) / weights.sum()


def made(folder: Path, average: WeightAverage, *others: TrainerCallback, **settings: Any) -> DPTrainer:
    return training.trainer(folder, key=training.KEY, callbacks=[average, *others], **ADAM | settings)


def plain(folder: Path, **settings: Any) -> list[torch.Tensor]:
    """The weights after each step of the same run without an average."""
    keeps = Weights()
    training.trainer(folder, key=training.KEY, callbacks=[keeps], **ADAM | settings).train()
    return keeps.seen


@pytest.mark.parametrize(
    ("average", "formula"),
    [({"decay": 0.8}, {"decay": 0.8}), ({"tail": 0.5}, {"tail": 4}), ({"tail": 0.01}, {"tail": 1})],
)
def test_the_average_is_the_sum_over_the_steps(tmp_path: Path, average: dict, formula: dict) -> None:
    model = zoo.small("bert").double()
    keeps = Weights()
    trainer = made(tmp_path / "run", WeightAverage(**average), keeps, model=model)
    trainer.train()
    torch.testing.assert_close(training.weights(trainer.model), expected(keeps.seen, **formula), rtol=0, atol=1e-14)
    alone = plain(tmp_path / "plain", model=zoo.small("bert").double())
    assert all(torch.equal(*pair) for pair in zip(alone, keeps.seen, strict=True)), "training goes on as without it"


@pytest.mark.usefixtures("quick_cards")
def test_evaluations_and_saved_models_have_the_average(tmp_path: Path) -> None:
    dev = training.text(seed=1)[:8]
    saving = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4}
    keeps = Weights()
    trainer = made(tmp_path / "run", WeightAverage(decay=0.8), keeps, eval_dataset=dev, **saving)
    trainer.train()
    for folder, step in (("checkpoint-4", 4), ("checkpoint-8", 8)):
        saved = training.weights(BertForSequenceClassification.from_pretrained(tmp_path / "run" / folder))
        torch.testing.assert_close(saved, expected(keeps.seen[:step], decay=0.8), rtol=0, atol=1e-6)
    logged = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    last = trainer.evaluate()["eval_loss"]
    assert logged[-1] == pytest.approx(last, abs=1e-6)
    assert logged[-1] != pytest.approx(plain_loss(tmp_path / "plain", dev), abs=1e-4)


def test_the_card_of_an_average_claims_nothing_that_is_only_stated(tmp_path: Path) -> None:
    trainer = training.trainer(tmp_path, callbacks=[WeightAverage(decay=0.8)], max_steps=2)
    trainer.train()
    trainer.save_model()
    assert not [finding for finding in verify(str(tmp_path)).findings if finding.status == "wrong"]
    assert "Stated change" not in (tmp_path / "README.md").read_text()


def plain_loss(folder: Path, dev: list) -> float:
    trainer = training.trainer(folder, key=training.KEY, eval_dataset=dev, **ADAM)
    trainer.train()
    return trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("stop", [3, 6])  # before and after the tail has begun
@pytest.mark.parametrize("average", [{"decay": 0.8}, {"tail": 0.5}])
@pytest.mark.usefixtures("quick_cards")
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, average: dict, stop: int) -> None:
    whole = made(tmp_path / "whole", WeightAverage(**average))
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": stop}
    made(tmp_path / "half", WeightAverage(**average), training.Stop(stop), **saving).train()
    again = made(tmp_path / "half", WeightAverage(**average))
    again.train(resume_from_checkpoint=True)
    assert torch.equal(training.weights(again.model), training.weights(whole.model))
    assert again.privacy_spent().epsilon == whole.privacy_spent().epsilon
    again.save_model()
    assert made(tmp_path / "half", WeightAverage(**average)).train(resume_from_checkpoint=True).global_step == STEPS


@pytest.mark.usefixtures("quick_cards")
def test_a_complete_run_that_is_resumed_keeps_its_average(tmp_path: Path) -> None:
    whole = made(tmp_path, WeightAverage(decay=0.8), save_strategy="steps", save_steps=STEPS)
    whole.train()
    again = made(tmp_path, WeightAverage(decay=0.8))
    again.train(resume_from_checkpoint=True)
    assert torch.equal(training.weights(again.model), training.weights(whole.model))
    assert training.steps(tmp_path) == STEPS


@pytest.mark.usefixtures("quick_cards")
def test_another_average_is_refused_when_a_run_is_resumed(tmp_path: Path) -> None:
    made(tmp_path, WeightAverage(decay=0.8), training.Stop(3), save_strategy="steps", save_steps=3).train()
    with pytest.raises(ValueError, match="`WeightAverage`.*0.8.*0.9"):
        made(tmp_path, WeightAverage(decay=0.9)).train(resume_from_checkpoint=True)


@pytest.mark.usefixtures("quick_cards")
def test_the_best_checkpoint_is_kept_as_it_was_evaluated(tmp_path: Path) -> None:
    settings = {
        "eval_dataset": training.text(seed=1)[:8], "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps",
        "save_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
    }  # fmt: skip
    trainer = made(tmp_path, WeightAverage(decay=0.8), **settings)
    trainer.train()
    best = min(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, abs=1e-6)
    trainer.save_model()


@pytest.mark.parametrize("event", ["on_step_end", "on_evaluate", "on_train_end"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.usefixtures("quick_cards")
def test_what_a_callback_writes_is_noticed(tmp_path: Path, event: str, first: bool) -> None:
    """At the last step, where no further step looks at the weights: only the average would hide it."""

    def write(self: Any, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if state.global_step == STEPS:
            model.classifier.bias.data[0] += 1.0

    writer, average = type("Writer", (TrainerCallback,), {event: write})(), WeightAverage(decay=0.8)
    order = [writer, average] if first else [average, writer]
    settings = ADAM | {"eval_dataset": training.text(seed=1)[:8], "eval_strategy": "steps", "eval_steps": 4}
    trainer = training.trainer(tmp_path, callbacks=order, **settings)
    trainer.train()
    with pytest.raises(LedgerError, match="declare_post_processing"):
        trainer.save_model(str(tmp_path / "out"))
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_run_that_fails_has_no_average(tmp_path: Path) -> None:
    class Fail(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("no")

    average = WeightAverage(decay=0.8)
    trainer = made(tmp_path, average, Fail())
    with pytest.raises(RuntimeError, match="no"):
        trainer.train()
    assert average.values == {}
    last = training.weights(trainer.model)
    trainer.evaluate(training.text(seed=1)[:4])
    assert torch.equal(training.weights(trainer.model), last)


@pytest.mark.usefixtures("quick_cards")
def test_the_checkpoint_of_a_run_that_fails_has_its_average(tmp_path: Path) -> None:
    class Fail(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 6:
                raise RuntimeError("no")

    whole = made(tmp_path / "whole", WeightAverage(decay=0.8))
    whole.train()
    with pytest.raises(RuntimeError, match="no"):
        made(tmp_path / "half", WeightAverage(decay=0.8), Fail()).train()
    again = made(tmp_path / "half", WeightAverage(decay=0.8))
    again.train(resume_from_checkpoint=True)
    assert torch.equal(training.weights(again.model), training.weights(whole.model))


def test_a_second_run_begins_a_new_average(tmp_path: Path) -> None:
    keeps = Weights()
    trainer = made(tmp_path, WeightAverage(tail=0.5), keeps, max_steps=4)
    trainer.train()
    first = training.weights(trainer.model)
    keeps.seen.clear()
    trainer.train()
    torch.testing.assert_close(training.weights(trainer.model), expected(keeps.seen, tail=2), rtol=0, atol=1e-6)
    assert not torch.equal(training.weights(trainer.model), first)


@pytest.mark.parametrize(("average", "formula"), [({"decay": 0.8}, {"decay": 0.8}), ({"tail": 0.5}, {"tail": 2})])
@pytest.mark.usefixtures("quick_cards")
def test_a_run_that_is_resumed_without_its_average_begins_another(
    tmp_path: Path, average: dict, formula: dict
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 6}
    training.trainer(tmp_path, key=training.KEY, callbacks=[training.Stop(6)], **ADAM | saving).train()
    keeps = Weights()
    again = made(tmp_path, WeightAverage(**average), keeps)
    again.train(resume_from_checkpoint=True)
    assert len(keeps.seen) == 2
    torch.testing.assert_close(training.weights(again.model), expected(keeps.seen, **formula), rtol=0, atol=1e-6)


@pytest.mark.usefixtures("quick_cards")
def test_a_run_that_is_resumed_to_be_longer_averages_its_own_tail(tmp_path: Path) -> None:
    made(tmp_path, WeightAverage(tail=0.5), save_strategy="steps", save_steps=STEPS).train()
    keeps = Weights()
    again = made(tmp_path, WeightAverage(tail=0.25), keeps)
    with pytest.raises(ValueError, match="`WeightAverage`"):
        again.train(resume_from_checkpoint=True)
    again = made(tmp_path, WeightAverage(tail=0.5), keeps, max_steps=3 * STEPS)
    again.train(resume_from_checkpoint=True)
    assert len(keeps.seen) == 2 * STEPS
    torch.testing.assert_close(training.weights(again.model), expected(keeps.seen, tail=12), rtol=0, atol=1e-6)


@pytest.mark.usefixtures("quick_cards")
def test_averages_of_half_precision_are_kept_in_float32(tmp_path: Path) -> None:
    average = WeightAverage(decay=0.999)
    model = zoo.small("bert").to(torch.bfloat16)
    made(tmp_path, average, training.Stop(3), model=model, save_strategy="steps", save_steps=3).train()
    from safetensors.torch import load_file

    kept = load_file(tmp_path / "checkpoint-3" / "_dp" / FILE)
    assert {x.dtype for name, x in kept.items() if name.startswith("average")} == {torch.float32}
    assert {x.dtype for name, x in kept.items() if name.startswith("own")} == {torch.bfloat16}


@pytest.mark.parametrize("wrong", [{}, {"decay": 0.9, "tail": 0.5}, {"decay": 1.0}, {"tail": 0.0}, {"decay": "x"}])
def test_wrong_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="`decay`|`tail`"):
        WeightAverage(**wrong)


def test_two_averages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`callbacks`.*one WeightAverage"):
        made(tmp_path, WeightAverage(decay=0.9), WeightAverage(tail=0.5)).train()
