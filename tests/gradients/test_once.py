"""What all records share is computed once, and computed weights go to rules: exact or refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.layers import UncoveredError
from hf_private.gradients.layers.once import expanded, is_same, once
from tests.support import zoo
from tests.support.oracle import assert_exact


def squares(model, batch):
    return model(batch["x"]).square().flatten(1).sum(1)


class Doubled(torch.autograd.Function):
    """A derivative that vmap does not know."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, *grads):
        return torch.from_numpy(2 * grads[0].numpy())


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: x @ y,
        lambda x, y: (x.exp(), [y.sum(0), 3, None]),
        lambda x, y: (x @ y).max(1),
        lambda x, y: x.mT.split(2),
        lambda x, y: Doubled.apply(x) + y.sum(),
    ],
)
def test_gradients_of_a_value_that_is_computed_once_are_those_of_each_record(call):
    torch.manual_seed(0)
    x, y = (expanded(torch.randn(s).double(), 3).detach().requires_grad_() for s in ((4, 5), (5, 6)))
    found, wanted = once(call, [x, y]), [call(x[n], y[n]) for n in range(3)]
    leaves, spec = torch.utils._pytree.tree_flatten(found)
    each = [torch.utils._pytree.tree_flatten(one) for one in wanted]
    assert all(spec == other for _, other in each)
    total, sums = 0, 0
    for i, value in enumerate(leaves):
        if not isinstance(value, torch.Tensor):
            assert value == each[0][0][i]
            continue
        assert is_same(value)
        stacked = torch.stack([one[i] for one, _ in each])
        torch.testing.assert_close(value, stacked)
        if value.is_floating_point():
            weights = torch.randn_like(stacked)
            total, sums = total + (value * weights).sum(), sums + (stacked * weights).sum()
    for _ in range(2):  # the pass of weighted losses comes first
        got, expected = (torch.autograd.grad(v, [x, y], retain_graph=True, allow_unused=True) for v in (total, sums))
        for g, other in zip(got, expected, strict=True):
            assert (g is None) == (other is None)
            if g is not None:
                torch.testing.assert_close(g, other)


class Distances(nn.Module):
    """A table of distances that a norm and a layer are applied to, which also sees the records, as in DeBERTa."""

    def __init__(self, tied=True, dropout=0.0):
        super().__init__()
        self.table, self.norm = nn.Embedding(16, 6), nn.LayerNorm(6)
        self.key, self.value = nn.Linear(6, 6), nn.Linear(6, 6)
        self.position, self.dropout = self.key if tied else nn.Linear(6, 6), nn.Dropout(dropout)

    def attend(self, x):
        length = x.shape[1]
        rows = self.position(self.dropout(self.norm(self.table.weight))[0:16].unsqueeze(0)).repeat(len(x), 1, 1)
        scores = torch.bmm(self.key(x), rows.mT)
        steps = torch.arange(length)
        index = (steps[:, None] - steps[None, :] + 8).clamp(0, 15).expand(len(x), -1, -1)
        return torch.bmm(scores.gather(2, index).softmax(2), self.value(x))

    def forward(self, x):
        return self.attend(self.attend(x))


@pytest.mark.parametrize("tied", [True, False])
def test_a_layer_of_a_table_that_all_records_share_is_exact(tied):
    """Of 16 distances, 2 tokens reach 3: the other rows are left out of products. Both uses of the layer add up."""
    torch.manual_seed(0)
    model = Distances(tied).double()
    for batch_size, length in ((2, 2), (1, 3), (3, 3), (4, 8), (3, 12), (4, 2)):
        x = torch.randn(batch_size, length, 6).double()
        x[0, 1:] = 0  # records reach different rows
        assert_exact(model, squares, {"x": x})


def test_rows_that_one_record_alone_reaches_are_not_left_out():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4)).double()
    table, picked = torch.randn(1, 16, 6).double(), torch.tensor([3, 9, 10])

    def loss(model, batch):
        y, records = model(batch["x"]), range(len(batch["x"]))
        return (y * model[0](table).repeat(len(y), 1, 1)[records, batch["n"]]).sum(1)

    assert_exact(model, loss, {"x": torch.randn(3, 6).double(), "n": picked})


def test_gradient_checkpointing_around_a_shared_table_is_exact():
    torch.manual_seed(0)
    model = Distances().double()

    def loss(model, batch):
        return checkpoint(model, batch["x"], use_reentrant=False).square().sum((1, 2))

    for batch_size in (1, 3):
        assert_exact(model, loss, {"x": torch.randn(batch_size, 3, 6).double()})


def test_records_share_the_dropout_of_what_they_share():
    """As in ordinary training, there is one mask for all: here it removes everything, or nothing."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6)).double(), torch.randn(8, 6).double()
    model.scale = nn.Parameter(torch.ones(1).double())
    with BookKeeper(model) as book:
        y = model(x)
        scaled = y * F.dropout(model.scale * 1.0, 0.5, training=True)
        book.backward(scaled.square().sum(1))
        kept = (book.entries()["0.weight"].sq_norm() > 1e-12).tolist()
    assert len(set(kept)) == 1


def test_a_table_whose_rows_no_record_reaches_is_exact():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4)).double()

    def loss(model, batch):
        return (
            model(batch["x"]) * (1 + 0 * model[0](torch.ones(1, 8, 6).double()).repeat(len(batch["x"]), 1, 1)[:, 0])
        ).sum(1)

    assert_exact(model, loss, {"x": torch.randn(3, 6).double()})


class Positions(nn.Module):
    """Distances that are multiplied with a weight by `einsum`, as in Funnel."""

    def __init__(self):
        super().__init__()
        self.below, self.kernel = nn.Linear(6, 6), nn.Parameter(torch.randn(5, 2, 3))

    def forward(self, x):
        y = self.below(x).unflatten(2, (2, 3))
        rows = torch.einsum("td,dnh->tnh", torch.arange(2 * x.shape[1] * 5).view(-1, 5).to(x).sin(), self.kernel)
        return torch.einsum("binh,tnh->bnit", y, rows)


def test_positions_in_einsum_are_exact_by_the_rule():
    torch.manual_seed(0)
    model = Positions().double()
    for batch_size, length in ((3, 5), (4, 8), (1, 4), (6, 3), (2, 2)):
        assert_exact(model, squares, {"x": torch.randn(batch_size, length, 6).double()})
    with BookKeeper(model) as book:
        book.backward(squares(model, {"x": torch.randn(3, 5, 6).double()}))
        assert not book.copied


class InPlace(nn.Module):
    """A value that is changed in place, beside a view of it that is used later."""

    def __init__(self, view):
        super().__init__()
        self.below, self.table, self.view = nn.Linear(6, 6), nn.Parameter(torch.randn(4, 6)), view

    def forward(self, x):
        rows = self.table * 2
        other = rows[1:] if self.view else rows * 1.0
        rows.mul_(3)
        return self.below(x) + rows[0] * other[1]


def test_a_change_in_place_that_a_view_would_not_see_is_refused():
    torch.manual_seed(0)
    batch = {"x": torch.randn(3, 6).double()}
    assert_exact(InPlace(view=False).double(), squares, batch)
    model = InPlace(view=True).double()
    with pytest.raises(UncoveredError, match="`table`"), BookKeeper(model) as book:
        book.backward(squares(model, batch))
    assert_exact(model, squares, {"x": batch["x"][:1]})


class Computed(nn.Module):
    """A linear layer whose weight is computed, used twice, and beside the parameter itself."""

    def __init__(self, time_first=False):
        super().__init__()
        self.below, self.w, self.g = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.rand(6, 1))
        self.bias = nn.Parameter(torch.randn(6))
        self.time_first = time_first

    def forward(self, x):
        x = self.below(x)
        if self.time_first:
            x = x.transpose(0, 1)
        weight = self.w * self.g / self.w.norm(dim=1, keepdim=True)
        y = F.linear(F.linear(x, weight, self.bias).tanh(), weight, self.g[:, 0]) + x @ weight + F.linear(x, self.w)
        return y.transpose(0, 1) if self.time_first else y


@pytest.mark.parametrize("time_first", [False, True])
def test_a_computed_weight_is_exact(time_first):
    torch.manual_seed(0)
    model = Computed(time_first).double()
    for batch_size, length in ((2, 3), (4, 8), (1, 4), (3, 7), (5, 1)):
        assert_exact(model, squares, {"x": torch.randn(batch_size, length, 6).double()})


def test_a_computed_weight_is_exact_or_refused_where_lengths_say_nothing():
    torch.manual_seed(0)
    model = Computed(time_first=True).double()
    for batch_size, length in ((3, 3), (2, 4), (4, 4)):
        try:
            assert_exact(model, squares, {"x": torch.randn(batch_size, length, 6).double()})
        except UncoveredError as error:
            assert "`g`" in str(error) or "`w`" in str(error)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: weight_norm(nn.Conv1d(6, 6, 4, padding=2, groups=3), dim=2),  # wav2vec2's positions
        lambda: weight_norm(nn.Conv1d(6, 4, 3, stride=2, padding=1)),
        lambda: torch.nn.utils.weight_norm(nn.Conv1d(6, 4, 3)),
        lambda: spectral_norm(nn.Conv1d(6, 4, 3)).eval(),
    ],
)
def test_a_convolution_with_a_computed_weight_is_exact_by_the_rule(layer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 6, 1), layer()).double().eval()
    for batch_size, length in ((2, 5), (4, 8), (1, 4), (3, 7)):
        batch = {"x": torch.randn(batch_size, 2, length).double()}
        assert_exact(model, squares, batch)
    with BookKeeper(model) as book:
        book.backward(squares(model, batch))
        assert not book.formed


def test_deberta_leaves_out_what_short_records_do_not_reach():
    model, loss = zoo.build("deberta-v2", position_buckets=16)
    model.eval()
    for batch_size, length in ((2, 4), (4, 8), (1, 3)):
        assert_exact(model, loss, zoo.make_batch(model, batch_size, length))
    with BookKeeper(model) as book:
        book.backward(loss(model, zoo.make_batch(model, 2, 4)))
        assert not book.formed
