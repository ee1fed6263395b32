"""Synthetic batches: valid for every head, different, public."""

import pytest
import torch

from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch, widen
from tests.support.zoo import LENGTH, MODELS, make, make_batch


@pytest.mark.parametrize("name", MODELS)
def test_synthetic_batches_are_valid_different_and_public(name: str) -> None:
    model = make(name)
    batch = make_batch(model, 4)
    for key_, value in make_batch(model, 4).items():
        assert torch.equal(value, batch[key_])
    state = torch.random.get_rng_state()
    assert not all(torch.equal(v, batch[k]) for k, v in make_batch(model, 4, seed=1).items())
    assert torch.equal(torch.random.get_rng_state(), state)
    if "input_ids" in batch:
        sizes = batch["attention_mask"].sum(-1)
        assert sizes[0].eq(LENGTH).all() and sizes[1].lt(LENGTH).all()
        assert len(batch["input_ids"].flatten(1).unique(dim=0)) == 4
        assert ("token_type_ids" in batch) == name.startswith(("bert", "albert", "electra"))
    else:
        assert name.startswith(("vit", "resnet"))
        assert synthetic_batch(model, 4, LENGTH)["pixel_values"].dtype is torch.float64


def test_images_cannot_be_widened() -> None:
    model = make("vit")
    batch = make_batch(model, 4)
    assert all(torch.equal(v, batch[k]) for k, v in widen(model, batch, 3).items())


def test_positions_bound_the_length() -> None:
    model = make("roberta", max_position_embeddings=12)  # 12 positions, of which the first two belong to padding
    batch = synthetic_batch(model, 3, 50)
    assert batch["input_ids"].shape == (3, 10)
    assert PerSampleLoss(model)(model, batch).isfinite().all()


def test_synthetic_batches_of_length_1_and_of_one_record() -> None:
    model = make("gpt2")
    assert synthetic_batch(model, 1, 1)["attention_mask"].all()
    with pytest.raises(ValueError, match="`length`.*got 1"):
        synthetic_batch(model, 60, 1)
    with pytest.raises(ValueError, match="`batch_size`"):
        synthetic_batch(model, 0, 5)
