"""DPTrainer as users run it: what changes an update, what does not, what is spent, what is saved, what is refused."""

import copy
import json
import math
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny
import torch
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from hf_private.accounting import BudgetExceeded, Event
from hf_private.clipping import MODES, Clipping
from hf_private.config import DPConfig
from hf_private.ledger import PrivacyLedger
from hf_private.trainer import DPTrainer

KEY = bytes(range(32))
SGD = {"optim": "sgd", "learning_rate": 0.5}


@pytest.fixture
def quick_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card's accountants take seconds: for tests that save often and look at something else."""

    def write(folder: str, facts: dict) -> None:
        Path(folder, "privacy.json").write_text(json.dumps({"private": True, **facts}))

    monkeypatch.setattr("hf_private.publishing.write_card", write)


def ledger(folder: Path) -> PrivacyLedger:
    return PrivacyLedger.read(folder / "_dp" / "ledger.jsonl")


def steps(folder: Path) -> int:
    return sum(event.steps for event in ledger(folder).events)


def trained(folder: Path, **settings: Any) -> Tensor:
    made = tiny.trainer(folder, key=KEY, **settings)
    made.train()
    return tiny.weights(made.model)


# ---- what changes speed only


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Weights after a run in micro-batches of 8."""
    return trained(tmp_path_factory.mktemp("reference"), dp={"expected_batch_size": 16}, **SGD)


@pytest.mark.parametrize(
    "settings",
    [
        {"per_device_train_batch_size": 1},
        {"per_device_train_batch_size": 4},
        {"per_device_train_batch_size": tiny.RECORDS},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "dp": {}},
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "dp": {}},
        {"dp": {"expected_batch_size": 16, "micro_batch_tokens": 12}},
        {"dataloader_num_workers": 2},
    ],
    ids=["micro1", "micro4", "microall", "accumulate8", "accumulate1", "tokens", "workers2"],
)
def test_the_update_does_not_depend_on_how_it_is_computed(tmp_path: Path, reference: Tensor, settings: dict) -> None:
    settings = {"dp": {"expected_batch_size": 16}, **SGD, **settings}
    torch.testing.assert_close(trained(tmp_path, **settings), reference, rtol=0, atol=1e-6)


def test_another_expected_batch_size_is_another_update(tmp_path: Path, reference: Tensor) -> None:
    """The control: the comparison above can fail."""
    other = trained(tmp_path, dp={"expected_batch_size": 17}, **SGD)
    assert (other - reference).abs().max() > 1e-3


@pytest.mark.parametrize("stop", [3, 5])  # in the middle of an epoch of 5 steps, and at its end
@pytest.mark.usefixtures("quick_cards")
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, stop: int) -> None:
    settings = {"max_steps": 8, "lr_scheduler_type": "cosine", "logging_steps": 2}
    whole = trained(tmp_path / "whole", **settings)
    saving = {"save_strategy": "steps", "save_steps": stop, "callbacks": [Stop(stop)]}
    tiny.trainer(tmp_path / "half", key=KEY, **saving, **settings).train()
    again = tiny.trainer(tmp_path / "half", key=KEY, **settings)
    assert again.train(resume_from_checkpoint=True).global_step == 8
    assert torch.equal(tiny.weights(again.model), whole)
    assert steps(tmp_path / "half") == 8


class Stop(TrainerCallback):
    """Ends training after some step, as an interruption would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def test_the_seed_does_not_repeat_noise_and_draws(tmp_path: Path) -> None:
    runs = []
    for name in "ab":
        made = tiny.trainer(tmp_path / name, seed=42, data_seed=42, max_steps=1, **SGD)
        made.train()
        runs.append(tiny.weights(made.model))
    assert (runs[0] != runs[1]).float().mean() > 0.9


# ---- privacy of one step


class WithoutRecord(Clipping):
    """Clipping that drops one record: the neighbouring batch, with all masks and shapes in place."""

    def factors(self, sq_norms: Any, blocks: Any = None) -> dict[str, Tensor]:
        factors = super().factors(sq_norms, blocks)
        keep = torch.arange(len(next(iter(factors.values())))) != 0
        return {block: factor * keep for block, factor in factors.items()}


CARRIERS = {"RGP": {"r": 2}, "LSG": {"r": 2, "sparsity": 0.5}, "Sparse": {"r": None, "sparsity": 0.5}}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("clip_norm", "method"), [(1.0, "BK"), *((0.01, method) for method in ("BK", *CARRIERS))])
def test_one_record_moves_the_released_sum_by_at_most_the_clip_norm(
    tmp_path: Path, mode: str, clip_norm: float, method: str
) -> None:
    """GEP, whose two parts have a norm each, is held to the same in test_anchors.py."""
    dp = {"clipping": mode, "clip_norm": clip_norm, "carriers": CARRIERS.get(method)}
    made = tiny.trainer(tmp_path, dp=dp, max_steps=1)
    for parameter in made.model.parameters():
        parameter.data.mul_(3)  # gradients far above the clip norm
    mechanism = mechanism_of(made)
    assert mechanism.clipping == Clipping(mode, clip_norm)
    batch = [tiny.Padding()(made.train_dataset[:8])]
    with_record = mechanism._clipped_sums(batch)
    mechanism.clipping = WithoutRecord(mode, clip_norm)
    without = mechanism._clipped_sums(batch)
    moved = torch.stack([(with_record[block] - without[block]).norm() for block in with_record]).norm().item()
    assert 0 < moved <= clip_norm * (1 + 1e-4)
    if clip_norm < 0.1 and mode != "per-layer":
        assert moved > 0.9 * clip_norm


def mechanism_of(made: DPTrainer) -> Any:
    """The mechanism of a run, which a trainer forgets at the end of `train()`."""
    attach, seen = made._attach, []
    made._attach = lambda *args: (attach(*args), seen.append(made._mechanism))
    made.train()
    return seen[0]


def test_empty_batches_are_steps(tmp_path: Path) -> None:
    """At one record expected of 40, a third of the draws is empty: each is charged, noised and applied."""
    sizes, moved = [], []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
            moved.append(all(bool(p.grad.all()) for p in model.parameters()))

    made = tiny.trainer(tmp_path, dp={"expected_batch_size": 1}, key=KEY, max_steps=12, callbacks=[Watch()])
    step = made.training_step
    made.training_step = lambda model, inputs, n=None: (sizes.append(inputs.size), step(model, inputs, n))[1]
    made.train()
    assert len(sizes) == len(moved) == steps(tmp_path) == made.state.global_step == 12
    assert 0 in sizes and all(moved)


def test_the_non_private_twin_is_plain_training_and_says_so(tmp_path: Path) -> None:
    settings = {"max_steps": 3, "per_device_train_batch_size": tiny.RECORDS, **SGD}
    twin = tiny.trainer(tmp_path / "twin", dp={"noise_multiplier": 0, "clip_norm": math.inf}, **settings)
    twin.train()
    plain = Trainer(
        tiny.bert(),
        tiny.arguments(tmp_path / "plain", **settings),
        train_dataset=tiny.text(),
        data_collator=tiny.Padding(),
    )
    plain.train()
    torch.testing.assert_close(tiny.weights(twin.model), tiny.weights(plain.model), rtol=0, atol=1e-5)
    report = twin.privacy_spent()
    assert report.epsilon == math.inf and "NOT PRIVATE" in report.note
    assert all(entry["epsilon"] == "inf" and entry["privacy"] == "NOT PRIVATE" for entry in twin.state.log_history)
    assert twin.privacy_record()["ledger"]["events"][0]["releases"] == [0.0]


def test_a_test_key_is_not_private(tmp_path: Path) -> None:
    made = tiny.trainer(tmp_path, key=KEY)
    made.train()
    assert made.privacy_spent().epsilon == math.inf
    assert "NOT PRIVATE" in made.privacy_spent().note
    assert made.privacy_record()["runs"][0]["reproducible"] is True
    made._test_key = None  # later secrecy does not bring back what was revealed
    made.train()
    assert made.spending.epsilon() == math.inf


# ---- end to end

LORA = {"r": 2, "target_modules": ["query", "value"], "task_type": "SEQ_CLS"}


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny.bert(), LoraConfig(**LORA))


FAMILIES = {
    "bert": (tiny.bert, tiny.text),
    "gpt2": (tiny.gpt2, lambda: tiny.text("itself")),
    "t5": (tiny.t5, lambda: tiny.text("itself")),
    "vit": (tiny.vit, tiny.images),
    "tokens": (tiny.token_bert, lambda: tiny.text("tokens")),
    "lora": (lora, tiny.text),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_evaluate_and_load_again(tmp_path: Path, family: str) -> None:
    make, data = FAMILIES[family]
    model, records = make(), data()
    collator = {} if family != "vit" else {"data_collator": None}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = tiny.trainer(
        tmp_path,
        model,
        records,
        eval_dataset=records[:8],
        eval_strategy="steps",
        eval_steps=2,
        max_steps=2,
        **collator,
    )
    made.train()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) is not p.requires_grad, name
    assert math.isfinite(made.evaluate()["eval_loss"])
    assert 0 < made.privacy_spent().epsilon < math.inf
    made.save_model()
    assert (tmp_path / "privacy.json").is_file()
    if family != "lora":
        loaded = type(model).from_pretrained(tmp_path)
        assert torch.equal(tiny.weights(loaded), tiny.weights(model))


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor", "sgd"])
def test_optimizers_and_a_schedule_that_acts(tmp_path: Path, optim: str) -> None:
    made = tiny.trainer(tmp_path, optim=optim, lr_scheduler_type="cosine", warmup_steps=1, max_steps=4)
    before = tiny.weights(made.model)
    made.train()
    rates = [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]
    wanted = [0.0, *(1e-2 * (1 + math.cos(math.pi * x / 3)) / 2 for x in range(3))]
    assert rates == pytest.approx(wanted)
    assert (tiny.weights(made.model) != before).float().mean() > 0.9


@pytest.mark.parametrize("settings", [{"bf16": True}, {"gradient_checkpointing": True}], ids=["bf16", "checkpointing"])
def test_precision_and_memory_settings(tmp_path: Path, reference: Tensor, settings: dict) -> None:
    weights = trained(tmp_path, dp={"expected_batch_size": 16}, **SGD, **settings)
    assert (weights - reference).abs().max() < (2e-2 if "bf16" in settings else 1e-6)


@pytest.mark.usefixtures("quick_cards")
def test_early_stopping_best_model_and_resume(tmp_path: Path) -> None:
    settings = {
        "eval_dataset": tiny.text()[:8],
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "max_steps": 5,
        "save_total_limit": 2,
    }
    made = tiny.trainer(tmp_path, callbacks=[EarlyStoppingCallback(1, 10.0)], **settings)
    made.train()
    assert 1 <= made.state.global_step < 5
    stopped = made.state.global_step
    assert steps(tmp_path) == stopped  # all steps are charged, whichever model was kept
    again = tiny.trainer(tmp_path, **settings)
    assert again.train(resume_from_checkpoint=True).global_step == 5
    assert steps(tmp_path) >= 5
    best = float(min(entry["eval_loss"] for entry in again.state.log_history if "eval_loss" in entry))
    assert again.evaluate()["eval_loss"] == pytest.approx(best, abs=1e-4)


def test_a_custom_loss_for_each_record_and_label_smoothing(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels, reduction="none", label_smoothing=0.1)

    custom = trained(tmp_path / "custom", per_sample_loss=loss, **SGD)
    smooth = trained(tmp_path / "smooth", label_smoothing_factor=0.1, **SGD)
    plain = trained(tmp_path / "plain", **SGD)
    torch.testing.assert_close(custom, smooth, rtol=0, atol=1e-6)
    assert (custom - plain).abs().max() > 1e-4


def test_a_model_from_model_init(tmp_path: Path) -> None:
    made = DPTrainer(
        args=tiny.arguments(tmp_path),
        model_init=lambda: tiny.bert(),
        dp_config=DPConfig(noise_multiplier=1.0),
        train_dataset=tiny.text(),
        data_collator=tiny.Padding(),
    )
    assert made.train().global_step == 4


# ---- spending


def test_the_budget_is_met_and_then_closed(tmp_path: Path) -> None:
    made = tiny.trainer(tmp_path, dp={"noise_multiplier": None, "target_epsilon": 4.0})
    made.train()
    assert 3.9 < made.privacy_spent().epsilon <= 4.0
    with pytest.raises(BudgetExceeded):
        made.train()
    assert 3.9 < made.spending.epsilon() <= 4.0
    assert steps(tmp_path) == 4


def test_spending_goes_on_over_runs_trainers_and_settings(tmp_path: Path) -> None:
    first = tiny.trainer(tmp_path)
    first.train()
    one = first.spending.epsilon()
    first.train()
    two = first.spending.epsilon()
    other = tiny.trainer(tmp_path, dp={"noise_multiplier": 2.0, "expected_batch_size": 4})
    assert other.spending.epsilon() == two
    other.train()
    assert 0 < one < two < other.spending.epsilon()
    assert set(ledger(tmp_path).events) == {Event(0.2, (1.0,), 8), Event(0.1, (2.0,), 4)}


def test_a_budget_counts_what_another_run_has_spent(tmp_path: Path) -> None:
    tiny.trainer(tmp_path).train()
    made = tiny.trainer(tmp_path, dp={"noise_multiplier": None, "target_epsilon": 8.0})
    made.train()
    assert 7.5 < made.spending.epsilon() <= 8.0


@pytest.mark.usefixtures("quick_cards")
def test_the_spending_of_a_base_model_is_continued(tmp_path: Path) -> None:
    base = tiny.trainer(tmp_path / "base")
    base.train()
    base.save_model()
    spent = base.spending.epsilon()

    def fine_tune(folder: str, **dp: Any) -> DPTrainer:
        made = tiny.trainer(tmp_path / folder, type(base.model).from_pretrained(tmp_path / "base"), dp=dp)
        made.train()
        return made

    continued, disjoint, same = fine_tune("new"), fine_tune("other", disjoint_data=True), fine_tune("base")
    assert continued.spending.epsilon() > spent
    assert sum(event.steps for event in continued.spending.events) == 8
    assert disjoint.spending.epsilon() == pytest.approx(spent)
    assert disjoint.privacy_record()["runs"][0]["disjoint_data"] is True
    assert steps(tmp_path / "base") == 8, "the folder's own past is counted once"
    assert same.spending.epsilon() == continued.spending.epsilon()
    continued.train()
    assert sum(event.steps for event in continued.spending.events) == 12, "the base is added once"


def test_people_with_several_records_cost_more(tmp_path: Path) -> None:
    settings = {"max_steps": 1, "logging_strategy": "no"}
    one, two = (tiny.trainer(tmp_path / str(k), dp={"records_per_unit": k}, **settings) for k in (1, 2))
    one.train(), two.train()
    assert two.spending.epsilon() > 1.2 * one.spending.epsilon()


@pytest.mark.usefixtures("quick_cards")
def test_the_recorded_batch_size_holds_on_resume(tmp_path: Path) -> None:
    save = {"save_strategy": "steps", "save_steps": 2}
    tiny.trainer(tmp_path, callbacks=[Stop(2)], **save).train()
    again = tiny.trainer(tmp_path, per_device_train_batch_size=3, **save)
    again.train(resume_from_checkpoint=True)
    assert set(ledger(tmp_path).events) == {Event(0.2, (1.0,), 4)}
    with pytest.raises(ValueError, match="`expected_batch_size` must stay 8.*got 5"):
        tiny.trainer(tmp_path, dp={"expected_batch_size": 5}).train(resume_from_checkpoint=True)


@pytest.mark.usefixtures("quick_cards")
def test_noise_is_raised_for_the_rest_if_steps_were_lost(tmp_path: Path) -> None:
    """Three steps ran, one is in the checkpoint: the two lost ones are charged, so the rest needs more noise."""
    settings = {"dp": {"noise_multiplier": None, "target_epsilon": 4.0}, "save_strategy": "steps"}
    tiny.trainer(tmp_path, callbacks=[Stop(3)], save_steps=1, save_total_limit=None, **settings).train()
    again = tiny.trainer(tmp_path, save_steps=10, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    phases = {event.noise_multiplier: event.steps for event in ledger(tmp_path).events}
    assert sorted(phases.values()) == [3, 3] and len(phases) == 2
    assert again.spending.epsilon() <= 4.0


@pytest.mark.usefixtures("quick_cards")
def test_a_complete_run_can_be_resumed_and_spends_nothing(tmp_path: Path) -> None:
    save = {"save_strategy": "steps", "save_steps": 4}
    tiny.trainer(tmp_path, **save).train()
    again = tiny.trainer(tmp_path, **save)
    before = None

    class Remember(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
            nonlocal before
            before = tiny.weights(model)

    again.add_callback(Remember())
    assert again.train(resume_from_checkpoint=True).global_step == 4
    assert torch.equal(tiny.weights(again.model), before)
    assert steps(tmp_path) == 4


# ---- hygiene


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_no_training_loss_is_written_unless_asked_for(tmp_path: Path) -> None:
    """The same run twice: with the losses in the open, to know them, and as usual, to search its files for them."""
    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    settings |= {"eval_dataset": tiny.text()[:8], "include_num_input_tokens_seen": "all"}
    for name, open_ in (("open", True), ("usual", False)):
        made = tiny.trainer(tmp_path / name, key=KEY, dp={"log_nonprivate": open_}, **settings)
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
        name: [path.name for path in files(tmp_path / name) for needle in needles if needle in path.read_bytes()]
        for name in ("open", "usual")
    }
    assert "trainer_state.json" in found["open"], "the search finds what is there"
    assert found["usual"] == []


def test_no_key_and_no_generator_state_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, urandom = [], os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: drawn.append(urandom(size)) or drawn[-1])
    made = tiny.trainer(tmp_path, save_strategy="steps", save_steps=2)
    made.train()
    made.save_model()
    written = files(tmp_path)
    assert not [path for path in written if path.name.startswith("rng_state")]
    secrets = [secret for secret in drawn if len(secret) == 32]
    assert len(secrets) >= 2
    for path in written:
        content = path.read_bytes()
        assert not any(secret in content or secret.hex().encode() in content for secret in secrets), path
    assert made._keys is None


def test_the_users_arguments_stay_and_the_token_is_not_saved(tmp_path: Path) -> None:
    args = tiny.arguments(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    args.hub_token = "hf_secret"
    made = tiny.trainer(tmp_path, args=args)
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
    made = tiny.trainer(tmp_path, eval_dataset=tiny.text()[:8], eval_strategy="steps", eval_steps=2)
    made.train()
    logged = [entry["epsilon"] for entry in made.state.log_history if "learning_rate" in entry]
    assert len(logged) == 4 and logged == sorted(set(logged))
    assert [entry for entry in made.state.log_history if "eval_loss" in entry]


# ---- guards


def test_an_optimizer_of_another_copy_is_refused(tmp_path: Path) -> None:
    model, copy = tiny.bert(), tiny.bert()
    optimizer = torch.optim.SGD(copy.parameters(), lr=0.1)
    made = tiny.trainer(tmp_path, model, optimizers=(optimizer, None))
    with pytest.raises(ValueError, match="`optimizers` must hold every trainable parameter.*`bert.embeddings"):
        made.train()
    both = torch.optim.SGD([*model.parameters(), *copy.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="`optimizers` must hold parameters of the model only"):
        tiny.trainer(tmp_path / "both", model, optimizers=(both, None)).train()
    assert not files(tmp_path / "_dp") or steps(tmp_path) == 0, "nothing was spent"


@pytest.mark.parametrize(("value", "named"), [(None, "none"), (0.0, "zero"), (math.nan, "not finite")])
def test_a_parameter_without_a_gradient_is_an_error(tmp_path: Path, value: float | None, named: str) -> None:
    made = tiny.trainer(tmp_path)
    attach = made._attach

    def broken(*args: Any) -> None:
        attach(*args)
        step, parameter = made._mechanism.step, made.model.classifier.bias

        def wrong(batches: Any) -> None:
            step(batches)
            parameter.grad = None if value is None else torch.full_like(parameter, value)

        made._mechanism.step = wrong

    made._attach = broken
    with pytest.raises(RuntimeError, match=f"`classifier.bias` must have a finite, non-zero gradient.*{named}"):
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

    made = tiny.trainer(tmp_path, callbacks=[Change()])
    made.model.classifier.requires_grad_(change != "unfrozen")
    with pytest.raises(RuntimeError, match=f"`classifier.weight` must stay as it was.*got {change} \\(2 such"):
        made.train()
    assert steps(tmp_path) == 2


class Packing(tiny.Padding):
    """Two records in a row."""

    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        pairs = [records[i : i + 2] for i in range(0, len(records), 2)]
        joined = [{**pair[0], "input_ids": sum((r["input_ids"][:4] for r in pair), [])} for pair in pairs]
        return super().__call__(joined)


class Splitting(tiny.Padding):
    """Several rows for a long record, each of which would be clipped by itself."""

    def __call__(self, records: list[dict]) -> dict[str, Tensor]:
        parts = [{**r, "input_ids": r["input_ids"][i : i + 3]} for r in records for i in range(0, 9, 3)]
        return super().__call__([part for part in parts if part["input_ids"]])


@pytest.mark.parametrize("collator", [Packing(), Splitting()], ids=["packing", "splitting"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_must_be_a_record(tmp_path: Path, collator: Any, workers: int) -> None:
    made = tiny.trainer(tmp_path, data_collator=collator, dataloader_num_workers=workers)
    with pytest.raises(ValueError, match="`data_collator` must return one row for each record, got"):
        made.train()


def test_what_is_set_later_is_checked_too(tmp_path: Path) -> None:
    for name, value in (("auto_find_batch_size", True), ("gradient_accumulation_steps", 2), ("max_grad_norm", 0.3)):
        made = tiny.trainer(tmp_path)
        setattr(made.args, name, value)
        with pytest.raises(ValueError, match=f"`{name}` = "):
            made.train()
    made = tiny.trainer(tmp_path)
    made.dp_config.clip_norm = -1.0
    with pytest.raises(ValueError, match="`clip_norm` must be > 0, got -1"):
        made.train()
    made = tiny.trainer(tmp_path)
    made.data_collator.tokenizer = type("Left", (), {"padding_side": "left"})
    with pytest.raises(ValueError, match="`padding_side`"):
        made.train()
    assert not (tmp_path / "_dp").exists(), "nothing was spent"


def test_a_budget_that_is_raised_later_is_the_one_enforced(tmp_path: Path) -> None:
    made = tiny.trainer(tmp_path, dp={"noise_multiplier": None, "target_epsilon": 3.0})
    made.train()
    made.dp_config.target_epsilon = 6.0
    made.train()
    assert 5.5 < made.privacy_spent().epsilon <= 6.0
    assert [run["target_epsilon"] for run in made.spending.runs] == [3.0, 6.0]


def test_a_run_that_begins_anew_within_train_would_repeat_its_noise(tmp_path: Path) -> None:
    """As `auto_find_batch_size` does after an error: the loop runs again, under the keys of the first time."""
    made = tiny.trainer(tmp_path, max_steps=2)
    loop = made._inner_training_loop
    made._inner_training_loop = lambda *args, **kwargs: (loop(*args, **kwargs), loop(*args, **kwargs))[1]
    with pytest.raises(RuntimeError, match="its noise and its draws would repeat"):
        made.train()
    assert steps(tmp_path) == 2


def test_the_training_set_is_not_evaluated_on(tmp_path: Path) -> None:
    records, other = tiny.text(), tiny.text()[:8]
    for evaluation in (records, {"dev": other, "train": records}):
        with pytest.raises(ValueError, match="`eval_dataset` must not be the training set"):
            tiny.trainer(tmp_path, None, records, eval_dataset=evaluation)
    made = tiny.trainer(tmp_path, None, records, eval_dataset=other)
    with pytest.raises(ValueError, match="`eval_dataset` must not be the training set"):
        made.evaluate(records)
    loaded = datasets.Dataset.from_list(records)
    with pytest.raises(ValueError, match="`eval_dataset` must not be the training set"):
        tiny.trainer(tmp_path, None, loaded, eval_dataset=copy.copy(loaded))
    assert "eval_loss" in made.evaluate()
    made.eval_dataset = records
    with pytest.raises(ValueError, match="`eval_dataset` must not be the training set"):
        made.evaluate()
    open_ = tiny.trainer(tmp_path, None, records, eval_dataset=records, dp={"log_nonprivate": True})
    assert "eval_loss" in open_.evaluate()


def test_refusals_come_before_the_hub_repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda *_: pytest.fail("the repo was created"))
    for settings, named in (
        ({"hub_strategy": "checkpoint"}, "`hub_strategy`"),
        ({"max_grad_norm": 0.3}, "`max_grad_norm`"),
        ({"dp": {"expected_batch_size": 41}}, "`expected_batch_size` must be at most the number of records"),
    ):
        with pytest.raises(ValueError, match=named):
            tiny.trainer(tmp_path, push_to_hub=True, **settings)


def test_a_subclass_with_its_own_loss_is_refused(tmp_path: Path) -> None:
    class Mine(DPTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any: ...

    with pytest.raises(ValueError, match="`compute_loss` cannot be combined.*per_sample_loss"):
        Mine(
            tiny.bert(), tiny.arguments(tmp_path), dp_config=DPConfig(noise_multiplier=1.0), train_dataset=tiny.text()
        )


def test_a_missing_config_and_a_search_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`dp_config` must be a DPConfig, got None"):
        DPTrainer(tiny.bert(), tiny.arguments(tmp_path))
    with pytest.raises(NotImplementedError, match="`hyperparameter_search`"):
        tiny.trainer(tmp_path).hyperparameter_search()


def test_a_delta_that_promises_nothing_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # The logger's own level, for the command line, run in this process by other tests, raises the root's.
    with caplog.at_level("WARNING", logger="hf_private.guards"):
        tiny.trainer(tmp_path, dp={"target_delta": 1 / tiny.RECORDS})
        assert "`target_delta` = 0.025 is not below 1 / 40" in caplog.text
        caplog.clear()
        tiny.trainer(tmp_path)
        assert "target_delta" not in caplog.text
