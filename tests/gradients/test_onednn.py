"""Products of the engine by oneDNN: in float32, as exact as torch's own, and used only where they agree."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hf_private.cli.doctor import dryrun
from hf_private.gradients import onednn, products
from hf_private.gradients.persample import Gram, Outer
from hf_private.gradients.tensors import full_precision

AMD = {"cpu_name": "AMD EPYC", "avx512_f": True}
CPU = torch.device("cpu")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list]:
    """A list that gets the shapes of what oneDNN multiplies, as on a processor of AMD."""
    if not onednn._agrees():
        pytest.skip("needs a build of torch with oneDNN")
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    multiply, shapes = onednn.multiply, []

    def watched(left: Tensor, right: Tensor) -> Tensor:
        shapes.append((left.shape, right.shape))
        return multiply(left, right)

    monkeypatch.setattr(onednn, "multiply", watched)
    yield shapes


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("precision", ["none", "bf16"])
def test_products_are_in_float32(precision: str, used: list) -> None:
    """In a step, whatever precision the process allows."""
    cases = [
        (random(40, 96), random(96, 72)),
        (random(300, 40).t(), random(300, 72)),
        (random(2, 64, 200), random(2, 80, 200).mT),
        (random(3, 100, 64)[:, 10:50], random(3, 100, 64).mT),
    ]
    matmul = torch.backends.mkldnn.matmul
    matmul.fp32_precision = precision
    try:
        for left, right in cases:
            with full_precision(CPU):
                found = products.product(left, right)
            exact = left.double() @ right.double()
            assert found.dtype == torch.float32
            assert ((found - exact).abs() <= 2**-20 * (left.double().abs() @ right.double().abs())).all()
    finally:
        matmul.fp32_precision = "none"
    assert {left.shape for left, _ in cases} <= {left for left, _ in used}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (random(31, 64), random(64, 64)),  # MKL is faster
        (random(64, 64).double(), random(64, 64).double()),
        (random(64, 64), random(64, 2, 64)[:, 0]),  # oneDNN takes a thousand times as long
        (random(64, 64).expand(2, 64, 64)[:, ::2], random(2, 64, 64)),
    ],
)
def test_other_operands_take_torchs_own_product(left: Tensor, right: Tensor, used: list) -> None:
    assert torch.equal(products.product(left, right), left @ right)
    assert not used


@pytest.mark.parametrize("positions", [Gram.WIDE_STRIP, Gram.WIDE_STRIP + 1, 150])
def test_norms_and_sums_of_records_are_exact(positions: int, used: list) -> None:
    value = Outer(random(3, positions, 240), random(3, positions, 400))
    exact = torch.einsum("nto,nti->noi", value.left.double(), value.right.double())
    squares = exact.square().sum((1, 2))
    found = value.sq_norm().double()
    assert (found >= squares).all() and (found <= squares * 1.001).all()
    assert torch.allclose(value.dense().double(), exact, rtol=1e-5, atol=1e-4)
    c = torch.tensor([0.5, 0.1, 2.0])
    total = torch.einsum("n,noi->oi", c.double(), exact)
    assert torch.allclose(value.weighted_sum(c).double(), total, rtol=1e-5, atol=1e-3)
    into = torch.ones(240, 400)
    assert value.weighted_sum(c, into) is into
    assert torch.allclose(into.double(), total + 1, rtol=1e-5, atol=1e-3)
    assert len(used) > 3


def test_a_norm_that_cancels_is_not_below_its_value(used: list) -> None:
    left, right = random(2, 128, 64), random(2, 128, 96)
    left[:, 64:] = -left[:, :64] * (1 + 2**-12)
    right[:, 64:] = right[:, :64]
    exact = torch.einsum("nto,nti->noi", left.double(), right.double()).square().sum((1, 2))
    assert (Outer(left, right).sq_norm().double() >= exact).all()
    assert used


@pytest.mark.parametrize(
    ("processor", "wanted"),
    [(AMD, True), (AMD | {"avx512_f": False}, False), (AMD | {"cpu_name": "Intel(R) Xeon(R)"}, False), ({}, False)],
)
def test_it_is_for_processors_of_amd_with_avx512(
    processor: dict, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor, raising=False)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(onednn, "_agrees", lambda: True)
    assert onednn.is_faster.__wrapped__() is wanted


def rounding(left: Tensor, right: Tensor) -> Tensor:
    return (left.bfloat16() @ right.bfloat16()).float()


def missing(left: Tensor, right: Tensor) -> Tensor:
    return torch.ops.mkldnn._no_such_operation(left, right)


@pytest.mark.parametrize("multiply", [rounding, missing])
def test_an_operation_that_does_not_agree_is_not_used(multiply: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: AMD, raising=False)
    monkeypatch.setattr(onednn, "multiply", multiply)
    assert not onednn.is_faster.__wrapped__()


def test_operations_are_counted(used: list, monkeypatch: pytest.MonkeyPatch) -> None:
    value, c = Outer(random(2, 40, 64), random(2, 40, 48)), torch.ones(2)
    counted = dryrun.measure(lambda: value.weighted_sum(c)).flops
    assert used
    monkeypatch.setattr(onednn, "is_faster", lambda: False)
    assert counted == dryrun.measure(lambda: value.weighted_sum(c)).flops == 2 * 80 * 64 * 48
