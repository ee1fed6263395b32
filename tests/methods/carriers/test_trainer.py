"""Carriers through DPTrainer: what trains, what is saved, and what a resumed run needs."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, TrainerCallback

from hf_private.mechanism.clipping import Clipping
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.methods.gep.public_data import fingerprint
from tests.methods.gep.test_public_data import Unlabelled
from tests.support import training, zoo

MODEL = {"hidden_size": 16, "num_hidden_layers": 2, "num_labels": 3, "problem_type": "single_label_classification"}


def trainer(
    folder, model=None, steps=2, noise_multiplier=1.0, clip_norm=1.0, save_steps=1, anchor_dataset=None, **carriers
):
    model = model or zoo.small("bert", **MODEL, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    records = [{"input_ids": [i % 30 + 3, 4, 5 + i % 3], "labels": i % 3} for i in range(40)]
    dp = {"noise_multiplier": noise_multiplier, "clip_norm": clip_norm, "expected_batch_size": 10}
    return training.trainer(
        folder, model, records, dp=dp | {"carriers": CarrierConfig(**carriers)}, key=bytes(32), max_steps=steps,
        anchor_dataset=anchor_dataset, data_collator=Unlabelled(),
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


@pytest.mark.parametrize(
    "settings",
    [
        {"source": "history", "warmup_steps": 2, "sparsity": 0.3, "sparsity_start": 3, "refresh": 1},
        {"source": "weight", "refresh": 4},  # the checkpoint is between two refreshes
        {"source": "momentum", "refresh": 2},
    ],
    ids=lambda settings: settings["source"],
)
def test_a_resumed_run_takes_the_same_steps(tmp_path, settings):
    """Same draws, noise, carriers and history: interrupting changes nothing (with the test key, dropout 0)."""
    settings = {"r": 2, **settings}

    def model():
        return zoo.small("bert", **MODEL)

    through = trainer(tmp_path / "through", model(), steps=5, save_steps=3, **settings)
    through.train()
    first = trainer(tmp_path / "parts", model(), steps=3, save_steps=3, **settings)
    first.train()
    assert (tmp_path / "parts" / "_dp" / "start.safetensors").is_file() == (settings["source"] == "history")
    state = tmp_path / "parts" / "checkpoint-3" / "_dp" / "carriers.safetensors"
    assert state.is_file() == (settings["source"] != "history")
    second = trainer(tmp_path / "parts", model(), steps=5, save_steps=3, **settings)
    second.train(resume_from_checkpoint=True)
    for (name, p), q in zip(through.model.named_parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=name)


def test_history_cannot_be_resumed_without_its_start(tmp_path):
    trainer(tmp_path, r=2, source="history", steps=1).train()
    (tmp_path / "_dp" / "start.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"start\.safetensors"):
        trainer(tmp_path, r=2, source="history", steps=2).train(resume_from_checkpoint=True)


def test_momentum_cannot_be_resumed_without_its_average(tmp_path):
    trainer(tmp_path, r=2, source="momentum", steps=1).train()
    (tmp_path / "checkpoint-1" / "_dp" / "carriers.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="`.*checkpoint-1"):
        trainer(tmp_path, r=2, source="momentum", steps=2).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("labelled", [True, False])
def test_public_carriers_come_from_the_anchor_dataset(tmp_path, labelled):
    """The card names the public data, and records that are in the training data too are refused."""
    public = [{"input_ids": [i % 30 + 3, 9, 8, 7], **({"labels": i % 3} if labelled else {})} for i in range(12)]
    made = trainer(tmp_path, r=2, source="public", refresh=2, anchor_dataset=public)
    made.train()
    made.save_model()
    found = fingerprint(public)
    assert CarrierConfig.from_pretrained(tmp_path).dataset_fingerprint == found
    card = (tmp_path / "README.md").read_text()
    assert found in card and "data of the carriers is public was stated" in card
    with pytest.raises(ValueError, match="`anchor_dataset`.*`carriers`"):
        trainer(tmp_path / "without", r=2, source="public")
    with pytest.raises(ValueError, match="`anchors`.*`anchor_dataset`"):
        trainer(tmp_path / "unused", r=2, anchor_dataset=public)
    shared = [{"input_ids": [3, 4, 5]}]
    with pytest.raises(ValueError, match="`anchor_dataset`.*shares"):
        trainer(tmp_path / "shared", r=2, source="public", anchor_dataset=shared)


def test_the_card_says_how_the_head_is_scaled(tmp_path):
    made = trainer(tmp_path, r=2, head_scale=0.25)
    made.train()
    made.save_model()
    assert "head_scale=0.25" in (tmp_path / "README.md").read_text()


def test_only_biases_and_the_head_move(tmp_path):
    used = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            used.append(made._mechanism.clipping)

    dp = {"train_only": "bias", "clipping": "automatic", "gamma": 0.0}
    made = training.trainer(tmp_path, dp=dp, max_steps=2, optim="sgd", callbacks=[Look()])
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    made.train()
    moved = {name for name, p in made.model.named_parameters() if not torch.equal(p, before[name])}
    wanted = {name for name in before if name.endswith("bias") or name.startswith("classifier")}
    assert moved == wanted and used == [Clipping("automatic", 1.0, gamma=0.0)] * 2
    made.save_model()
    assert "BiTFiT" in (tmp_path / "README.md").read_text()


def test_the_non_private_twin_learns(tmp_path):
    """Noise 0 and clip inf: the loss on the training records goes down."""
    made = trainer(tmp_path, steps=120, noise_multiplier=0.0, clip_norm=float("inf"), save_steps=1000, r=4)
    made.args.learning_rate = 0.2  # at 0.5 the loss jumps, and rounding decides when
    before = made.evaluate(made.train_dataset)["eval_loss"]
    made.train()
    assert made.evaluate(made.train_dataset)["eval_loss"] < 0.8 * before
