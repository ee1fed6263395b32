"""What runs of DPTrainer spend, over resumes and settings, and what they write besides."""

import math
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from hf_private.accounting.budget import BudgetExceeded
from hf_private.accounting.events import Event
from hf_private.trainer.trainer import DPTrainer
from tests.support import training

# ---- spending


def test_the_budget_is_met_and_then_closed(tmp_path: Path) -> None:
    made = training.trainer(tmp_path, dp={"noise_multiplier": None, "target_epsilon": 4.0})
    made.train()
    assert 3.9 < made.privacy_spent().epsilon <= 4.0
    with pytest.raises(BudgetExceeded):
        made.train()
    assert 3.9 < made.spending.epsilon() <= 4.0
    assert training.steps(tmp_path) == 4


def test_spending_goes_on_over_runs_trainers_and_settings(tmp_path: Path) -> None:
    first = training.trainer(tmp_path)
    first.train()
    one = first.spending.epsilon()
    first.train()
    two = first.spending.epsilon()
    other = training.trainer(tmp_path, dp={"noise_multiplier": 2.0, "expected_batch_size": 4})
    assert other.spending.epsilon() == two
    other.train()
    assert 0 < one < two < other.spending.epsilon()
    assert set(training.ledger(tmp_path).events) == {Event(0.2, (1.0,), 8), Event(0.1, (2.0,), 4)}


def test_a_budget_counts_what_another_run_has_spent(tmp_path: Path) -> None:
    training.trainer(tmp_path).train()
    made = training.trainer(tmp_path, dp={"noise_multiplier": None, "target_epsilon": 8.0})
    made.train()
    assert 7.5 < made.spending.epsilon() <= 8.0


@pytest.mark.usefixtures("quick_cards")
def test_the_spending_of_a_base_model_is_continued(tmp_path: Path) -> None:
    base = training.trainer(tmp_path / "base")
    base.train()
    base.save_model()
    spent = base.spending.epsilon()

    def fine_tune(folder: str, **dp: Any) -> DPTrainer:
        made = training.trainer(tmp_path / folder, type(base.model).from_pretrained(tmp_path / "base"), dp=dp)
        made.train()
        return made

    continued, disjoint, same = fine_tune("new"), fine_tune("other", disjoint_data=True), fine_tune("base")
    assert continued.spending.epsilon() > spent
    assert sum(event.steps for event in continued.spending.events) == 8
    assert disjoint.spending.epsilon() == pytest.approx(spent)
    assert disjoint.privacy_record()["runs"][0]["disjoint_data"] is True
    assert training.steps(tmp_path / "base") == 8, "the folder's own past is counted once"
    assert same.spending.epsilon() == continued.spending.epsilon()
    continued.train()
    assert sum(event.steps for event in continued.spending.events) == 12, "the base is added once"


def test_people_with_several_records_cost_more(tmp_path: Path) -> None:
    settings = {"max_steps": 1, "logging_strategy": "no"}
    one, two = (training.trainer(tmp_path / str(k), dp={"records_per_unit": k}, **settings) for k in (1, 2))
    one.train(), two.train()
    assert two.spending.epsilon() > 1.2 * one.spending.epsilon()


@pytest.mark.usefixtures("quick_cards")
def test_the_recorded_batch_size_holds_on_resume(tmp_path: Path) -> None:
    save = {"save_strategy": "steps", "save_steps": 2}
    training.trainer(tmp_path, callbacks=[training.Stop(2)], **save).train()
    again = training.trainer(tmp_path, per_device_train_batch_size=3, **save)
    again.train(resume_from_checkpoint=True)
    assert set(training.ledger(tmp_path).events) == {Event(0.2, (1.0,), 4)}
    with pytest.raises(ValueError, match="`expected_batch_size`.* 8 .*got 5"):
        training.trainer(tmp_path, dp={"expected_batch_size": 5}).train(resume_from_checkpoint=True)


@pytest.mark.usefixtures("quick_cards")
def test_noise_is_raised_for_the_rest_if_steps_were_lost(tmp_path: Path) -> None:
    """Three steps ran, one is in the checkpoint: the two lost ones are charged, so the rest needs more noise."""
    settings = {"dp": {"noise_multiplier": None, "target_epsilon": 4.0}, "save_strategy": "steps"}
    training.trainer(tmp_path, callbacks=[training.Stop(3)], save_steps=1, save_total_limit=None, **settings).train()
    again = training.trainer(tmp_path, save_steps=10, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    phases = {event.noise_multiplier: event.steps for event in training.ledger(tmp_path).events}
    assert sorted(phases.values()) == [3, 3] and len(phases) == 2
    assert again.spending.epsilon() <= 4.0


@pytest.mark.usefixtures("quick_cards")
def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    """As that of another machine with `save_on_each_node`; all ranks then say so."""
    save = {"save_strategy": "steps", "save_steps": 4}
    training.trainer(tmp_path, **save).train()
    (tmp_path / "checkpoint-4" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="`resume_from_checkpoint`"):
        training.trainer(tmp_path, **save).train(resume_from_checkpoint=True)
    assert training.steps(tmp_path) == 4


@pytest.mark.usefixtures("quick_cards")
def test_a_complete_run_can_be_resumed_and_spends_nothing(tmp_path: Path) -> None:
    save = {"save_strategy": "steps", "save_steps": 4}
    training.trainer(tmp_path, **save).train()
    again = training.trainer(tmp_path, **save)
    before = None

    class Remember(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
            nonlocal before
            before = training.weights(model)

    again.add_callback(Remember())
    assert again.train(resume_from_checkpoint=True).global_step == 4
    assert torch.equal(training.weights(again.model), before)
    assert training.steps(tmp_path) == 4


# ---- hygiene


def test_no_training_loss_is_written_unless_asked_for(tmp_path: Path) -> None:
    """The same run twice: with the losses in the open, to know them, and as usual, to search its files for them."""
    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    settings |= {"eval_dataset": training.text(seed=1)[:8], "include_num_input_tokens_seen": "all"}
    for name, open_ in (("open", True), ("usual", False)):
        made = training.trainer(tmp_path / name, key=training.KEY, dp={"log_nonprivate": open_}, **settings)
        output = made.train()
        made.save_model()
        made.create_model_card()
        made.save_state()
        made.save_metrics("train", output.metrics)
        history = made.state.log_history
        if open_:
            losses = [entry["nonprivate_loss"] for entry in history if "nonprivate_loss" in entry]
            losses.append(output.training_loss)
            assert made.privacy_record()["runs"][0]["log_nonprivate"] is True
        else:
            assert math.isnan(output.training_loss)
            names = {name for entry in history for name in entry}
            assert not names & {"loss", "train_loss", "grad_norm", "num_input_tokens_seen", "nonprivate_loss"}
    assert len(losses) == 5 and len({round(loss, 6) for loss in losses}) >= 4
    needles = [str(loss)[:8].encode() for loss in losses]
    needles += [struct.pack(kind, loss) for loss in losses for kind in ("<d", "<f")]
    found = {
        name: [
            path.name for path in training.files(tmp_path / name) for needle in needles if needle in path.read_bytes()
        ]
        for name in ("open", "usual")
    }
    assert "trainer_state.json" in found["open"], "the search finds what is there"
    assert found["usual"] == []


def test_no_key_and_no_generator_state_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, urandom = [], os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: drawn.append(urandom(size)) or drawn[-1])
    made = training.trainer(tmp_path, save_strategy="steps", save_steps=2)
    made.train()
    made.save_model()
    written = training.files(tmp_path)
    assert not [path for path in written if path.name.startswith("rng_state")]
    secrets = [secret for secret in drawn if len(secret) == 32]
    assert len(secrets) >= 2
    for path in written:
        content = path.read_bytes()
        assert not any(secret in content or secret.hex().encode() in content for secret in secrets), path
    assert made._keys is None


def test_the_users_arguments_stay_and_the_token_is_not_saved(tmp_path: Path) -> None:
    args = training.arguments(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    args.hub_token = "hf_secret"
    made = training.trainer(tmp_path, args=args)
    made.train()
    made.save_model()
    assert (args.gradient_accumulation_steps, args.hub_token) == (2, "hf_secret")
    assert made.expected_batch_size == 8
    assert made.args.hub_token == "hf_secret", "pushing needs it"
    saved = tmp_path / "training_args.bin"
    assert b"hf_secret" not in saved.read_bytes()
    assert torch.load(saved, weights_only=False).hub_token is None
    assert b"hf_secret" in pickle.dumps(args), "the search finds what is there"


def test_epsilon_is_in_the_logs_and_grows(tmp_path: Path) -> None:
    made = training.trainer(tmp_path, eval_dataset=training.text(seed=1)[:8], eval_strategy="steps", eval_steps=2)
    made.train()
    logged = [entry["epsilon"] for entry in made.state.log_history if "learning_rate" in entry]
    assert len(logged) == 4 and logged == sorted(set(logged))
    assert [entry for entry in made.state.log_history if "eval_loss" in entry]
