"""Products of bfloat16: added up in float32, of the same operands for norm and sum, and bounded by the norm."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_private.gradients import persample, products
from hf_private.gradients.persample import Outer, Rows
from hf_private.gradients.tensors import full_precision

HALF = torch.bfloat16
CPU = torch.device("cpu")


def random(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rounding(left: Tensor, right: Tensor) -> Tensor:
    """A device's way to multiply: both operands in bfloat16, sums in float32."""
    return torch.matmul(left.to(HALF).float(), right.to(HALF).float())


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products as on a device that rounds what is multiplied by a weight."""
    monkeypatch.setattr(products, "_way", lambda left, right: rounding)


# ---- the product


@pytest.mark.parametrize(
    "shapes", [((40, 96), (96, 72)), ((3, 5), (5, 2)), ((2, 32, 200), (2, 200, 64)), ((1, 1), (1, 7))]
)
def test_sums_are_in_float32(shapes: tuple) -> None:
    left, right = (random(*shape) for shape in shapes)
    exact = left.double() @ right.double()
    with full_precision(CPU):  # as in a step
        found = products.product(left, right, half=True)
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    assert found.dtype == torch.float32
    assert ((found - exact).abs() <= 2**-20 * (left.double().abs() @ right.double().abs())).all()


@pytest.mark.parametrize("positions", [3, 80])
def test_the_sum_over_records_is_in_float32(positions: int) -> None:
    """After the first, each record adds less than bfloat16 could."""
    left, right = random(300, positions, 10), random(300, positions, 12)
    c = torch.full((300,), 2.0**-9)
    c[0] = 1
    each = torch.einsum("nti,ntj->nij", left.double(), right.double())
    exact = torch.einsum("n,nij->ij", c.double(), each)
    bound = 2**-8.9 * torch.einsum("n,nij->ij", c.double().square(), each.square()).sqrt() * 8 + 1e-6
    found = products.weighted_product(left, right, c)
    assert found.dtype == torch.float32 and ((found - exact).abs() <= bound).all()
    into = torch.ones(10, 12)
    assert products.weighted_product(left, right, c, into) is into
    assert torch.allclose(into, found + 1, rtol=1e-5, atol=1e-5)


def in_half(left: Tensor, right: Tensor) -> Tensor:
    return torch.matmul(left.to(HALF), right.to(HALF)).float()


def in_two_halves(left: Tensor, right: Tensor) -> Tensor:
    """Sums in float32 whose parts are added in bfloat16, as reduced-precision reductions of a GPU are."""
    middle = left.shape[-1] // 2
    parts = (rounding(left[..., s], right[..., s, :]).to(HALF) for s in (slice(middle), slice(middle, None)))
    return sum(parts).float()


def one_by_one(left: Tensor, right: Tensor) -> Tensor:
    """Sums in bfloat16, whose every addition rounds."""
    total = torch.zeros(len(left), right.shape[1], dtype=HALF)
    for column, row in zip(left.t(), right, strict=True):
        total += torch.outer(column, row)
    return total


def not_offered(left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(left, right, out_dtype=torch.float32)  # not on a CPU


@pytest.mark.parametrize(
    ("way", "wanted"), [(rounding, True), (in_half, False), (in_two_halves, False), (not_offered, False)]
)
def test_a_way_is_used_only_if_it_adds_up_in_float32(way: Callable, wanted: bool) -> None:
    for axes, left, columns in [(2, (64, 1024), 64), (2, (3, 16), 5), (3, (32, 256), 64)]:
        assert products.agrees(way, "cpu", axes, left, columns) is wanted


def test_a_way_that_does_not_agree_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_ways", lambda device: [in_half])
    monkeypatch.setattr(products, "_best", products._best.__wrapped__)
    left, right = random(64, 300), random(300, 64)
    assert torch.equal(products.product(left, right, half=True), left.float() @ right.float())


# ---- the operands


@pytest.mark.parametrize("other", [torch.float32, HALF])
def test_both_operands_are_rounded_for_norms_and_for_sums(other: torch.dtype) -> None:
    left, right = random(3, 6, 40), random(3, 6, 30, dtype=other)
    value = Outer(left, right)
    exact = torch.einsum("nti,ntj->nij", left.double(), right.to(HALF).double())
    assert torch.allclose(value.dense().double(), exact, rtol=1e-5, atol=1e-5)
    norm = exact.flatten(1).norm(dim=1)
    found = value.sq_norm().double().sqrt()
    assert (found >= norm * (1 - 1e-6)).all() and (found <= norm * (1 + 1e-4)).all()
    ones = torch.ones(3)
    assert torch.allclose(value.weighted_sum(ones).double(), exact.sum(0), rtol=1e-5, atol=1e-4)


def test_float16_is_widened() -> None:
    left, right = random(2, 5, 8, dtype=torch.float16), random(2, 5, 6, dtype=torch.float16)
    value, wide = Outer(left, right), Outer(left.float(), right.float())
    assert torch.equal(value.sq_norm(), wide.sq_norm()) and torch.equal(value.dense(), wide.dense())
    formed = torch.einsum("nto,nti->noi", left.double(), right.double())  # rounding to bfloat16 would show
    assert torch.allclose(value.dense().double(), formed, rtol=1e-5, atol=1e-5)
    assert torch.equal(value.weighted_sum(torch.tensor([0.3, 0.7])), wide.weighted_sum(torch.tensor([0.3, 0.7])))


# ---- a weight rounds no more than float32 does


def adversarial(kind: str) -> Outer:
    """Operands of one record, for weights that round up as far as rounding goes."""
    if kind == "one position":
        return Outer(torch.ones(1, 1, 24, dtype=HALF), random(1, 1, 32))
    if kind in ("all alike", "long"):
        positions = 9 if kind == "all alike" else 65
        return Outer(torch.ones(1, positions, 24, dtype=HALF), random(1, 1, 32).expand(1, positions, 32))
    # Two positions cancel but for the last bit of their output gradients, which rounding turns into several.
    left = torch.ones(1, 2, 24, dtype=HALF)
    left[:, 1] = -1 + 2**-8
    return Outer(left, random(1, 1, 32).expand(1, 2, 32))


KINDS = ["one position", "all alike", "cancels", "long"]


def excess(value: persample.PerSample) -> float:
    """The largest norm of a released part, in clip norms, over weights of many mantissas."""
    norm = value.sq_norm().double().sqrt().item()
    weights = torch.cat([torch.linspace(1, 2, 513), 1 + 2**-8 + torch.linspace(0, 2**-9, 9)]).double()
    return max((value.weighted_sum(c.float().view(1)).double().norm() / (c * norm)).item() for c in weights)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_released_of_a_record_is_at_most_the_clip_norm(kind: str, rounds: None) -> None:
    assert excess(adversarial(kind)) <= 1 + 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_the_part_of_a_record_does_not_depend_on_its_batch(kind: str, rounds: None) -> None:
    """Beside a longer record, another way to multiply may be chosen: many records would be rounded in another way."""
    value = adversarial(kind)
    formed = value.dense()[0].double()
    for c in torch.linspace(1, 2, 33):
        part = value.weighted_sum(c.view(1)).double()
        assert (part - c * formed).norm() <= 1e-6 * c * (value.left.float().norm() * value.right.float().norm())


@pytest.mark.parametrize("sign", [1, -1])
def test_a_tied_weight_is_bounded_too(sign: int, rounds: None) -> None:
    """As a projection it adds up to more, or to less, than without its use as an embedding."""
    outer = Outer(torch.ones(1, 1, 6, dtype=HALF), random(1, 1, 32))
    index = torch.arange(6).unsqueeze(0)
    rows = Rows(index, (sign * outer.dense()[0] * 0.9).unsqueeze(0).to(HALF), torch.Size((6, 32)))
    assert excess(outer + rows) <= 1 + 1e-6


def test_the_sums_of_this_machine_are_bounded_too() -> None:
    assert all(excess(adversarial(kind)) <= 1 + 1e-6 for kind in KINDS)
