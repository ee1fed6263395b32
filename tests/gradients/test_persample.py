"""Each form of a per-sample gradient against the gradients themselves, formed one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.method import Full
from hf_private.gradients.persample import (
    Dense,
    Gram,
    Grams,
    Outer,
    PerSample,
    Rows,
    Tied,
    power_of_two,
    weighted_sum,
)
from tests.support import oracle

ROWS, COLUMNS = 7, 5


def draw(kind: str, records: int, positions: int, seed: int):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    if kind == "dense":
        return Dense(normal(records, ROWS, COLUMNS))
    outer = Outer(normal(records, positions, ROWS), normal(records, positions, COLUMNS))
    rows = Rows(
        torch.randint(ROWS, (records, positions), generator=g),
        normal(records, positions, COLUMNS),
        torch.Size((ROWS, COLUMNS)),
    )
    return {"outer": outer, "rows": rows, "tied": Tied(outer, rows)}[kind]


KINDS = st.sampled_from(["dense", "outer", "rows", "tied"])
SIZES = st.integers(1, 6)


@settings(max_examples=60, deadline=None)
@given(KINDS, SIZES, SIZES, st.integers(0, 9))
def test_norms_and_sums_are_those_of_the_formed_gradients(kind, records, positions, seed):
    value = draw(kind, records, positions, seed)
    dense = value.dense()
    assert dense.shape == (records, ROWS, COLUMNS)
    torch.testing.assert_close(value.sq_norm(), dense.flatten(1).square().sum(1), rtol=1e-10, atol=1e-12)
    c = torch.randn(records, dtype=torch.float64)
    expected = torch.einsum("n,nij->ij", c, dense)
    torch.testing.assert_close(value.weighted_sum(c), expected, rtol=1e-10, atol=1e-12)
    total = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    before = total.clone()
    assert value.weighted_sum(c, into=total) is total
    torch.testing.assert_close(total, before + expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("rows", "columns", "kernel"), [(20, 3, 1), (3, 20, 1), (20, 18, 1), (9, 8, 4), (20, 12, 2)])
def test_gradients_are_formed_record_by_record(rows, columns, kernel):
    left, right = torch.randn(4, 5, rows).double(), torch.randn(4, 5, columns).double()
    shape = torch.Size((rows, columns // kernel, kernel) if kernel > 1 else (rows, columns))
    formed = Outer(left, right, shape).dense()
    expected = torch.stack([sum(torch.outer(left[n, t], right[n, t]) for t in range(5)) for n in range(4)])
    torch.testing.assert_close(formed, expected.view(4, *shape))
    assert formed.is_contiguous()  # norms and sums view it as a matrix


@settings(max_examples=80, deadline=None)
@given(KINDS, KINDS, SIZES, SIZES, SIZES, st.integers(0, 9))
def test_several_uses_of_one_parameter_add_before_the_norm(first, second, records, positions, others, seed):
    """Cross terms included, whatever the forms of the uses are."""
    one, two = draw(first, records, positions, seed), draw(second, records, others, seed + 100)
    together, formed = one + two, one.dense() + two.dense()
    torch.testing.assert_close(together.dense(), formed)
    torch.testing.assert_close(together.sq_norm(), formed.flatten(1).square().sum(1), rtol=1e-9, atol=1e-10)
    c = torch.randn(records, dtype=torch.float64)
    torch.testing.assert_close(together.weighted_sum(c), torch.einsum("n,nij->ij", c, formed), rtol=1e-9, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(KINDS, st.integers(2, 6), SIZES, st.integers(0, 9))
def test_a_weight_of_zero_removes_a_record_even_if_it_is_nan(kind, records, positions, seed):
    clean, poisoned = draw(kind, records, positions, seed), draw(kind, records, positions, seed)
    for part in (poisoned, *(getattr(poisoned, x, None) for x in ("outer", "rows"))):
        for name in ("g", "left", "right", "ds"):
            if hasattr(part, name):
                getattr(part, name)[0] = float("nan")
    c = torch.randn(records, dtype=torch.float64)
    c[0] = 0
    torch.testing.assert_close(weighted_sum(poisoned, c), weighted_sum(clean, c))
    assert torch.equal(torch.isfinite(poisoned.sq_norm())[1:], torch.ones(records - 1, dtype=torch.bool))


def test_the_gram_form_never_rounds_a_cancelling_norm_down():
    """Two positions that nearly cancel: the float32 Gram form loses the norm, so it must err upward."""
    g = torch.Generator().manual_seed(0)
    left, right = torch.randn(64, 16, 48, generator=g), torch.randn(64, 16, 32, generator=g)
    left = torch.cat([left, -left], 1)
    right = torch.cat([right, right + 1e-5 * torch.randn(right.shape, generator=g)], 1)
    exact = Outer(left.double(), right.double()).dense().flatten(1).square().sum(1)
    value = Outer(left, right)
    assert (value.sq_norm().double() >= exact).all()
    unguarded = Gram(left).dot(Gram(right)).double()
    assert (unguarded < exact).any(), "the guard would not be needed"


@pytest.mark.parametrize("shape", [(300,), (5000,), (768, 3072), (4096, 1024), (16, 3, 3)])
@pytest.mark.parametrize("kind", ["normal", "alike"])
def test_norms_of_many_numbers_do_not_round_down(shape, kind):
    """torch adds millions of squares one after another; a norm that is too low lets a record exceed the clip norm."""
    g = torch.randn(2, *shape) if kind == "normal" else torch.full((2, *shape), 0.00137)
    exact = g.double().flatten(1).square().sum(1)
    assert (Dense(g).sq_norm().double() >= exact * (1 - 1e-5)).all()


@pytest.mark.parametrize(("positions", "columns"), [(128, 768), (300, 512)])
def test_norms_of_tokens_that_are_all_alike_do_not_round_down(positions, columns):
    left, right = (torch.rand(8, 1, n).expand(-1, positions, -1) for n in (768, columns))
    exact = Outer(left.double(), right.double()).sq_norm()
    assert (Outer(left, right).sq_norm().double() >= exact * (1 - 1e-6)).all()


def test_a_square_that_underflows_is_seen_beside_a_large_input():
    value = Outer(torch.full((1, 1, 4), 1e-23), torch.full((1, 1, 4), 1e18))
    torch.testing.assert_close(value.sq_norm(), torch.tensor([16e-10]))


@pytest.mark.parametrize("scale", [1e18, 1e-18, 1e21, 1e-21])
@pytest.mark.parametrize("positions", [1, 2, 40])
def test_norms_of_factors_whose_squares_are_out_of_range(positions, scale):
    """A gradient of ordinary size may be the product of a tiny and a huge factor, record by record."""
    left, right = torch.randn(3, positions, 50), torch.randn(3, positions, 60)
    scales = torch.tensor([scale, 1.0, 1 / scale]).view(3, 1, 1)
    value, plain = Outer(left * scales, right / scales), Outer(left, right)
    torch.testing.assert_close(value.sq_norm(), plain.sq_norm(), rtol=1e-4, atol=0)
    assert (value.sq_norm() >= value.dense().flatten(1).square().sum(1) * (1 - 1e-6)).all()


@pytest.mark.parametrize("scale", [1e-25, 1e-22, 1e-10, 1e6, 1e22])
def test_norms_of_a_record_whose_squares_are_all_out_of_range(scale):
    """The lengths underflow to 0 or overflow, and no other record of the batch shows that a scale is needed."""
    left, right = torch.randn(1, 40, 50), torch.randn(1, 40, 60)
    value = Outer(left * scale, right / scale)
    torch.testing.assert_close(value.sq_norm(), Outer(left, right).sq_norm(), rtol=1e-4, atol=0)


def test_a_position_that_is_tiny_beside_another_is_not_lost():
    """Its square is 0 in float32 on one side, and the norm must err upward."""
    left, right = torch.zeros(1, 2, 50), torch.zeros(1, 2, 50)
    left[0, 0], left[0, 1], right[0, 1] = 1.0, 1e-23, 1e13
    exact = Outer(left.double(), right.double()).dense().square().sum()
    assert Outer(left, right).sq_norm() >= exact


def test_exponents_are_exact():
    exponents = torch.arange(-480, 481)
    assert power_of_two(exponents, torch.float64).tolist() == [2.0**k for k in exponents.tolist()]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_record_that_is_not_finite_does_not_change_the_norms_of_others(bad):
    left, right = 1e-20 * torch.randn(3, 4, 50), torch.randn(3, 4, 60)
    clean = Outer(left, right).sq_norm()
    left[1, 2, 3] = bad
    norms = Outer(left, right).sq_norm()
    assert torch.equal(norms[[0, 2]], clean[[0, 2]]) and not torch.isfinite(norms[1])


@pytest.mark.parametrize("positions", [1, Gram.STRIP - 1, Gram.STRIP, Gram.STRIP + 1, 150])
def test_a_gram_matrix_computed_in_strips_equals_the_whole(positions):
    x, y = torch.randn(2, positions, 3).double(), torch.randn(2, positions, 4).double()
    whole = ((x @ x.mT) * (y @ y.mT)).sum((1, 2))
    torch.testing.assert_close(Gram(x).dot(Gram(y)), whole)
    torch.testing.assert_close(Gram(x).lengths, x.norm(dim=2))


def cast(value: PerSample, dtype: torch.dtype) -> PerSample:
    if isinstance(value, Tied):
        return Tied(cast(value.outer, dtype), cast(value.rows, dtype))
    if isinstance(value, Rows):
        return Rows(value.index, value.ds.to(dtype), value.shape)
    if isinstance(value, Outer):
        return Outer(value.left.to(dtype), value.right.to(dtype))
    return Dense(value.g.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["dense", "outer", "rows", "tied"])
def test_half_precision_is_widened_before_norms_and_sums(kind, dtype):
    value = cast(draw(kind, 3, 40, 0), dtype)
    exact = cast(value, torch.float64).dense()
    norms, total = value.sq_norm(), value.weighted_sum(torch.ones(3))
    assert norms.dtype == total.dtype == value.dense().dtype == torch.float32
    ratios = norms.double().sqrt() / exact.flatten(1).norm(dim=1)
    most = 1.05 if dtype == torch.bfloat16 and kind in ("outer", "tied") else 1.001  # they cover their weights
    assert (ratios >= 1 - 1e-6).all() and (ratios <= most).all()
    torch.testing.assert_close(value.dense().double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total.double(), exact.sum(0), rtol=1e-5, atol=1e-5)


def test_gram_matrices_of_a_shared_input_are_computed_once():
    grams, x = Grams(), torch.randn(2, 3, 4)
    assert grams(x) is grams(x.view(2, 3, 4))
    assert grams(x) is not grams(x.clone())
    before = grams(x)
    x.add_(1)
    assert grams(x) is not before, "a changed input must not find its old Gram matrix"


@pytest.mark.parametrize("positions", [1, 2, 3])
def test_the_form_is_chosen_by_size(positions):
    small = Outer(torch.zeros(2, positions, 4), torch.zeros(2, positions, 4))
    assert small.instantiating_is_smaller() == (positions * 12.8 >= 16)


@pytest.mark.parametrize("scale", [1e18, 1e-18, 1e21, 1e-21])
def test_norms_of_a_model_with_huge_or_tiny_norm_weights_are_autograds(scale):
    """The layer after such a norm undoes its scale, and so does the loss: the gradients are of ordinary size."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 3)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        model[1].weight.mul_(scale)
        model[2].weight.div_(scale)
    model[1].requires_grad_(False)  # its own gradients are beyond float32
    model[0].requires_grad_(False)
    model[4].requires_grad_(False)

    def loss(model, batch):
        return model(batch["x"]).square().sum((1, 2)) / scale

    batch = {"x": torch.randn(3, 5, 8)}
    with BookKeeper(model, type("Ghost", (Full,), {"observe": lambda self, name, value: {name: value}})()) as book:
        book.backward(loss(model, batch))
        got = book.entries()["2.weight"].sq_norm().sqrt()
    wanted = [one["2.weight"].double().norm() for one in oracle.per_sample_gradients(model, loss, batch)]
    torch.testing.assert_close(got.double(), torch.stack(wanted), rtol=1e-3, atol=0)
