"""Accounting against golden values: three packages, 30-digit quadrature and closed forms agreed on them beforehand."""

import json
import math
import time

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from hypothesis import given, settings
from hypothesis import strategies as st
from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism, PrivacyRandomVariableTruncated
from scipy.integrate import quad

from hf_private import accountants, prv
from hf_private.accountants import ACCOUNTANTS, ORDERS, bounds_by, rdp_curve
from hf_private.accounting import (
    BudgetExceeded,
    Event,
    calibrate,
    compact,
    delta_curve,
    epsilon,
    epsilon_of,
    group_epsilon,
    quick_epsilon,
    steps_within,
)

Q = 2000 / 67349  # SST-2

# id: q, sigma, T, delta, then PRV (lower, estimate, upper) at eps_error 0.01, PLD, RDP
GOLDEN = {
    "G1": (Q, 2.624779, 680, 1e-5, (1.1798408, 1.1899201, 1.1999995), 1.1899227, 1.3044064),
    "G2": (Q, 2.080985, 680, 1e-5, (1.5797932, 1.5898962, 1.5999994), 1.5898983, 1.7420958),
    "G3": (Q, 1.253827, 680, 1e-5, (3.2795900, 3.2897935, 3.2999973), 3.2897949, 3.6188223),
    "G4": (Q, 0.879604, 680, 1e-5, (6.4791852, 6.4895864, 6.4999881), 6.4895874, 7.2303123),
    "G5": (1024 / 42061, 1.028709, 411, 8e-6, (2.9795882, 2.9897924, 2.9999967), 2.9897925, 3.3711630),
    "G6": (1024 / 42061, 0.683097, 411, 8e-6, (7.9788794, 7.9894337, 7.9999886), 7.9894338, 9.1506732),
    "G7": (500 / 67349, 0.706249, 6700, 1e-5, (7.9790420, 7.9895074, 7.9999733), 7.9895238, 8.8594788),
    "G8": (0.01, 1.0, 1000, 1e-5, (1.8181077, 1.8282396, 1.8383717), 1.8282436, 2.1013653),
    "G9": (1e-4, 0.5, 100_000, 1e-5, (2.0473991, 2.0577497, 2.0681007), 2.0579676, 3.2561232),
    "G10": (1.0, 50.0, 100, 1e-5, (0.7154793, 0.7255293, 0.7355793), 0.7255234, 0.7945220),
    "G11": (0.2, 3.0, 500, 1e-5, (7.3451418, 7.3555117, 7.3658821), 7.3555122, 7.9442360),
}
COARSE = {"G7", "G9"}  # at eps_error 0.01 these take 3 and 10 seconds
golden = pytest.mark.parametrize("name", GOLDEN)


def one(name: str) -> tuple[list[Event], float]:
    q, sigma, steps, delta, *_ = GOLDEN[name]
    return [Event(q, (sigma,), steps)], delta


# ---- golden values


@golden
def test_prv(name: str) -> None:
    events, delta = one(name)
    width = 0.1 if name in COARSE else 0.01
    *_, expected, pld, _ = GOLDEN[name]
    lower, estimate, upper = epsilon(events, delta, eps_error=width).prv
    tolerance = 5e-4 if name in COARSE else 1e-4
    assert estimate == pytest.approx(expected[1], abs=tolerance)
    assert upper - width == pytest.approx(expected[2] - 0.01, abs=tolerance)
    assert lower + width == pytest.approx(expected[0] + 0.01, abs=tolerance)
    assert lower <= pld <= upper


@golden
def test_pld(name: str) -> None:
    assert epsilon_of(*one(name), "pld") == pytest.approx(GOLDEN[name][5], abs=1e-5)


@golden
def test_rdp(name: str) -> None:
    assert quick_epsilon(*one(name)) == pytest.approx(GOLDEN[name][6], abs=1e-6)


def test_gaussian_has_a_closed_form() -> None:
    exact = get_epsilon_gaussian(5, 1e-5)
    report = epsilon(*one("G10"), eps_error=0.01)
    assert report.prv[0] <= exact <= report.prv[2]
    assert exact <= report.pld == pytest.approx(exact, abs=1e-5)
    assert exact <= report.rdp


def test_report_shows_all_and_publishes_the_larger_of_prv_and_pld() -> None:
    events, delta = one("G3")
    report = epsilon(events, delta)
    assert report.epsilon == report.prv[2] == pytest.approx(3.2999973, abs=1e-4)
    assert report.prv[0] <= report.pld <= report.prv[2] <= report.rdp
    assert (report.eps_error, report.delta_error, report.note) == (0.01, 1e-8, "")
    assert epsilon(events, delta, "pld").epsilon == report.pld
    assert epsilon(events, delta, "rdp").epsilon == report.rdp


@pytest.mark.parametrize(
    ("events", "expected", "pld"),
    [
        ([Event(Q, (1.5,), 400), Event(Q / 2, (1.0,), 280)], (2.412399, 2.422559, 2.432720), 2.422561),
        (
            [Event(Q, (1.5,), 400), Event(Q / 2, (1.0,), 280), Event(2 * Q, (2.0,), 100)],
            (2.778027, 2.788203, 2.798378),
            2.788205,
        ),
        ([Event(Q, (1.253827,), 680), Event(1.0, (10.0,), 5)], (3.420801, 3.431010, 3.441219), 3.431011),
    ],
)
def test_heterogeneous(events: list[Event], expected: tuple[float, ...], pld: float) -> None:
    report = epsilon(events, 1e-5, eps_error=0.01)
    assert report.prv == pytest.approx(expected, abs=1e-4)
    assert report.pld == pytest.approx(pld, abs=1e-5)
    assert report.note == ""


SILENT = [(0.1017, 0.933, 3160, 1.8e-5, 62.958, 0.1), (0.1052, 1.26, 5082, 1.7e-6, 55.010, 0.1)]


@pytest.mark.parametrize(("q", "sigma", "steps", "delta", "pld", "width"), SILENT)
def test_settings_where_the_package_is_silently_wrong(
    q: float, sigma: float, steps: int, delta: float, pld: float, width: float
) -> None:
    lower, estimate, upper = bounds_by("prv", ((q, sigma, steps),), delta, width)
    assert estimate == pytest.approx(pld, abs=1e-3)
    assert lower <= pld <= upper


@pytest.mark.parametrize(
    ("q", "sigma"), [(0.1017, 0.933), (0.1052, 1.26), (0.2, 1.0), (Q, 0.5), (1e-4, 5.0), (1.0, 2.0)]
)
def test_mean_of_the_truncated_loss(q: float, sigma: float) -> None:
    """Against adaptive quadrature of the distribution function, with log-spaced breakpoints."""
    t_max = 30.0
    loss = prv.Truncated(PoissonSubsampledGaussianMechanism(q, sigma), -t_max, t_max)
    fine = np.logspace(-9, math.log10(t_max), 60)
    points = [-t_max, *-fine[-2::-1], 0.0, *fine]
    areas = [quad(loss.cdf, a, b, epsabs=1e-15, limit=200)[0] for a, b in zip(points[:-1], points[1:], strict=True)]
    assert loss.mean() == pytest.approx(t_max - math.fsum(areas), abs=2e-11)


def test_the_stock_mean_is_wrong() -> None:
    """The control of the test above: the package's own mean is off by more than its certified error allows."""
    q, sigma, steps, *_ = SILENT[0]
    mechanism = PoissonSubsampledGaussianMechanism(q, sigma)
    stock, ours = (kind(mechanism, -100.0, 100.0).mean() for kind in (PrivacyRandomVariableTruncated, prv.Truncated))
    assert abs(float(stock) - ours) * steps > 0.01


@pytest.mark.parametrize(("q", "sigma"), [(Q, 0.683), (0.2, 3.0), (0.01, 1.0), (1e-4, 0.5), (0.9, 2.0), (1.0, 2.0)])
def test_rdp_is_exact_at_all_orders(q: float, sigma: float) -> None:
    """Fractional orders too, where dp-accounting is loose; the reference ends its series at e^-30."""
    mechanism, curve = PoissonSubsampledGaussianMechanism(q, sigma), rdp_curve(q, sigma)
    for order in (1.1, 1.5, 2.0, 2.8, 3.8, 7.7, 10.9, 32.0, 64.0):
        at = int(np.argmin(abs(ORDERS - order)))
        assert curve[at] == pytest.approx(
            float(mechanism.rdp(ORDERS[at])), rel=1e-8, abs=2e-12
        )  # its series ends at e^-30


def test_releases_on_one_sample_are_one_release() -> None:
    """Both parts of GEP at sigma 1.253827: 6.377. As twice as many independent steps they would seem to cost 4.772."""
    right, wrong = [Event(Q, (1.253827, 1.253827), 680)], [Event(Q, (1.253827,), 1360)]
    assert epsilon_of(right, 1e-5, "pld") == pytest.approx(6.377, abs=1e-3)
    assert epsilon_of(wrong, 1e-5, "pld") == pytest.approx(4.772, abs=1e-3)
    assert epsilon_of(right, 1e-5, eps_error=0.1) == pytest.approx(6.377 + 0.1, abs=2e-3)
    double = [Event(Q, (1.253827 * 2**0.5,) * 2, 680)]
    assert epsilon_of(double, 1e-5, "pld") == pytest.approx(GOLDEN["G3"][5], abs=1e-5)


@pytest.mark.parametrize(
    ("records", "expected"), [(2, 7.371), (4, 17.35), pytest.param(8, 43.96, marks=pytest.mark.slow)]
)
def test_group(records: int, expected: float) -> None:
    assert group_epsilon(*one("G3"), records) == pytest.approx(expected, abs=5e-3)


def test_group_of_one_is_the_published_epsilon() -> None:
    assert group_epsilon(*one("G3"), 1) == epsilon(*one("G3")).epsilon


def test_group_falls_back_to_a_valid_bound() -> None:
    events = [Event(0.03, (1e-3,), 10)]
    assert quick_epsilon(events, 1e-5) < group_epsilon(events, 1e-5, 3) < math.inf
    worst = accountants.all_at_once(((Q, 1.253827, 680),), 2)
    assert accountants.rdp_epsilon(worst, 1e-5) > 7.371


def test_delta_curve() -> None:
    """Closed form of one Gaussian release, and the inverse of epsilon."""

    def exact(eps: float) -> float:
        phi = lambda x: 0.5 * math.erfc(-x / 2**0.5)  # noqa: E731
        return phi(0.5 - eps) - math.exp(eps) * phi(-0.5 - eps)

    for eps, delta in delta_curve([Event(1.0, (1.0,))], [0.0, 0.5, 1.0, 2.0, 4.0]):
        assert exact(eps) <= delta * (1 + 1e-9) and delta == pytest.approx(exact(eps), rel=1e-4)
    ((_, delta),) = delta_curve(one("G3")[0], [GOLDEN["G3"][5]])
    assert delta == pytest.approx(1e-5, rel=1e-4)
    assert delta_curve([], [1.0]) == [(1.0, 0.0)]
    assert delta_curve([Event(0.1, (0.0,))], [1.0]) == [(1.0, 1.0)]
    ((_, far),) = delta_curve([Event(0.03, (1e-3,), 10)], [1e7])  # PLD refuses: RDP
    assert 0 <= far < 1e-9


# ---- calibration and budgets


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
    assert quick_epsilon([Event(Q, (sigma,), 680)], 1e-5) <= target
    assert quick_epsilon([Event(Q, (sigma - 2e-6,), 680)], 1e-5) > target


def test_calibrate_pld() -> None:
    assert calibrate(1.2, 1e-5, Q, 680, "pld") == pytest.approx(2.606642, abs=2e-6)


def test_calibrate_with_part_of_the_budget_spent() -> None:
    spent = [Event(Q, (1.253827,), 340)]
    more = calibrate(3.3, 1e-5, Q, 340, "rdp", [*spent, Event(1.0, (20.0,), 3)])
    less = calibrate(3.3, 1e-5, Q, 340, "rdp", spent)
    assert more > less > calibrate(3.3, 1e-5, Q, 340, "rdp")
    assert quick_epsilon([*spent, Event(1.0, (20.0,), 3), Event(Q, (more,), 340)], 1e-5) <= 3.3
    sigma = calibrate(1.2, 1e-5, 0.05, 40, spent=[Event(0.05, (2.5,), 60)])
    assert epsilon([Event(0.05, (2.5,), 60), Event(0.05, (sigma,), 40)], 1e-5).epsilon <= 1.2
    assert epsilon_of([Event(0.05, (2.5,), 60), Event(0.05, (sigma - 1e-5,), 40)], 1e-5) > 1.2


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_calibrate_says_when_the_budget_is_gone(accountant: str) -> None:
    with pytest.raises(BudgetExceeded, match=r"epsilon 0.7\d+ of `target_epsilon` 0.5 is spent already.*Raise"):
        calibrate(0.5, 1e-5, Q, 100, accountant, spent=one("G10")[0])
    with pytest.raises(BudgetExceeded, match="epsilon inf"):
        calibrate(0.5, 1e-5, Q, 100, accountant, spent=[Event(0.1, (1.0,), sampling="shuffled")])


def test_calibrate_for_a_person_with_several_records() -> None:
    sigma = calibrate(4.0, 1e-5, 0.1, 9, records_per_unit=2)
    assert group_epsilon([Event(0.1, (sigma,), 9)], 1e-5, 2) <= 4.0
    assert group_epsilon([Event(0.1, (sigma * 0.999,), 9)], 1e-5, 2) > 4.0


def test_calibrate_at_extreme_targets() -> None:
    for target in (2e-3, 1e4):
        sigma = calibrate(target, 1e-5, Q, 100, "rdp")
        assert quick_epsilon([Event(Q, (sigma,), 100)], 1e-5) <= target


def test_second_opinion_is_enforced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PLD is above PRV, it is PLD that the budget, the calibration and the report go by."""
    rdp = ACCOUNTANTS["rdp"]
    monkeypatch.setitem(ACCOUNTANTS, "prv", rdp)
    monkeypatch.setitem(ACCOUNTANTS, "pld", lambda *args: tuple(1.1 * bound for bound in rdp(*args)))
    bounds_by.cache_clear()
    events = [Event(0.0123, (1.5,), 200)]
    rdp_value = quick_epsilon(events, 1e-5)
    assert epsilon(events, 1e-5).epsilon == pytest.approx(1.1 * rdp_value)
    sigma = calibrate(1.0, 1e-5, 0.0123, 200)
    assert epsilon([Event(0.0123, (sigma,), 200)], 1e-5).epsilon <= 1.0
    assert 1.1 * quick_epsilon([Event(0.0123, (sigma - 1e-5,), 200)], 1e-5) > 1.0
    fit = steps_within(1.0, 1e-5, Event(0.0123, (1.5,)), at_most=5000)
    assert 1.1 * quick_epsilon([Event(0.0123, (1.5,), fit)], 1e-5) <= 1.0
    assert 1.1 * quick_epsilon([Event(0.0123, (1.5,), fit + 1)], 1e-5) > 1.0
    bounds_by.cache_clear()


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_steps_within(accountant: str) -> None:
    event, spent = Event(0.05, (2.0,)), (Event(0.05, (2.0,), 30), Event(1.0, (40.0,)))

    def after(n: int) -> float:
        return epsilon([*spent, Event(0.05, (2.0,), n)], 1e-5, accountant).epsilon

    fit = steps_within(0.8, 1e-5, event, spent, accountant, at_most=400)
    assert 0 < fit < 400 and after(fit) <= 0.8 < after(fit + 1)
    assert steps_within(0.8, 1e-5, event, spent, accountant, at_most=fit) == fit
    assert steps_within(0.8, 1e-5, event, spent, accountant, at_most=fit - 1) == fit - 1
    assert steps_within(0.05, 1e-5, event, spent, accountant, at_most=400) == 0


def test_steps_within_at_the_edges() -> None:
    event = Event(0.05, (2.0,))
    assert steps_within(1.0, 1e-5, Event(0.05, (0.0,)), accountant="rdp", at_most=9) == 0
    assert steps_within(math.inf, 1e-5, Event(0.05, (0.0,)), accountant="rdp", at_most=9) == 9
    assert steps_within(1.0, 1e-5, event, [Event(0.1, (1.0,), sampling="?")], "rdp", at_most=9) == 0
    assert steps_within(1.0, 1e-5, event, accountant="rdp", at_most=0) == 0
    pairs = steps_within(1.0, 1e-5, Event(0.05, (2.0,), steps=2), accountant="rdp", at_most=10_000)
    assert pairs == steps_within(1.0, 1e-5, event, accountant="rdp", at_most=10_000) // 2
    for target in np.linspace(0.3, 2.0, 12):
        fit = steps_within(float(target), 1e-5, event, accountant="rdp", at_most=10_000)
        cost = [quick_epsilon([Event(0.05, (2.0,), n)], 1e-5) for n in (fit, fit + 1)]
        assert cost[0] <= target < cost[1] or (fit == 0 and target < cost[1])


# ---- invariants


def test_segments_cost_what_the_whole_costs() -> None:
    whole = epsilon([Event(Q, (1.253827,), 680)], 1e-5, eps_error=0.1)
    for parts in (2, 3, 7):
        cuts = np.diff(np.linspace(0, 680, parts + 1).astype(int))
        assert epsilon([Event(Q, (1.253827,), n) for n in cuts], 1e-5, eps_error=0.1) == whole
    one_way = [Event(Q, (1.5,), 4), Event(0.1, (2.0,), 5)]
    assert epsilon(one_way, 1e-5, eps_error=0.1) == epsilon(one_way[::-1], 1e-5, eps_error=0.1)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    q=st.floats(1e-3, 0.4),
    sigma=st.floats(1.0, 8.0),
    steps=st.integers(1, 1000),
    accountant=st.sampled_from(["prv", "pld", "rdp"]),
)
def test_more_steps_more_data_less_noise_cost_more(q: float, sigma: float, steps: int, accountant: str) -> None:
    def cost(q: float, sigma: float, steps: int) -> float:
        return epsilon_of([Event(q, (sigma,), steps)], 1e-5, accountant, eps_error=0.1)

    base, slack = cost(q, sigma, steps), 2e-3 if accountant == "prv" else 1e-6
    assert cost(q, sigma, 2 * steps) >= base - slack
    assert cost(1.2 * q, sigma, steps) >= base - slack
    assert cost(q, 0.9 * sigma, steps) >= base - slack
    assert base >= 0


@settings(max_examples=4, deadline=None, derandomize=True)
@given(q=st.floats(1e-3, 0.5), sigma=st.floats(1.5, 5.0), steps=st.integers(1, 300))
def test_accountants_agree(q: float, sigma: float, steps: int) -> None:
    report = epsilon([Event(q, (sigma,), steps)], 1e-5, eps_error=0.1)
    assert report.note == ""
    assert report.prv[0] - 1e-4 <= report.pld <= report.prv[2] + 1e-4
    assert report.pld <= report.rdp + 1e-4
    assert report.epsilon == max(report.prv[2], report.pld)


def test_compact() -> None:
    events = [Event(0.1, (1.0,), 2), Event(0.1, (2.0,)), Event(0.1, (1.0,), 3), Event(0.1, (1.0,), 1, "shuffled")]
    assert compact(events) == (Event(0.1, (1.0,), 5), Event(0.1, (2.0,)), Event(0.1, (1.0,), 1, "shuffled"))


def test_events_survive_json_bit_for_bit() -> None:
    event = Event(Q, (0.1 + 0.2, 1 / 3), 7, "odd")
    assert Event.from_dict(json.loads(json.dumps(event.to_dict()))) == event
    plain = Event(np.float32(0.25), np.array([1.5]), np.int64(3))
    assert [type(x) for x in (plain.sample_rate, plain.releases[0], plain.steps)] == [float, float, int]


# ---- nothing is never infinity, unknown is never zero


def test_nothing_and_infinity() -> None:
    for accountant in ACCOUNTANTS:
        for nothing in ([], [Event(0.1, (1.0,), 0)], [Event(0.1, (0.0,), 0)]):
            assert epsilon(nothing, 1e-5, accountant).epsilon == 0 == epsilon_of(nothing, 1e-5, accountant)
        for unknown in (Event(0.1, (0.0,)), Event(0.1, (1.0, 0.0)), Event(0.1, (1.0,), sampling="shuffled")):
            report = epsilon([Event(0.1, (9.0,)), unknown], 1e-5, accountant)
            assert report.epsilon == math.inf and report.note
            assert epsilon_of([unknown], 1e-5, accountant) == math.inf
    assert group_epsilon([Event(0.1, (0.0,))], 1e-5, 2) == math.inf
    assert group_epsilon([], 1e-5, 2) == 0


def test_never_negative() -> None:
    report = epsilon([Event(0.01, (50.0,))], 0.5)
    assert all(bound >= 0 for bounds in report.bounds.values() for bound in bounds) and report.epsilon >= 0


@pytest.mark.parametrize("sigma", [1e-300, 1e-3, 0.01])
def test_hopeless_noise_is_priced_at_once(sigma: float) -> None:
    start = time.process_time()
    report = epsilon([Event(Q, (sigma,), 680)], 1e-5)
    assert time.process_time() - start < 5
    assert report.prv is None and report.pld is None and report.epsilon == report.rdp > 1e4
    assert "prv failed" in report.note and "pld failed" in report.note and "largest bound by rdp" in report.note


def test_little_noise_is_still_priced() -> None:
    assert epsilon_of([Event(Q, (0.3,), 680)], 1e-5, eps_error=0.5) == pytest.approx(129.7 + 0.5, abs=0.2)


def test_tiny_delta_falls_back() -> None:
    report = epsilon([Event(0.01, (1.0,), 100)], 1e-17)
    assert report.prv is None and "Floating point" in report.note
    assert report.epsilon == max(report.pld, report.rdp)


def test_the_grid_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prv.Domain, "create_aligned", lambda *_: pytest.fail("allocated"))
    for width, domain in ((1e-7, 10.0), (0.1, 1e9), (0.1, math.inf), (0.1, math.nan)):
        with pytest.raises(prv.AccountantError, match="grid"):
            prv.prv_bounds(((0.1, 1.0, 1000),), 1e-5, width, domain)


def test_a_failing_accountant_is_named_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise prv.AccountantError("on strike")

    events = [Event(0.0321, (1.7,), 100)]
    monkeypatch.setitem(ACCOUNTANTS, "prv", broken)
    report = epsilon(events, 1e-5)
    assert report.prv is None and report.epsilon == report.rdp == max(report.pld, report.rdp)
    assert "on strike" in report.note and "largest bound by pld, rdp" in report.note
    assert epsilon_of(events, 1e-5) == report.epsilon
    bounds_by.cache_clear()
    for name in ACCOUNTANTS:
        monkeypatch.setitem(ACCOUNTANTS, name, broken)
    assert epsilon(events, 1e-5).epsilon == math.inf == epsilon_of(events, 1e-5)
    bounds_by.cache_clear()


def test_a_newcomer_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACCOUNTANTS, "naive", lambda settings, delta, eps_error: (0.0, 0.0, 1e3))
    report = epsilon([Event(0.04, (3.0,), 10)], 1e-5, "naive", eps_error=0.1)
    assert report.epsilon == 1e3 and report.bounds["naive"] == (0.0, 0.0, 1e3)
    bounds_by.cache_clear()


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0.0, (1.0,)), "sample_rate"),
        ((1.1, (1.0,)), "sample_rate"),
        ((math.nan, (1.0,)), "sample_rate"),
        (("0.1", (1.0,)), "sample_rate"),
        ((0.1, 1.0), "releases"),
        ((0.1, "1"), "releases"),
        ((0.1, ()), "releases"),
        ((0.1, (-1.0,)), "releases"),
        ((0.1, (math.inf,)), "releases"),
        ((0.1, (math.nan,)), "releases"),
        ((0.1, (1.0,), -1), "steps"),
        ((0.1, (1.0,), 1.5), "steps"),
        ((0.1, (1.0,), True), "steps"),
        ((0.1, (1.0,), 1, None), "sampling"),
    ],
)
def test_bad_events(arguments: tuple, name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}"):
        Event(*arguments)


@pytest.mark.parametrize("data", [None, [], {}, {"sample_rate": 0.1}, {**Event(0.1, (1.0,)).to_dict(), "colour": 1}])
def test_bad_event_dicts(data: object) -> None:
    with pytest.raises(ValueError, match="must be a dict with the keys"):
        Event.from_dict(data)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda e: epsilon(e, 0.0), "delta"),
        (lambda e: epsilon(e, 1.0), "delta"),
        (lambda e: epsilon(e, 1e-5, "moments"), "accountant"),
        (lambda e: epsilon(e, 1e-5, eps_error=0), "eps_error"),
        (lambda e: epsilon_of(e, 1e-5, "moments"), "accountant"),
        (lambda e: quick_epsilon(e, -1), "delta"),
        (lambda e: group_epsilon(e, 1e-5, 0), "records_per_unit"),
        (lambda e: delta_curve(e, [-1.0]), "epsilons"),
        (lambda e: calibrate(0, 1e-5, 0.1, 10), "target_epsilon"),
        (lambda e: calibrate(math.inf, 1e-5, 0.1, 10), "target_epsilon"),
        (lambda e: calibrate(1.0, 2, 0.1, 10), "delta"),
        (lambda e: calibrate(1.0, 1e-5, 1.5, 10), "sample_rate"),
        (lambda e: calibrate(1.0, 1e-5, 0.1, 0), "steps"),
        (lambda e: steps_within(1.0, 1e-5, e[0], at_most=-1), "at_most"),
        (lambda e: steps_within(-1.0, 1e-5, e[0], at_most=1), "target_epsilon"),
    ],
)
def test_bad_arguments(call, name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}"):
        call([Event(0.1, (1.0,))])
