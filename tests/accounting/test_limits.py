"""Accounting: what must hold for every mechanism, nothing and infinity, failing packages, bad input."""

import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_private.accounting import prv
from hf_private.accounting.accountants import ACCOUNTANTS, bounds_by
from hf_private.accounting.budget import (
    calibrate,
    delta_curve,
    enforced_epsilon,
    epsilon,
)
from hf_private.accounting.events import Event, compact
from tests.support.budget import epsilon_of
from tests.support.golden import Q


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


def test_nothing_and_infinity() -> None:
    for accountant in ACCOUNTANTS:
        for nothing in ([], [Event(0.1, (1.0,), 0)], [Event(0.1, (0.0,), 0)]):
            assert epsilon(nothing, 1e-5, accountant).epsilon == 0 == epsilon_of(nothing, 1e-5, accountant)
        for unknown in (Event(0.1, (0.0,)), Event(0.1, (1.0, 0.0)), Event(0.1, (1.0,), sampling="shuffled")):
            report = epsilon([Event(0.1, (9.0,)), unknown], 1e-5, accountant)
            assert report.epsilon == math.inf and report.note
            assert epsilon_of([unknown], 1e-5, accountant) == math.inf
    assert enforced_epsilon([Event(0.1, (0.0,))], 1e-5, records_per_unit=2) == math.inf
    assert enforced_epsilon([], 1e-5, records_per_unit=2) == 0


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
    with pytest.raises(ValueError, match="releases, sample_rate, sampling, steps"):
        Event.from_dict(data)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda e: epsilon(e, 0.0), "delta"),
        (lambda e: epsilon(e, 1.0), "delta"),
        (lambda e: epsilon(e, 1e-5, "moments"), "accountant"),
        (lambda e: epsilon(e, 1e-5, eps_error=0), "eps_error"),
        (lambda e: enforced_epsilon(e, 1e-5, "moments"), "accountant"),
        (lambda e: enforced_epsilon(e, -1, "rdp"), "delta"),
        (lambda e: enforced_epsilon(e, 1e-5, records_per_unit=0), "records_per_unit"),
        (lambda e: delta_curve(e, [-1.0]), "epsilons"),
        (lambda e: calibrate(0, 1e-5, 0.1, 10), "target_epsilon"),
        (lambda e: calibrate(math.inf, 1e-5, 0.1, 10), "target_epsilon"),
        (lambda e: calibrate(1.0, 2, 0.1, 10), "delta"),
        (lambda e: calibrate(1.0, 1e-5, 1.5, 10), "sample_rate"),
        (lambda e: calibrate(1.0, 1e-5, 0.1, 0), "steps"),
    ],
)
def test_bad_arguments(call, name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}"):
        call([Event(0.1, (1.0,))])
