"""Noise for a budget."""

from unittest import mock

import pytest

from hf_private.accounting import accountants
from hf_private.accounting.accountants import ACCOUNTANTS, bounds_by
from hf_private.accounting.budget import BudgetExceeded, calibrate, enforced_epsilon, epsilon
from hf_private.accounting.events import Event
from tests.support.budget import epsilon_of
from tests.support.golden import GOLDEN, Q, one


@pytest.mark.parametrize(("name", "target"), [("G1", 1.2), ("G2", 1.6), ("G3", 3.3), ("G4", 6.5)])
def test_calibrate_prv(name: str, target: float) -> None:
    q, expected, steps, delta, *_ = GOLDEN[name]
    sigma = calibrate(target, delta, q, steps)
    assert sigma == pytest.approx(expected, abs=2e-6)
    assert sigma == round(sigma, 6)
    assert epsilon([Event(q, (sigma,), steps)], delta).epsilon <= target
    assert epsilon_of([Event(q, (sigma - 1e-5,), steps)], delta) > target


@pytest.mark.parametrize(("target", "expected"), [(1.2, 2.813046), (1.6, 2.225424), (3.3, 1.326417), (6.5, 0.923137)])
def test_calibrate_rdp(target: float, expected: float) -> None:
    """The golden sigmas are from a looser RDP: no larger than they are, and equal where the best order is whole."""
    sigma = calibrate(target, 1e-5, Q, 680, "rdp")
    assert expected - 2e-4 < sigma <= expected + 2e-6
    assert epsilon_of([Event(Q, (sigma,), 680)], 1e-5, "rdp") <= target
    assert epsilon_of([Event(Q, (sigma - 2e-6,), 680)], 1e-5, "rdp") > target


def test_calibrate_pld() -> None:
    assert calibrate(1.2, 1e-5, Q, 680, "pld") == pytest.approx(2.606642, abs=2e-6)


def test_calibrate_with_part_of_the_budget_spent() -> None:
    spent = [Event(Q, (1.253827,), 340)]
    more = calibrate(3.3, 1e-5, Q, 340, "rdp", [*spent, Event(1.0, (20.0,), 3)])
    less = calibrate(3.3, 1e-5, Q, 340, "rdp", spent)
    assert more > less > calibrate(3.3, 1e-5, Q, 340, "rdp")
    assert epsilon_of([*spent, Event(1.0, (20.0,), 3), Event(Q, (more,), 340)], 1e-5, "rdp") <= 3.3
    sigma = calibrate(1.2, 1e-5, 0.05, 40, spent=[Event(0.05, (2.5,), 60)])
    assert epsilon([Event(0.05, (2.5,), 60), Event(0.05, (sigma,), 40)], 1e-5).epsilon <= 1.2
    assert epsilon_of([Event(0.05, (2.5,), 60), Event(0.05, (sigma - 1e-5,), 40)], 1e-5) > 1.2


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_calibrate_says_when_the_budget_is_gone(accountant: str) -> None:
    with pytest.raises(BudgetExceeded, match=r"0.7\d+ of `target_epsilon` 0.5"):
        calibrate(0.5, 1e-5, Q, 100, accountant, spent=one("G10")[0])
    with pytest.raises(BudgetExceeded, match="inf of `target_epsilon`"):
        calibrate(0.5, 1e-5, Q, 100, accountant, spent=[Event(0.1, (1.0,), sampling="shuffled")])


def test_calibrate_for_a_person_with_several_records() -> None:
    sigma = calibrate(4.0, 1e-5, 0.1, 9, records_per_unit=2)
    assert enforced_epsilon([Event(0.1, (sigma,), 9)], 1e-5, records_per_unit=2) <= 4.0
    assert enforced_epsilon([Event(0.1, (sigma * 0.999,), 9)], 1e-5, records_per_unit=2) > 4.0


def test_calibrate_at_extreme_targets() -> None:
    for target in (2e-3, 1e4):
        sigma = calibrate(target, 1e-5, Q, 100, "rdp")
        assert epsilon_of([Event(Q, (sigma,), 100)], 1e-5, "rdp") <= target


def test_second_opinion_is_enforced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PLD is above PRV, it is PLD that the budget, the calibration and the report go by."""
    rdp = ACCOUNTANTS["rdp"]
    monkeypatch.setitem(ACCOUNTANTS, "prv", rdp)
    monkeypatch.setitem(ACCOUNTANTS, "pld", lambda *args: tuple(1.1 * bound for bound in rdp(*args)))
    bounds_by.cache_clear()
    events = [Event(0.0123, (1.5,), 200)]
    rdp_value = epsilon_of(events, 1e-5, "rdp")
    assert epsilon(events, 1e-5).epsilon == pytest.approx(1.1 * rdp_value)
    sigma = calibrate(1.0, 1e-5, 0.0123, 200)
    assert epsilon([Event(0.0123, (sigma,), 200)], 1e-5).epsilon <= 1.0
    assert 1.1 * epsilon_of([Event(0.0123, (sigma - 1e-5,), 200)], 1e-5, "rdp") > 1.0
    assert enforced_epsilon(events, 1e-5) == pytest.approx(1.1 * rdp_value)
    bounds_by.cache_clear()


def test_quick_grids_only_guide_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise for a budget holds by PRV's own grid, however wrong the quick one is."""
    rdp = ACCOUNTANTS["rdp"]
    monkeypatch.setitem(ACCOUNTANTS, "prv", rdp)
    quick = mock.Mock(side_effect=lambda *args, quick: tuple(0.9 * bound for bound in rdp(*args)))
    monkeypatch.setattr(accountants, "_prv", quick)
    bounds_by.cache_clear()
    sigma = calibrate(1.0, 1e-5, 0.0123, 200)
    assert quick.called
    assert epsilon([Event(0.0123, (sigma,), 200)], 1e-5).epsilon <= 1.0
    assert epsilon_of([Event(0.0123, (sigma - 2e-6,), 200)], 1e-5, "rdp") > 1.0
    bounds_by.cache_clear()


@pytest.mark.parametrize("name", ["G1", "G4", "G5", "G10"])
def test_quick_grids_are_close(name: str) -> None:
    q, sigma, steps, delta, *_ = GOLDEN[name]
    own, quick = (bounds_by("prv", ((q, sigma, steps),), delta, 0.01, quick) for quick in (False, True))
    assert own == pytest.approx(quick, abs=1e-6)
