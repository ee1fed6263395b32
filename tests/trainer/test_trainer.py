"""DPTrainer as users run it: what changes an update and what does not, and training from end to end."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from hf_private.config import DPConfig
from hf_private.mechanism.clipping import MODES, Clipping
from hf_private.trainer.trainer import DPTrainer
from tests.support import training, zoo

# ---- what changes speed only


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Weights after a run in micro-batches of 8."""
    return training.trained(tmp_path_factory.mktemp("reference"), dp={"expected_batch_size": 16}, **training.SGD)


@pytest.mark.parametrize(
    "settings",
    [
        {"per_device_train_batch_size": 1},
        {"per_device_train_batch_size": 4},
        {"per_device_train_batch_size": training.RECORDS},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "dp": {}},
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "dp": {}},
        {"dp": {"expected_batch_size": 16, "micro_batch_tokens": 12}},
        {"dataloader_num_workers": 2},
    ],
    ids=["micro1", "micro4", "microall", "accumulate8", "accumulate1", "tokens", "workers2"],
)
def test_the_update_does_not_depend_on_how_it_is_computed(tmp_path: Path, reference: Tensor, settings: dict) -> None:
    settings = {"dp": {"expected_batch_size": 16}, **training.SGD, **settings}
    torch.testing.assert_close(training.trained(tmp_path, **settings), reference, rtol=0, atol=1e-6)


def test_another_expected_batch_size_is_another_update(tmp_path: Path, reference: Tensor) -> None:
    """The control: the comparison above can fail."""
    other = training.trained(tmp_path, dp={"expected_batch_size": 17}, **training.SGD)
    assert (other - reference).abs().max() > 1e-3


@pytest.mark.parametrize("stop", [3, 5])  # in the middle of an epoch of 5 steps, and at its end
@pytest.mark.usefixtures("quick_cards")
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, stop: int) -> None:
    settings = {"max_steps": 8, "lr_scheduler_type": "cosine", "logging_steps": 2}
    whole = training.trained(tmp_path / "whole", **settings)
    saving = {"save_strategy": "steps", "save_steps": stop, "callbacks": [training.Stop(stop)]}
    training.trainer(tmp_path / "half", key=training.KEY, **saving, **settings).train()
    again = training.trainer(tmp_path / "half", key=training.KEY, **settings)
    assert again.train(resume_from_checkpoint=True).global_step == 8
    assert torch.equal(training.weights(again.model), whole)
    assert training.steps(tmp_path / "half") == 8


def test_the_seed_does_not_repeat_noise_and_draws(tmp_path: Path) -> None:
    runs = []
    for name in "ab":
        made = training.trainer(tmp_path / name, seed=42, data_seed=42, max_steps=1, **training.SGD)
        made.train()
        runs.append(training.weights(made.model))
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
    made = training.trainer(tmp_path, dp=dp, max_steps=1)
    for parameter in made.model.parameters():
        parameter.data.mul_(3)  # gradients far above the clip norm
    mechanism = mechanism_of(made)
    assert mechanism.clipping == Clipping(mode, clip_norm)
    batch = [training.Padding()(made.train_dataset[:8])]
    with_record = mechanism._clipped_sums(batch)
    mechanism.clipping = WithoutRecord(mode, clip_norm)
    without = mechanism._clipped_sums(batch)
    moved = torch.stack([(with_record[block] - without[block]).norm() for block in with_record]).norm().item()
    assert moved <= clip_norm * (1 + 1e-4)
    assert moved > 0 or mode == "global"  # which drops every record that is this large
    if clip_norm < 0.1 and mode in ("flat", "automatic"):
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

    made = training.trainer(
        tmp_path, dp={"expected_batch_size": 1}, key=training.KEY, max_steps=12, callbacks=[Watch()]
    )
    step = made.training_step
    made.training_step = lambda model, inputs, n=None: (sizes.append(inputs.size), step(model, inputs, n))[1]
    made.train()
    assert len(sizes) == len(moved) == training.steps(tmp_path) == made.state.global_step == 12
    assert 0 in sizes and all(moved)


def test_the_non_private_twin_is_plain_training_and_says_so(tmp_path: Path) -> None:
    settings = {"max_steps": 3, "per_device_train_batch_size": training.RECORDS, **training.SGD}
    twin = training.trainer(tmp_path / "twin", dp={"noise_multiplier": 0, "clip_norm": math.inf}, **settings)
    twin.train()
    plain = Trainer(
        zoo.small("bert"),
        training.arguments(tmp_path / "plain", **settings),
        train_dataset=training.text(),
        data_collator=training.Padding(),
    )
    plain.train()
    torch.testing.assert_close(training.weights(twin.model), training.weights(plain.model), rtol=0, atol=1e-5)
    report = twin.privacy_spent()
    assert report.epsilon == math.inf and "NOT PRIVATE" in report.note
    assert all(entry["epsilon"] == "inf" and entry["privacy"] == "NOT PRIVATE" for entry in twin.state.log_history)
    assert twin.privacy_record()["ledger"]["events"][0]["releases"] == [0.0]


def test_a_test_key_is_not_private(tmp_path: Path) -> None:
    made = training.trainer(tmp_path, key=training.KEY)
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

    return get_peft_model(zoo.small("bert"), LoraConfig(**LORA))


FAMILIES = {
    "bert": (lambda: zoo.small("bert"), training.text),
    "gpt2": (lambda: zoo.small("gpt2"), lambda: training.text("itself")),
    "t5": (lambda: zoo.small("t5"), lambda: training.text("itself")),
    "vit": (lambda: zoo.small("vit"), training.images),
    "tokens": (lambda: zoo.small("bert-token", num_labels=3), lambda: training.text("tokens")),
    "lora": (lora, training.text),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_evaluate_and_load_again(tmp_path: Path, family: str) -> None:
    make, data = FAMILIES[family]
    model, records, held_out = make(), data(), data()[:8]
    del records[:8]
    collator = {} if family != "vit" else {"data_collator": None}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = training.trainer(
        tmp_path,
        model,
        records,
        eval_dataset=held_out,
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
        assert torch.equal(training.weights(loaded), training.weights(model))


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor", "sgd"])
def test_optimizers_and_a_schedule_that_acts(tmp_path: Path, optim: str) -> None:
    made = training.trainer(tmp_path, optim=optim, lr_scheduler_type="cosine", warmup_steps=1, max_steps=4)
    before = training.weights(made.model)
    made.train()
    rates = [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]
    wanted = [0.0, *(1e-2 * (1 + math.cos(math.pi * x / 3)) / 2 for x in range(3))]
    assert rates == pytest.approx(wanted)
    assert (training.weights(made.model) != before).float().mean() > 0.9


@pytest.mark.parametrize("settings", [{"bf16": True}, {"gradient_checkpointing": True}], ids=["bf16", "checkpointing"])
def test_precision_and_memory_settings(tmp_path: Path, reference: Tensor, settings: dict) -> None:
    weights = training.trained(tmp_path, dp={"expected_batch_size": 16}, **training.SGD, **settings)
    assert (weights - reference).abs().max() < (2e-2 if "bf16" in settings else 1e-6)


@pytest.mark.usefixtures("quick_cards")
def test_early_stopping_best_model_and_resume(tmp_path: Path) -> None:
    settings = {
        "eval_dataset": training.text(seed=1)[:8],
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "max_steps": 5,
        "save_total_limit": 2,
    }
    made = training.trainer(tmp_path, callbacks=[EarlyStoppingCallback(1, 10.0)], **settings)
    made.train()
    assert 1 <= made.state.global_step < 5
    stopped = made.state.global_step
    assert training.steps(tmp_path) == stopped  # all steps are charged, whichever model was kept
    again = training.trainer(tmp_path, **settings)
    assert again.train(resume_from_checkpoint=True).global_step == 5
    assert training.steps(tmp_path) >= 5
    best = float(min(entry["eval_loss"] for entry in again.state.log_history if "eval_loss" in entry))
    assert again.evaluate()["eval_loss"] == pytest.approx(best, abs=1e-4)


def test_a_custom_loss_for_each_record_and_label_smoothing(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels, reduction="none", label_smoothing=0.1)

    custom = training.trained(tmp_path / "custom", per_sample_loss=loss, **training.SGD)
    smooth = training.trained(tmp_path / "smooth", label_smoothing_factor=0.1, **training.SGD)
    plain = training.trained(tmp_path / "plain", **training.SGD)
    torch.testing.assert_close(custom, smooth, rtol=0, atol=1e-6)
    assert (custom - plain).abs().max() > 1e-4


def test_a_model_from_model_init(tmp_path: Path) -> None:
    made = DPTrainer(
        args=training.arguments(tmp_path),
        model_init=lambda: zoo.small("bert"),
        dp_config=DPConfig(noise_multiplier=1.0),
        train_dataset=training.text(),
        data_collator=training.Padding(),
    )
    assert made.train().global_step == 4
