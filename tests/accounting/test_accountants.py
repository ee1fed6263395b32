"""Accounting against golden values and closed forms."""

import math

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism, PrivacyRandomVariableTruncated
from scipy.integrate import quad

from hf_private.accounting import accountants, prv
from hf_private.accounting.accountants import ORDERS, bounds_by, rdp_curve
from hf_private.accounting.budget import delta_curve, enforced_epsilon, epsilon
from hf_private.accounting.events import Event
from tests.support.budget import epsilon_of
from tests.support.golden import COARSE, GOLDEN, Q, golden, one


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
    assert epsilon_of(*one(name), "rdp") == pytest.approx(GOLDEN[name][6], abs=1e-6)


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
    assert enforced_epsilon(*one("G3"), records_per_unit=records) == pytest.approx(expected, abs=5e-3)


def test_group_of_one_is_the_published_epsilon() -> None:
    assert enforced_epsilon(*one("G3"), records_per_unit=1) == epsilon(*one("G3")).epsilon


def test_group_falls_back_to_a_valid_bound() -> None:
    events = [Event(0.03, (1e-3,), 10)]
    assert epsilon_of(events, 1e-5, "rdp") < enforced_epsilon(events, 1e-5, records_per_unit=3) < math.inf
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
