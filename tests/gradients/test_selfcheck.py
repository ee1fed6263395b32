"""The self-check passes what is exact and refuses what is not; it leaves no trace."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.comparison import Comparison
from hf_private.gradients.layers import UncoveredError
from hf_private.gradients.method import Full
from hf_private.gradients.persample import Dense
from hf_private.gradients.selfcheck import SelfCheckError, _check_against_autograd, self_check
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch
from tests.support import zoo
from tests.support.self_checks import COUPLES, check, each


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in zoo.FAMILIES if name != "resnet-gn"])
def test_every_listed_family_passes(name, dtype):
    model, _ = zoo.build(name, dtype)
    assert "exact" in check(model)


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
        sometimes = {"with one seed": torch.initial_seed() == 5, "sometimes": bool(torch.rand(()) < 0.3)}
        if self.training and sometimes.get(self.how):
            logits = logits + 0.3 * logits.roll(1, 0).detach()
        if self.how == "weight":
            with torch.no_grad():
                self.inner.classifier.weight.clamp_(-1e9, 1e9)
        if self.how == "buffer" and self.training:
            self.seen += logits.detach().mean()
        return hf.modeling_outputs.SequenceClassifierOutput(logits=logits)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("statistic", "`inner.classifier.weight`"),
        ("neighbour", "`inner.classifier.weight`"),
        ("training", COUPLES),
        ("sometimes", COUPLES),
        ("with one seed", COUPLES),
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

    with pytest.raises((SelfCheckError, UncoveredError), match=match):
        self_check(model, loss, partial(synthetic_batch, model.inner))


def test_a_model_that_is_exact_alone_only_passes_alone_and_is_refused_in_a_batch():
    model = Mixed("neighbour")

    def loss(model, batch):
        logits = model(**{k: x for k, x in batch.items() if k != "labels"}).logits
        return F.cross_entropy(logits, batch["labels"], reduction="none")

    make = partial(synthetic_batch, model.inner)
    assert "batches of 1" in self_check(model, loss, make, records_meet=False)
    with pytest.raises(UncoveredError, match="`inner.classifier.weight`"):
        self_check(model, loss, make)


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
def test_queries_that_all_records_share_are_exact(queries):
    def made(size, length, generator=None):
        draw = generator or torch.Generator().manual_seed(0)
        ids = torch.randint(50, (size, length), generator=draw)
        return {"input_ids": ids, "labels": torch.randint(3, (size,), generator=draw)}

    def loss(model, batch):
        return F.cross_entropy(model(batch["input_ids"]), batch["labels"], reduction="none")

    assert "exact" in self_check(Queries(queries), loss, made)


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
        patch.setattr("hf_private.gradients.selfcheck.BookKeeper", lambda model, **_: BookKeeper(model, Swapped()))
        with pytest.raises(SelfCheckError, match="^`bert.embeddings.LayerNorm.bias`"):
            groups = {"": [name for name, _ in model.named_parameters()]}
            _check_against_autograd(Comparison(model, loss, torch.float32, 0.0, groups), batch)


def test_a_loss_that_couples_records_is_refused():
    model, loss = zoo.build("bert", torch.float32)

    def coupled(model, batch):
        losses = loss(model, batch)
        return losses / losses.detach().mean()

    with pytest.raises(SelfCheckError, match=COUPLES):
        check(model, coupled)


def test_decoder_inputs_that_are_given_keep_their_length():
    """The decoder's inputs may be as long as the encoder's, and have no padding of their own."""
    model, loss = zoo.build("bart", torch.float32)

    def made(*arguments):
        batch = synthetic_batch(model, *arguments)
        return batch | {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])}

    assert "exact" in self_check(model, loss, made)


def test_made_up_records_that_are_alike_are_refused():
    """The mean over a batch of one and the same record is that record's own value."""
    model, loss = zoo.build("bert", torch.float32)

    def alike(size, length, generator=None):
        return {
            key: x[:1].expand(size, *x.shape[1:]) for key, x in synthetic_batch(model, 1, length, generator).items()
        }

    def centred(model, batch):
        losses = loss(model, batch)
        return losses * losses.detach().mean()

    with pytest.raises(SelfCheckError, match="`public_batch`"):
        self_check(model, centred, alike)


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


def test_weights_of_a_loss_are_refused():
    """Their gradients would have no noise, and somebody may train them."""
    model, _ = zoo.build("bert", torch.float32)
    head = nn.Linear(3, 3)

    def loss(outputs, labels):
        return each(head(outputs.logits), labels)

    with pytest.raises(SelfCheckError, match=r"`requires_grad_\(False\)`"):
        check(model, PerSampleLoss(model, loss))
    head.requires_grad_(False)
    assert "exact" in check(model, PerSampleLoss(model, loss))


def test_batch_norm_that_needs_several_records_is_refused_by_name():
    """torch has no statistic of one value, so the forward pass of one record fails in training mode."""
    model = nn.Sequential()
    model.add_module("norm", nn.BatchNorm1d(4))
    model.add_module("head", nn.Linear(4, 2))

    def make(records, length, generator=None):
        return {"x": torch.randn(records, 4, generator=generator or torch.Generator().manual_seed(0))}

    with pytest.raises(SelfCheckError, match="`norm`: BatchNorm1d"):
        self_check(model, lambda model, batch: model(batch["x"]).square().sum(1), make)
