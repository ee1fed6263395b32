"""Noise and steps for a largest advantage: round trips with `risk`, and closed forms."""

import pytest
from scipy.stats import norm

from hf_private.accounting.budget import BudgetExceeded
from hf_private.accounting.events import Event
from hf_private.accounting.risk import risk
from hf_private.accounting.risk_budget import LEAST_NOISE, calibrate_risk

Q = 2000 / 67349


def advantage(*events: Event, records: int = 1) -> float:
    return risk(events, 1e-5, records).advantage


@pytest.mark.parametrize(
    ("target", "q", "steps", "expected"),
    [(0.303, 0.014848, 204, 0.5399), (0.1, Q, 680, 3.15275)],
)
def test_round_trip(target: float, q: float, steps: int, expected: float) -> None:
    sigma = calibrate_risk(target, q, steps)
    assert sigma == round(sigma, 6)
    assert advantage(Event(q, (sigma,), steps)) <= target
    assert advantage(Event(q, (sigma - 2e-5,), steps)) > target, "no more noise than is needed"
    assert sigma == pytest.approx(expected, abs=1e-4)


def test_there_is_always_some_noise() -> None:
    """One step on a hundredth of the records: whatever it shows, the advantage is at most 0.01."""
    assert calibrate_risk(0.02, 0.01, 1) == LEAST_NOISE


@pytest.mark.parametrize("target", [0.1, 0.5])
def test_one_gaussian_has_a_closed_form(target: float) -> None:
    expected = 1 / (2 * norm.ppf((1 + target) / 2))  # advantage 2 Phi(1 / (2 sigma)) - 1
    sigma = calibrate_risk(target, 1.0, 1)
    assert expected <= sigma <= expected * (1 + 1e-4)


def test_what_is_spent_counts() -> None:
    """Gaussians without sampling: 1 / sigma^2 of all of them add up."""
    mu = 2 * norm.ppf((1 + 0.3) / 2)
    expected = (mu**2 - 1 / 4.0**2) ** -0.5
    sigma = calibrate_risk(0.3, 1.0, 1, [Event(1.0, (4.0,))])
    assert expected <= sigma <= expected * (1 + 1e-4)
    assert sigma > calibrate_risk(0.3, 1.0, 1) * 1.01


def test_people_with_several_records_need_more_noise() -> None:
    """Without sampling, a person with two records moves the sum by twice as much."""
    assert calibrate_risk(0.2, 1.0, 1, records_per_unit=2) == pytest.approx(2 * calibrate_risk(0.2, 1.0, 1), rel=1e-3)


def test_a_budget_that_is_gone_is_refused() -> None:
    spent = [Event(1.0, (1.0,))]
    assert advantage(*spent) == pytest.approx(0.3829, abs=1e-3)
    with pytest.raises(BudgetExceeded, match="`target_risk`"):
        calibrate_risk(0.38, 0.01, 10, spent)
    with pytest.raises(BudgetExceeded, match="`target_risk`"):
        calibrate_risk(0.5, 0.01, 10, [Event(0.1, (0.0,))])  # a step without noise


@pytest.mark.parametrize("target", [0, 1, -0.1, "0.3", float("nan")])
def test_bad_targets_are_refused(target: object) -> None:
    with pytest.raises(ValueError, match="`target_risk`"):
        calibrate_risk(target, 0.1, 10)  # pyrefly: ignore[bad-argument-type]  (that is what is tested)
