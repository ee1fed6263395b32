"""Rows of experts: the gradients of each record, whatever the order of its rows."""

import pytest
import torch
from torch import nn

from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.layers.attribution import Attribution, UncoveredError
from hf_private.gradients.parts import transposed
from hf_private.gradients.persample import Dense
from hf_private.gradients.ragged import Ragged, Route
from tests.support.oracle import assert_exact

RECORDS = torch.tensor([2, 0, 0, 2, 2, 5])  # of 6


def ragged(rows=4, columns=5, dtype=torch.float64, records=RECORDS):
    left, right = (torch.randn(len(records), size).to(dtype) for size in (rows, columns))
    wanted = torch.zeros(6, rows, columns, dtype=torch.float64)
    for record, one, other in zip(records.tolist(), left.double(), right.double(), strict=True):
        wanted[record] += torch.outer(one, other)
    return Ragged(left, right, Route(records, 6)), wanted


@pytest.mark.parametrize("size", [(4, 5), (40, 50)])  # formed for the norm, and not
def test_norms_and_sums_are_those_of_the_records(size):
    torch.manual_seed(0)
    (value, g), c = ragged(*size), torch.rand(6).double()
    torch.testing.assert_close(value.dense(), g)
    torch.testing.assert_close(value.sq_norm(), g.square().sum((1, 2)))
    torch.testing.assert_close(value.weighted_sum(c), torch.einsum("n,nij->ij", c, g))
    torch.testing.assert_close(value.weighted_sum(c, torch.ones(size).double()), torch.einsum("n,nij->ij", c, g) + 1)
    torch.testing.assert_close(transposed(value).dense(), g.mT)


def test_uses_of_one_expert_add_up_before_the_norm():
    torch.manual_seed(0)
    (one, g), (other, h) = ragged(), ragged(records=torch.tensor([1, 2]))
    for total in (one + other, one + Dense(h), Dense(h) + one):
        torch.testing.assert_close(total.dense(), g + h)
        torch.testing.assert_close(total.sq_norm(), (g + h).square().sum((1, 2)))


def test_a_record_that_is_not_finite_is_removed():
    torch.manual_seed(0)
    value, g = ragged()
    value.left[1] = torch.nan
    keep = torch.tensor([False, True, True, True, True, True])
    torch.testing.assert_close(value.masked(keep).weighted_sum(torch.ones(6).double()), g[1:].sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_never_round_down(dtype):
    torch.manual_seed(0)
    for scale in (1e-15, 1.0, 1e15):
        left, right = torch.randn(6, 40).to(dtype), torch.randn(6, 50).mul(scale).to(dtype)
        value = Ragged(left, right, Route(RECORDS, 6))
        exact = torch.stack([left[RECORDS == n].double().T @ right[RECORDS == n].double() for n in range(6)])
        norms, wanted = value.sq_norm().double().sqrt(), exact.flatten(1).norm(dim=1)
        assert (norms >= wanted * (1 - 1e-6)).all() and (norms <= wanted * 1.02 + 1e-20).all()


class Experts(nn.Module):
    """Two experts, whose weights may be computed; each token goes to one of them."""

    def __init__(self, scale=False):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(2, 4, 1)) if scale else None
        self.weight, self.bias = nn.Parameter(torch.randn(2, 4, 6)), nn.Parameter(torch.randn(2, 4))

    def forward(self, hidden_states, top_k_index):
        y = hidden_states.new_zeros(len(hidden_states), 4)
        for expert in top_k_index.unique():
            rows = (top_k_index == expert).nonzero().squeeze(1)
            weight = self.weight[expert] if self.scale is None else (self.weight * self.scale)[expert]
            y.index_add_(0, rows, nn.functional.linear(hidden_states[rows], weight, self.bias[expert]))
        return y


class Mixture(nn.Module):
    def __init__(self, scale=False):
        super().__init__()
        self.below, self.experts = nn.Linear(6, 6), Experts(scale)

    def forward(self, x, choices):
        return self.experts(self.below(x).flatten(0, 1), choices.flatten()).view(*x.shape[:2], 4)


def squares(model, batch):
    return model(batch["x"], batch["choices"]).square().sum((1, 2))


@pytest.mark.parametrize("scale", [False, True])
def test_experts_are_exact_whatever_records_reach_them(scale):
    torch.manual_seed(0)
    model = Mixture(scale).double()
    for batch_size, length in ((3, 4), (4, 8), (1, 5), (2, 1)):
        choices = torch.randint(2, (batch_size, length))
        choices[0] = 0  # perhaps one record alone reaches the second
        assert_exact(model, squares, {"x": torch.randn(batch_size, length, 6).double(), "choices": choices})


def test_an_expert_that_one_record_reaches_is_not_measured_in_every_batch(monkeypatch):
    """It shows nothing of its layout then; the other expert, which the same code runs, does."""
    torch.manual_seed(0)
    model, measured, measure = Mixture().double(), [], Attribution.measure
    monkeypatch.setattr(Attribution, "measure", lambda *args: measured.append(measure(*args)) or measured[-1])
    choices = torch.tensor([[0, 0, 0], [0, 0, 0], [0, 1, 1]])
    for _ in range(3):
        with BookKeeper(model) as book:
            book.backward(squares(model, {"x": torch.randn(3, 3, 6).double(), "choices": choices}))
    assert measured[0] and not measured[2]


class Shuffled(Mixture):
    """An index that is not the one that rows were picked with."""

    def forward(self, x, choices):
        y = self.experts(self.below(x).flatten(0, 1), choices.flatten()).view(*x.shape[:2], 4)
        return y.roll(1, 0)


def test_rows_whose_gradients_are_of_other_records_are_refused():
    torch.manual_seed(0)
    model = Shuffled().double()
    model.below.requires_grad_(False)
    model.experts.bias.requires_grad_(False)
    batch = {"x": torch.randn(3, 3, 6).double(), "choices": torch.randint(2, (3, 3))}
    with pytest.raises(UncoveredError, match="`experts.weight`"), BookKeeper(model) as book:
        book.backward(squares(model, batch))
