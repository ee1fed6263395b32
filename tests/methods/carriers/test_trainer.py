"""Carriers through DPTrainer: what trains, what is saved, and what a resumed run needs."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_private.methods.carriers.config import CarrierConfig
from tests.support import training, zoo

MODEL = {"hidden_size": 16, "num_hidden_layers": 2, "num_labels": 3, "problem_type": "single_label_classification"}


def trainer(folder, model=None, steps=2, noise_multiplier=1.0, clip_norm=1.0, save_steps=1, **carriers):
    model = model or zoo.small("bert", **MODEL, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    records = [{"input_ids": [i % 30 + 3, 4, 5 + i % 3], "labels": i % 3} for i in range(40)]
    dp = {"noise_multiplier": noise_multiplier, "clip_norm": clip_norm, "expected_batch_size": 10}
    return training.trainer(
        folder, model, records, dp=dp | {"carriers": CarrierConfig(**carriers)}, key=bytes(32), max_steps=steps,
        save_strategy="steps", save_steps=save_steps, optim="sgd", lr_scheduler_type="constant",
    )  # fmt: skip


def test_targets_and_head_move_and_the_rest_stays(tmp_path):
    made = trainer(tmp_path, r=2, sparsity=0.3)
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    made.train()
    moved = {name for name, p in made.model.named_parameters() if not torch.equal(p, before[name])}
    frozen = ("embeddings", "LayerNorm", "bias")
    wanted = {n for n in before if n.startswith("classifier") or not any(part in n for part in frozen)}
    assert moved == wanted and len(moved) > 10


def test_the_saved_model_is_a_plain_one(tmp_path):
    made = trainer(tmp_path, r=2)
    made.train()
    made.save_model(tmp_path / "final")
    assert CarrierConfig.from_pretrained(tmp_path / "final") == made.dp_config.carriers
    assert not (tmp_path / "final" / "adapter_config.json").exists()
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final")
    for (name, p), q in zip(made.model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(p, q), name


def test_the_update_has_the_rank_of_its_carriers(tmp_path):
    """Through the whole trainer: an update of rank 2 r with both carriers, of rank r with one."""
    for sides, rank in (("both", 4), ("left", 2)):
        made = trainer(tmp_path / sides, steps=1, r=2, sides=sides)
        weight = made.model.bert.encoder.layer[0].output.dense.weight
        before = weight.detach().clone()
        made.train()
        singular = torch.linalg.svdvals(weight.detach() - before)
        assert singular[rank - 1] > 1e-4 * singular[0] and singular[rank] < 1e-4 * singular[0]


def test_a_resumed_run_takes_the_same_steps(tmp_path):
    """Same draws, noise, carriers and history: interrupting changes nothing (with the test key, dropout 0)."""
    settings = {"r": 2, "source": "history", "warmup_steps": 2, "sparsity": 0.3, "sparsity_start": 3}

    def model():
        return zoo.small("bert", **MODEL)

    through = trainer(tmp_path / "through", model(), steps=5, save_steps=3, **settings)
    through.train()
    first = trainer(tmp_path / "parts", model(), steps=3, save_steps=3, **settings)
    first.train()
    assert (tmp_path / "parts" / "_dp" / "start.safetensors").is_file()
    second = trainer(tmp_path / "parts", model(), steps=5, save_steps=3, **settings)
    second.train(resume_from_checkpoint=True)
    for (name, p), q in zip(through.model.named_parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=name)


def test_history_cannot_be_resumed_without_its_start(tmp_path):
    trainer(tmp_path, r=2, source="history", steps=1).train()
    (tmp_path / "_dp" / "start.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"start\.safetensors"):
        trainer(tmp_path, r=2, source="history", steps=2).train(resume_from_checkpoint=True)


def test_the_non_private_twin_learns(tmp_path):
    """Noise 0 and clip inf: the loss on the training records goes down."""
    made = trainer(tmp_path, steps=120, noise_multiplier=0.0, clip_norm=float("inf"), save_steps=1000, r=4)
    made.args.learning_rate = 0.2  # at 0.5 the loss jumps, and rounding decides when
    before = made.evaluate(made.train_dataset)["eval_loss"]
    made.train()
    assert made.evaluate(made.train_dataset)["eval_loss"] < 0.8 * before
