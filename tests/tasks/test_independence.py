"""Rotary embeddings that turn with the longest record of a batch: exact up to their limit, refused beyond it."""

import pytest
import torch
import transformers as hf

from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.tasks.independence import rope_limit
from hf_private.tasks.losses import PerSampleLoss
from tests.support import zoo

PRETRAINED = 16
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": PRETRAINED,
    "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
}  # fmt: skip


def llama(rope: dict, longest: int = PRETRAINED) -> hf.LlamaForCausalLM:
    size = {"hidden_size": 32, "head_dim": 16, "max_position_embeddings": longest}
    return zoo.make("llama", **size, rope_parameters=rope, initializer_range=0.5)


def gradient_beside(model: hf.LlamaForCausalLM, neighbour: int) -> torch.Tensor:
    """The gradient of a record of 10 tokens in a batch with one of `neighbour` tokens."""
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))[:, : max(10, neighbour)]
    mask = torch.arange(ids.shape[1]) < torch.tensor([[10], [neighbour]])
    ids = ids.where(mask, 0)
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}
    with BookKeeper(model) as book:
        book.backward(PerSampleLoss(model)(model, batch))
        return torch.cat([g.flatten() for g in book.weighted_sum(torch.tensor([1.0, 0.0]).double()).values()])


@pytest.mark.parametrize(("rope", "longest"), [(DYNAMIC, PRETRAINED), (LONG, 64)], ids=["dynamic", "longrope"])
def test_rope_that_depends_on_the_longest_record_is_refused_beyond_its_limit(rope, longest, monkeypatch):
    model = llama(rope, longest)
    alone = gradient_beside(model, 10)
    torch.testing.assert_close(gradient_beside(model, PRETRAINED), alone)
    with pytest.raises(ValueError, match=f"`input_ids`.*{PRETRAINED}.*LlamaForCausalLM.*got 40"):
        gradient_beside(model, 40)
    torch.testing.assert_close(gradient_beside(model, PRETRAINED), alone)
    few = {"input_ids": torch.ones(1, 3).long(), "labels": torch.ones(1, 3).long()}
    for far in (
        {"position_ids": torch.tensor([[0, 1, 20]])},
        {"inputs_embeds": torch.ones(1, 20, 32), "input_ids": None},
    ):
        with pytest.raises(ValueError, match=f"`input_ids`.*{PRETRAINED}"):
            PerSampleLoss(model)(model, few | far)
    monkeypatch.setattr("hf_private.tasks.independence.rope_limit", lambda config: None)
    assert not torch.allclose(gradient_beside(model, 40), alone), "there was nothing to refuse"


def test_other_ropes_have_no_limit():
    model = llama({"rope_type": "default", "rope_theta": 1e4})
    torch.testing.assert_close(gradient_beside(model, 40), gradient_beside(model, 10))
    for config in (model.config, hf.BertConfig(), hf.ViTConfig(), None):
        assert rope_limit(config) is None


def test_rope_limit_reads_settings_per_layer_and_old_ones():
    assert rope_limit(hf.PreTrainedConfig(rope_parameters={"full": {"rope_type": "default"}, "local": LONG})) == 16
    assert (
        rope_limit(hf.PreTrainedConfig(rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=8))
        == 8
    )
