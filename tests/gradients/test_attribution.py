"""Which record a gradient belongs to is measured: exact or refused at every batch size and length, never wrong."""

from unittest import mock

import pytest
import torch
from torch import nn

from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.layers import UncoveredError
from hf_private.gradients.layers.attribution import Attribution, weights
from tests.support import layouts, oracle, zoo
from tests.support.oracle import assert_exact

SIZES = [(b, t) for b in (2, 3, 4, 6) for t in (4, 6, 8, 12)]  # of most, B divides T

EXACT = {
    "positions (1, T)",
    "positions (T,)",
    "class of each record",
    "time first",
    "records first, flat",
    "scale",
    "class token",
    "linear function",
    "blenderbot",
    "blenderbot-lora",
    "bigbird-pegasus",
    "led",
    "longformer",
    "xlnet-lora",
    "reformer",
    "distances (T, T)",
    "queries",
    "attention",
    "attention, time first",
    "sum of sigmoids",
    "softmax",
    "divided by its length",
    "matrix",
    "mpnet",
    "diffllama",
    "wav2vec2-bert",
}
REFUSED = {  # by the name of this parameter
    "time first, flat": "layer.norm.weight",
    "routed": "layer.linear.weight",
}
UNDECIDED = {"mean", "first row", "scale, time first"}  # exact or refused, as the sizes come


def sizes(name: str) -> list[tuple[int, int]]:
    """All sizes for one layer; for a model a few, and lengths that it can train on."""
    return SIZES if name in layouts.LAYERS else [(2, 8), (4, 4), (3, 12)]


@pytest.mark.parametrize("name", sorted(EXACT))
def test_exact_at_every_size_in_any_order(name):
    model, loss = layouts.build(name)
    for batch_size, length in [*sizes(name), (1, 4), *reversed(sizes(name))]:
        assert_exact(model, loss, layouts.make_batch(name, model, batch_size, length))


@pytest.mark.parametrize("name", sorted(EXACT))
def test_exact_whatever_size_comes_first(name):
    for batch_size, length in sizes(name):
        model, loss = layouts.build(name)
        assert_exact(model, loss, layouts.make_batch(name, model, batch_size, length))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_by_name_at_every_size_and_exact_alone(name):
    model, loss = layouts.build(name)
    for batch_size, length in sizes(name):
        batch = layouts.make_batch(name, model, batch_size, length)
        with pytest.raises(UncoveredError, match=rf"(?s)`[^`]*{REFUSED[name]}`.*Remedy"), BookKeeper(model) as book:
            book.backward(loss(model, batch))
    assert_exact(model, loss, layouts.make_batch(name, model, 1, 4))


@pytest.mark.parametrize("name", sorted(UNDECIDED))
def test_exact_or_refused_at_every_size(name):
    for batch_size, length in [*sizes(name), (1, 4)]:
        model, loss = layouts.build(name)
        try:
            assert_exact(model, loss, layouts.make_batch(name, model, batch_size, length))
        except UncoveredError as error:
            assert "`layer.a`" in str(error) and batch_size > 1


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_families_are_exact_where_the_batch_size_divides_the_length(name):
    model, loss = zoo.build(name)
    model.eval()
    for batch_size, length in [(4, 8), (2, 4), (6, 6), (3, 6)]:
        assert_exact(model, loss, zoo.make_batch(model, batch_size, length))


def test_a_module_that_looks_at_the_shape_of_its_parameter_is_exact():
    """With as many records as the parameter is long, the copies look like the parameter: that is not remembered."""
    name = "divided by its length"
    model, loss = layouts.build(name)
    assert_exact(model, loss, layouts.make_batch(name, model, 6, 4))
    assert_exact(model, loss, layouts.make_batch(name, model, 3, 4))


class Both(nn.Module):
    """One layer, with the records in front and then behind."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.layer(x.transpose(0, 1)).tanh().transpose(0, 1))


def test_a_layer_that_is_called_in_two_layouts_is_exact():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Both()).double()
    for batch_size, length in SIZES:
        batch = {"x": torch.randn(batch_size, length, 6).double()}
        assert_exact(model, lambda model, batch: model(batch["x"]).square().sum((1, 2)), batch)


class LastToken(nn.Module):
    """A time-first layer whose output is read at one position per record."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, last):
        y = self.layer(x.transpose(0, 1)).transpose(0, 1)
        return y[torch.arange(len(x)), last]


def test_a_layout_that_is_not_the_only_one_that_fits_is_not_remembered():
    """Record n ends at token n, so that either axis fits the first batch."""
    torch.manual_seed(0)
    model = LastToken().double()

    def loss(model, batch):
        return model(batch["x"], batch["last"]).square().sum(1)

    for last in (torch.arange(4), torch.tensor([3, 3, 1, 0])):
        assert_exact(model, loss, {"x": torch.randn(4, 4, 6).double(), "last": last})


def measured(model, loss, batch) -> bool:
    """Whether a second backward pass ran."""
    ran, measure = [], Attribution.measure

    def noted(self, *args):
        ran.append(measure(self, *args))
        return ran[-1]

    with mock.patch.object(Attribution, "measure", noted), BookKeeper(model) as book:
        book.backward(loss(model, batch))
    return ran[0]


def test_a_model_is_measured_once():
    model, loss = zoo.build("bert")
    assert not measured(model, loss, zoo.make_batch(model, 1))  # one record shows nothing, and needs nothing
    assert measured(model, loss, zoo.make_batch(model, 4))
    for batch_size, length in [(4, 7), (2, 9), (3, 5)]:
        assert not measured(model.train(), loss, zoo.make_batch(model, batch_size, length))
    model.bert.pooler.requires_grad_(False)
    assert not measured(model, loss, zoo.make_batch(model, 4))
    model.bert.pooler.dense.bias.requires_grad_(True)
    assert measured(model, loss, zoo.make_batch(model, 4)), "another set of parameters"
    batch = zoo.make_batch(model, 4)
    assert measured(model, loss, {k: x for k, x in batch.items() if k != "token_type_ids"}), "other inputs"


def test_as_many_records_as_tokens_are_measured_once():
    """BERT's token types, which are all 0, are not a table of distances."""
    model, loss = zoo.build("bert")
    batch = {k: x for k, x in zoo.make_batch(model, 6, 6).items() if k != "token_type_ids"}
    assert measured(model, loss, batch)
    assert not measured(model, loss, batch)


def test_the_order_in_a_flattened_axis_is_measured_again():
    """At a new number of entries per record, and then at calls 2, 4, 8, ..."""
    model, loss = layouts.build("records first, flat")
    found = [
        measured(model, loss, layouts.make_batch("records first, flat", model, 2, length))
        for length in (4, 4, 4, 4, 6, 4, 4, 4, 4)
    ]
    assert found == [True, True, False, True, True, False, False, False, True]


def test_what_has_no_gradient_yet_is_measured_later():
    """LoRA's A has none in the first step, because B is 0."""
    model, loss = layouts.build("xlnet-lora")
    batch = layouts.make_batch("xlnet-lora", model, 4, 8)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.zero_()
    assert_exact(model, loss, batch)
    assert measured(model, loss, batch)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    assert_exact(model, loss, batch)
    assert not measured(model, loss, batch)


def test_losses_that_couple_records_are_refused():
    model, loss = zoo.build("bert")
    with pytest.raises(UncoveredError, match="`per_device_train_batch_size=1`"), BookKeeper(model) as book:
        losses = loss(model, zoo.make_batch(model, 4))
        book.backward(losses + 0.1 * losses.roll(1, 0))


def test_measuring_leaves_no_trace():
    model, loss = zoo.build("bert")
    model.train()
    batch = zoo.make_batch(model, 3)
    sums, states = [], []
    for _ in range(2):  # the first batch is measured, the second is not
        torch.manual_seed(1)
        with BookKeeper(model) as book:
            book.backward(loss(model, batch))
            sums.append(book.weighted_sum(torch.ones(3)))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["bert", "gpt2", "opt", "t5"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_models_are_measured_under_gradient_checkpointing(name, reentrant):
    model, loss = zoo.build(name)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for _ in range(2):
        assert_exact(model, loss, zoo.make_batch(model, 4, 8))


def test_dropout_masks_are_those_of_the_forward_pass():
    """Both backward passes see them, also where gradient checkpointing draws them again."""
    model, loss = zoo.build("bert")
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch, sums = zoo.make_batch(model, 4, 8), []
    for _ in range(2):
        torch.manual_seed(1)
        with BookKeeper(model) as book:
            book.backward(loss(model, batch))
            sums.append(book.weighted_sum(torch.ones(4)))
    assert all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])


@pytest.mark.parametrize("records", [2, 16, 100])
def test_weights_tell_records_apart(records):
    w = weights(records, torch.zeros(1))
    assert len(w) == records and len(w.unique()) == min(records, 16)
    assert torch.equal(w, weights(records, torch.zeros(1))), "the same on every rank"


def test_a_model_is_forgotten_with_its_measurements():
    import gc
    import weakref

    model = nn.Linear(3, 2)
    with BookKeeper(model) as book:
        book.backward(model(torch.randn(4, 3)).sum(1))
    gone = weakref.ref(model)
    del model, book
    gc.collect()
    assert gone() is None


def test_oracle_agrees_with_itself_on_reversible_layers():
    """`autograd.grad` would miss what a reversible layer computes by a backward pass of its own."""
    model, loss = layouts.build("reformer")
    gradients = oracle.per_sample_gradients(model, loss, layouts.make_batch("reformer", model, 2, 8))
    assert all(one["reformer.encoder.layers.0.feed_forward.dense.dense.weight"].any() for one in gradients)
