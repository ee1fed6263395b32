"""Records whose mask is empty, and layers that choose columns over the whole batch."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.tasks.losses import PerSampleLoss
from tests.support import zoo


def classifier(attention: str) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    config = hf.GPT2Config(
        n_embd=8, n_head=2, n_layer=2, vocab_size=60, n_positions=32, pad_token_id=0, initializer_range=0.5,
        attn_implementation=attention,
    )  # fmt: skip
    return hf.GPT2ForSequenceClassification(config).eval()


def gradients(model: nn.Module, width: int, empty: int, **changes: Any) -> tuple[Tensor, Tensor]:
    """Losses (3,) and per-record norms (3,) of a batch whose record number `empty` has no token."""
    ids = torch.randint(1, 60, (3, width), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(width) < torch.tensor([[width], [4], [3]])
    mask[empty] = False
    batch = {"input_ids": ids.where(mask, 0), "attention_mask": mask.long(), "labels": torch.tensor([0, 1, 1])}
    with BookKeeper(model) as book:
        losses = PerSampleLoss(model)(model, batch | changes)
        book.backward(losses)
        return losses.detach(), book.norms()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_record_with_an_empty_mask_contributes_nothing(attention: str) -> None:
    """Eager attention would let it see all of its padding, as much as the longest neighbour asks for."""
    model = classifier(attention)
    for width in (5, 20):
        losses, norms = gradients(model, width, empty=2)
        assert losses[2] == 0 and norms[2] < 1e-12 and torch.isfinite(norms).all()
        assert (losses[:2] > 0).all() and (norms[:2] > 0).all(), "the others count"


def test_an_empty_mask_of_one_choice_empties_the_record() -> None:
    torch.manual_seed(0)
    model = zoo.small("bert-choice").eval()
    ids = torch.randint(5, 60, (2, 3, 7))
    mask = torch.ones(2, 3, 7).long()
    mask[1, 2] = 0
    losses = PerSampleLoss(model)(model, {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1])})
    assert losses[0] > 0 and losses[1] == 0


def test_the_batch_is_left_as_it_is() -> None:
    model = zoo.small("bert")
    mask = torch.zeros(1, 4).long()
    PerSampleLoss(model)(
        model, {"input_ids": torch.ones(1, 4).long(), "attention_mask": mask, "labels": torch.tensor([1])}
    )
    assert not mask.any()


# ---- LLM.int8


class Linear8bitLt(nn.Linear):
    """Stands in for bitsandbytes' layer, which is known by its name and its threshold."""

    def __init__(self, threshold: float) -> None:
        super().__init__(8, 8)
        self.state = type("State", (), {"threshold": threshold})()


def quantized(threshold: float, how: str) -> hf.PreTrainedModel:
    model = zoo.small("bert")
    if how == "layer":
        model.bert.pooler.dense = Linear8bitLt(threshold)
    elif how == "peft":  # its adapter around the layer has the same name, and no state
        model.bert.pooler.dense = type("Linear8bitLt", (nn.Linear,), {"base_layer": Linear8bitLt(threshold)})(8, 8)
        model.bert.pooler.inner = Linear8bitLt(threshold)
    elif how == "config":
        kind = {"load_in_8bit": True, "llm_int8_threshold": threshold}
        model.config.quantization_config = type("BitsAndBytesConfig", (), kind)()
    else:
        model.config.quantization_config = {"load_in_8bit": True, "llm_int8_threshold": threshold}
    return model


@pytest.mark.parametrize("how", ["layer", "peft", "config", "dict"])
def test_int8_with_outliers_is_refused(how: str) -> None:
    with pytest.raises(ValueError, match="`llm_int8_threshold`.*got 6.0"):
        PerSampleLoss(quantized(6.0, how))
    PerSampleLoss(quantized(0.0, how))
