"""The self-check passes what is exact and refuses what is not; it leaves no trace."""

import cases
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from hf_private.layers import UncoveredError
from hf_private.losses import PerSampleLoss
from hf_private.selfcheck import SelfCheckError, self_check
from hf_private.synthetic import perturb, synthetic_batch


def check(model, loss=None, **kwargs):
    loss = loss or PerSampleLoss(model)
    return self_check(
        model,
        loss,
        lambda size, length: synthetic_batch(model, size, length),
        lambda batch, row: perturb(model, batch, row),
        **kwargs,
    )


@pytest.mark.parametrize("name", [name for name in cases.FAMILIES if name != "resnet-gn"])
def test_every_listed_family_passes_in_float32(name):
    model, _ = cases.build(name, torch.float32)
    assert "exact" in check(model)


def test_a_one_record_family_passes_alone_and_is_refused_in_company():
    model, _ = cases.build("deberta-v2", torch.float32)
    assert "batches of [1]" in check(model, max_rows=1)
    with pytest.raises(UncoveredError, match="Remedy"):
        check(model)


class Mixed(nn.Module):
    """Wraps a classifier and lets the records meet in one of several ways."""

    def __init__(self, how: str):
        super().__init__()
        self.inner, _ = cases.build("bert", torch.float32)
        self.how, self.config = how, self.inner.config
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, **inputs):
        logits = self.inner(**inputs).logits
        if self.how == "statistic":
            logits = logits - logits.mean(0, keepdim=True).tanh()
        if self.how == "neighbour":
            logits = logits + 0.3 * logits.roll(1, 0)
        if self.how == "buffer" and self.training:
            self.seen += logits.detach().mean()
        return hf.modeling_outputs.SequenceClassifierOutput(logits=logits)


@pytest.mark.parametrize(
    ("how", "match"), [("statistic", "independent"), ("neighbour", "independent"), ("buffer", "seen")]
)
def test_models_whose_records_meet_are_refused(how, match):
    model = Mixed(how)

    def loss(model, batch):
        batch = dict(batch)
        return F.cross_entropy(
            model(**{k: x for k, x in batch.items() if k != "labels"}).logits, batch["labels"], reduction="none"
        )

    with pytest.raises(SelfCheckError, match=match):
        self_check(
            model,
            loss,
            lambda size, length: synthetic_batch(model.inner, size, length),
            lambda batch, row: perturb(model.inner, batch, row),
        )


def test_a_loss_that_couples_records_is_refused():
    model, loss = cases.build("bert", torch.float32)

    def coupled(model, batch):
        losses = loss(model, batch)
        return losses / losses.detach().mean()

    with pytest.raises(SelfCheckError, match="independent"):
        check(model, coupled)


def test_a_parameter_that_takes_no_part_is_refused_by_name():
    model, _ = cases.build("bert", torch.float32)
    model.unused = nn.Linear(2, 2)
    with pytest.raises(SelfCheckError, match=r"`unused.weight`, `unused.bias` took no part"):
        check(model)


def test_left_padding_style_models_are_refused():
    """Outputs that move with the padding of the batch couple records through their lengths."""
    model, loss = cases.build("bert", torch.float32)

    def padded(model, batch):
        return loss(model, batch) * batch["input_ids"].shape[1]

    with pytest.raises(SelfCheckError, match="without padding"):
        check(model, padded)


def test_nothing_is_left_behind():
    model, _ = cases.build("bert", torch.float32)
    model.train()
    model.bert.encoder.eval()
    marker = torch.ones_like(model.classifier.weight)
    model.classifier.weight.grad = marker
    state, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    check(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert model.classifier.weight.grad is marker
    assert all(p.grad is None for name, p in model.named_parameters() if name != "classifier.weight")
