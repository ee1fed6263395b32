"""Noise against signal: the ratio by simulation, and what is said of it."""

import numpy as np
import pytest

from hf_private.accounting.signal import HOPELESS, TOLERATED, noise_to_signal


@pytest.mark.parametrize(("sigma", "noised", "batch"), [(0.7, 4000, 50), (2.0, 900, 400)])
def test_ratio_is_that_of_a_simulated_step(sigma: float, noised: int, batch: int) -> None:
    """Gradients of norm 1 that all point the same way are the largest signal that clipping to 1 lets through."""
    rng = np.random.default_rng(0)
    signal = np.zeros(noised)
    signal[0] = batch * 1.0
    noise = rng.normal(scale=sigma, size=(200, noised))
    measured = np.linalg.norm(noise / batch, axis=1).mean() / np.linalg.norm(signal / batch)
    ratio = noise_to_signal(sigma, noised, batch).ratio
    assert ratio == pytest.approx(measured, rel=0.01)
    assert ratio != pytest.approx(measured * 1.1, rel=0.01), "a wrong scale is told apart"


def test_one_line_and_a_warning_when_it_is_hopeless() -> None:
    batch = 100
    lines = []
    for ratio in (0.5, 1.5, TOLERATED + 0.1, HOPELESS):
        found = noise_to_signal(ratio * batch / 1000, 1_000_000, batch)
        assert found.ratio == pytest.approx(ratio) and f"{ratio:.2f}" in str(found) and "\n" not in str(found)
        assert (found.warning is not None) == found.hopeless == (ratio >= HOPELESS)
        lines.append(str(found).partition("(")[2])
    assert len(set(lines)) == 4
    assert found.warning is not None and "`expected_batch_size`" in found.warning and "(now 100)" in found.warning


def test_no_noise_is_no_reason_to_warn() -> None:
    assert noise_to_signal(0.0, 1_000_000, 10).warning is None


@pytest.mark.parametrize(
    ("name", "arguments"), [("noise_multiplier", (-1, 1, 1)), ("noised", (1, 1.5, 1)), ("batch", (1, 1, 0))]
)
def test_bad_arguments_are_named(name: str, arguments: tuple) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        noise_to_signal(*arguments)
