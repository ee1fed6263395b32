"""The self-check passes what is exact and refuses what is not; it leaves no trace."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.layers import UncoveredError
from hf_private.gradients.method import Full
from hf_private.gradients.persample import Dense
from hf_private.gradients.selfcheck import SelfCheckError, _check_sum, self_check, tolerance
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch
from tests.support import zoo

# The first name in the message is a remedy, not a parameter: the refusal is about records that are not independent.
COUPLES = "^[^`]*`per_device_train_batch_size=1`"


def check(model, loss=None, **kwargs):
    loss = loss or PerSampleLoss(model)
    return self_check(
        model,
        loss,
        partial(synthetic_batch, model),
        **kwargs,
    )


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_every_listed_family_passes_in_float32(name):
    model, _ = zoo.build(name, torch.float32)
    assert "exact" in check(model)


def test_a_one_record_family_passes_alone_and_is_refused_in_a_batch():
    model, _ = zoo.build("deberta-v2", torch.float32)
    assert "batches of [1]" in check(model, records_meet=False)
    with pytest.raises(UncoveredError, match="`deberta.*key_proj`"):
        check(model)


class Mixed(nn.Module):
    """Wraps a classifier and lets the records meet in one of several ways."""

    def __init__(self, how: str):
        super().__init__()
        self.inner, _ = zoo.build("bert", torch.float32)
        self.how, self.config = how, self.inner.config
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, **inputs):
        logits = self.inner(**inputs).logits
        if self.how == "statistic":
            logits = logits - logits.mean(0, keepdim=True).tanh()
        if self.how == "neighbour":
            logits = logits + 0.3 * logits.roll(1, 0)
        if self.how == "training" and self.training:
            logits = logits + 0.3 * logits.roll(1, 0)
        if self.how == "weight":
            with torch.no_grad():
                self.inner.classifier.weight.clamp_(-1e9, 1e9)
        if self.how == "buffer" and self.training:
            self.seen += logits.detach().mean()
        return hf.modeling_outputs.SequenceClassifierOutput(logits=logits)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("statistic", COUPLES),
        ("neighbour", COUPLES),
        ("training", COUPLES),
        ("buffer", "`seen`"),
        ("weight", "`inner.classifier.weight`"),
    ],
)
def test_models_that_couple_records_are_refused(how, match):
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
            partial(synthetic_batch, model.inner),
        )


class Queries(nn.Module):
    """Ten learned queries that are looked up without a batch axis: ten rows, of which no record owns any."""

    main_input_name = "input_ids"

    def __init__(self, queries: int):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.queries, self.head = nn.Embedding(50, 16), nn.Embedding(queries, 16), nn.Linear(16, 3)

    def forward(self, input_ids):
        x, q = self.words(input_ids), self.queries(torch.arange(self.queries.num_embeddings))
        weights = torch.einsum("qd,btd->bqt", q, x).softmax(-1)
        return self.head((weights @ x).mean(1))


@pytest.mark.parametrize("queries", [10, 210])  # a multiple of some batch sizes, and of all
def test_an_axis_mistaken_for_the_batch_axis_is_refused(queries):
    def made(size, length, generator=None):
        draw = generator or torch.Generator().manual_seed(0)
        ids = torch.randint(50, (size, length), generator=draw)
        return {"input_ids": ids, "labels": torch.randint(3, (size,), generator=draw)}

    def loss(model, batch):
        return F.cross_entropy(model(batch["input_ids"]), batch["labels"], reduction="none")

    with pytest.raises((UncoveredError, SelfCheckError), match="`queries"):
        self_check(Queries(queries), loss, made)


def test_the_sum_is_checked_record_by_record():
    """One parameter's gradients are given to other records: their plain sum stays what it was."""
    model, loss = zoo.build("bert", torch.float32)

    class Swapped(Full):
        def observe(self, name, value):
            mixed_up = name == "bert.embeddings.LayerNorm.bias"
            return {name: Dense(value.dense().flip(0))} if mixed_up else super().observe(name, value)

    model.eval()
    batch = synthetic_batch(model, 7, 11)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_private.gradients.selfcheck.BookKeeper", lambda model: BookKeeper(model, Swapped()))
        with pytest.raises(SelfCheckError, match="^`bert.embeddings.LayerNorm.bias`"):
            _check_sum(model, loss, batch, tolerance(torch.float32))


def test_a_loss_that_couples_records_is_refused():
    model, loss = zoo.build("bert", torch.float32)

    def coupled(model, batch):
        losses = loss(model, batch)
        return losses / losses.detach().mean()

    with pytest.raises(SelfCheckError, match=COUPLES):
        check(model, coupled)


def test_an_unused_parameter_is_refused_by_name():
    model, _ = zoo.build("bert", torch.float32)
    model.unused = nn.Linear(2, 2)
    with pytest.raises(SelfCheckError, match="^`unused.weight`, `unused.bias`"):
        check(model)


def test_a_loss_that_depends_on_padding_is_refused():
    """Outputs that move with the padding of the batch couple records through their lengths."""
    model, loss = zoo.build("bert", torch.float32)

    def padded(model, batch):
        return loss(model, batch) * batch["input_ids"].shape[1]

    with pytest.raises(SelfCheckError, match=COUPLES):
        check(model, padded)


def test_the_check_restores_model_and_generator():
    model, _ = zoo.build("bert", torch.float32)
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


def self_paced(losses):
    return losses * torch.sigmoid(losses - losses.mean()).detach()


COUPLED = {  # (logits, labels) -> losses in which the records of a batch meet
    "divided by the mean": lambda logits, y: each(logits, y) / each(logits, y).detach().mean(),
    "class weights of the batch": lambda logits, y: each(logits, y) * (1 + 0.3 * y) / (1 + 0.3 * y).mean(),
    "centred logits": lambda logits, y: each(logits - logits.detach().mean(0), y),
    "self-paced": lambda logits, y: self_paced(each(logits, y)),
}


def each(logits, labels):
    return F.cross_entropy(logits.float(), labels, reduction="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", COUPLED)
def test_losses_that_couple_records_are_refused_in_any_precision(how, dtype):
    """A fresh model's losses are nearly equal: norms hardly move, and not at all within the rounding of bfloat16."""
    model, _ = zoo.build("bert", dtype)

    def loss(model, batch, of=COUPLED[how]):
        inputs = {key: x for key, x in batch.items() if key != "labels"}
        return of(model(**inputs).logits, batch["labels"])

    with pytest.raises(SelfCheckError, match=COUPLES):
        check(model, loss)
    assert "exact" in check(model, lambda model, batch: loss(model, batch, each))
