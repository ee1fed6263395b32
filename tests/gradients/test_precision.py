"""`full_precision` under every way to set torch's precision, and that it leaves the setting as it was."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_private.gradients.tensors import PRODUCTS, full_precision

CUDA, MKLDNN = PRODUCTS
SETTINGS: dict[str, Any] = {
    "nothing": lambda: None,
    "for all products": lambda: torch.set_float32_matmul_precision("high"),
    "older, for CUDA": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "newer, for CUDA": lambda: setattr(CUDA, "fp32_precision", "tf32"),
    "newer, for CPUs": lambda: setattr(MKLDNN, "fp32_precision", "bf16"),
}


def state() -> list[Any]:
    """The settings as both APIs of torch show them; reading one may fail after the other was used."""

    def older() -> tuple[Any, Any]:
        return torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()

    try:
        shown: Any = older()
    except RuntimeError:
        shown = "cannot be read"
    return [place.fp32_precision for place in PRODUCTS] + [shown]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for place in PRODUCTS:
        place.fp32_precision = "none"


@pytest.mark.parametrize("name", SETTINGS)
def test_products_are_full_inside_and_models_can_read_both_settings(name):
    SETTINGS[name]()
    before = state()
    with full_precision(torch.device("cpu")):
        assert state() == ["ieee", "ieee", (False, "highest")]
    assert state() == before
