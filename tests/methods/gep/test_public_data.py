"""Public records: random labels, apart from the training set, on the card; and GEP in a DPTrainer, start to end."""

import json
import math

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_private.methods.gep.config import AnchorConfig
from hf_private.methods.gep.public_data import AnchorData, check_apart, checked_anchors, fingerprint
from tests.support import training, zoo

KEY = b"k" * 32


def public_text(records=30, labels=False):
    """Unlabelled records whose tokens differ from those of `training.text`."""
    generator = torch.Generator().manual_seed(5)
    rows = [{"input_ids": torch.randint(5, 60, (11,), generator=generator).tolist()} for _ in range(records)]
    return [row | {"labels": 0} for row in rows] if labels else rows


class Unlabelled(training.Padding):
    def __call__(self, records):
        unlabelled = "labels" not in records[0]
        batch = super().__call__([row | {"labels": 0} for row in records] if unlabelled else records)
        if unlabelled:
            del batch["labels"]
        return batch


def gep_trainer(folder, anchors=None, dp=None, **settings):
    config = {
        "anchors": AnchorConfig(**{"k": 8, "num_anchors": 20, "target_modules": ["classifier"], **(anchors or {})})
    }
    return training.trainer(
        folder, dp=config | (dp or {}), data_collator=Unlabelled(), **{"anchor_dataset": public_text(), **settings}
    )


@pytest.mark.parametrize("residual", [True, False])
def test_a_trainer_with_anchors(tmp_path, residual):
    trainer = gep_trainer(tmp_path, {"residual": residual}, records=training.text(), key=None)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"classifier.weight", "classifier.bias"}
    (event,) = trainer.spending.events
    assert event.steps == 4 and len(event.releases) == (2 if residual else 1)
    assert event.noise_multiplier == pytest.approx(1.0)
    anchors = trainer.privacy_record()["settings"]["anchors"]
    assert anchors["dataset_fingerprint"] == fingerprint(public_text())
    trainer.save_model()
    record = json.loads((tmp_path / "privacy.json").read_text())
    assert record["settings"]["anchors"]["dataset_fingerprint"] == fingerprint(public_text())
    assert fingerprint(public_text()) in (tmp_path / "README.md").read_text()
    assert AnchorConfig.from_pretrained(tmp_path) == trainer.dp_config.anchors  # saved with the model


def test_the_non_private_twin_is_ordinary_training(tmp_path):
    """Without clip and noise, GEP's update is that of the same trainer without anchors."""
    twin = {"noise_multiplier": 0.0, "clip_norm": math.inf}
    with_anchors = gep_trainer(tmp_path / "a", {"target_modules": None, "k": 60}, twin, key=KEY)
    without = training.trainer(tmp_path / "b", dp=twin, key=KEY)
    for trainer in (with_anchors, without):
        trainer.args.optim = "sgd"
        trainer.train()
    difference = training.weights(with_anchors.model) - training.weights(without.model)
    assert difference.norm() < 1e-4 * (training.weights(without.model) - training.weights(zoo.small("bert"))).norm()


def test_language_models_take_the_texts_own_labels(tmp_path):
    model = zoo.small("gpt2")
    trainer = gep_trainer(
        tmp_path, {"target_modules": ["c_fc"], "k": 4}, model=model, records=training.text("itself"), key=KEY
    )
    trainer.train()
    data = AnchorData(public_text(), Unlabelled(), model, num_anchors=5, max_rows=2)
    for batch in data(0):
        assert torch.equal(batch["labels"], batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100))


def test_labels_are_drawn_anew_at_every_step_and_are_not_the_datasets():
    data = AnchorData(
        public_text(200, labels=True), Unlabelled(), zoo.small("bert"), num_anchors=100, max_rows=30, seed=3
    )
    first, again, later = (list(data(step)) for step in (0, 0, 1))
    assert [len(batch["labels"]) for batch in first] == [30, 30, 30, 10]
    labels = torch.cat([batch["labels"] for batch in first])
    assert 20 < labels.sum() < 80 and labels.unique().tolist() == [0, 1]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(first, again, strict=True) for name in a)
    assert not torch.equal(labels, torch.cat([batch["labels"] for batch in later]))
    assert not torch.equal(first[0]["input_ids"], later[0]["input_ids"])


def test_own_labels_are_used_on_request_and_must_exist():
    rows = [row | {"labels": index % 2} for index, row in enumerate(public_text(20))]
    for labels in ("own", "any"):
        data = AnchorData(rows, Unlabelled(), zoo.small("bert"), num_anchors=20, max_rows=20, labels=labels)
        (batch,) = data(0)
        texts = {tuple(row["input_ids"]): row["labels"] for row in rows}
        assert [texts[tuple(ids)] for ids in batch["input_ids"].tolist()] == batch["labels"].tolist()
    with pytest.raises(ValueError, match="`anchor_dataset`.*labels='own'"):
        next(AnchorData(public_text(), Unlabelled(), zoo.small("bert"), num_anchors=5, max_rows=5, labels="own")(0))
    data = AnchorData(public_text(), Unlabelled(), zoo.small("bert"), num_anchors=5, max_rows=5, labels="any")
    assert len(next(data(0))["labels"]) == 5
    with pytest.raises(ValueError, match="`labels`"):
        AnchorConfig(labels="true")


def test_shared_records_are_refused(tmp_path):
    train = training.text()
    with pytest.raises(ValueError, match="`anchor_dataset`.* 40 "):
        gep_trainer(tmp_path, records=train, anchor_dataset=train)
    other_label = public_text()[:5] + [{"input_ids": train[3]["input_ids"], "labels": 1 - train[3]["labels"]}]
    with pytest.raises(ValueError, match="`anchor_dataset`.* 1 "):
        gep_trainer(tmp_path, records=train, anchor_dataset=other_label)
    with pytest.raises(ValueError, match="`anchor_dataset`.* 1 "):
        check_apart(Dataset.from_list(other_label), [{"input_ids": torch.tensor(r["input_ids"])} for r in train])
    dataset = Dataset.from_list(train)
    with pytest.raises(ValueError, match="`anchor_dataset`.* 40 "):
        check_apart(dataset, dataset.select(range(40)))
    check_apart(public_text(), train)
    check_apart([{"text": "a"}], [{"image": np.zeros(3)}])


def test_both_the_config_and_the_data_are_needed(tmp_path):
    with pytest.raises(ValueError, match="`anchor_dataset`.*`anchors`"):
        gep_trainer(tmp_path, anchor_dataset=None)
    with pytest.raises(ValueError, match="`anchors`.*`anchor_dataset`"):
        training.trainer(tmp_path, anchor_dataset=public_text())
    with pytest.raises(ValueError, match="`anchor_dataset`.*got "):
        gep_trainer(tmp_path, anchor_dataset=[])


def test_fingerprints():
    rows = public_text()
    config = AnchorConfig(dataset_name="mine")
    found = checked_anchors(config, rows, None)
    assert found.dataset_name == "mine" and found.dataset_fingerprint == fingerprint(rows)
    assert fingerprint(Dataset.from_list(rows)) == fingerprint(rows) != fingerprint(rows[1:])
    assert fingerprint([{"x": [1.0, 2.0]}]) == fingerprint([{"x": torch.tensor([1.0, 2.0])}])
    config.dataset_fingerprint = "0123456789abcdef"
    with pytest.raises(ValueError, match="`dataset_fingerprint`.*`anchor_dataset`"):
        checked_anchors(config, rows, None)
