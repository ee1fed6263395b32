"""Live epsilon against the accountant itself."""

import itertools
import math

import numpy as np
import pytest

from hf_private.accounting import accountants
from hf_private.accounting.budget import enforced_epsilon
from hf_private.accounting.events import Event
from hf_private.accounting.schedule import Schedule, epsilon_schedule

SPENT = (Event(0.05, (1.2,), 20),)


def exact(event: Event, steps: int, spent: tuple[Event, ...], accountant: str, records: int) -> float:
    charged = Event(event.sample_rate, event.releases, steps * event.steps)
    return enforced_epsilon([*spent, charged], 1e-5, accountant, records)


@pytest.mark.parametrize("spent", [(), SPENT], ids=["fresh", "continued"])
@pytest.mark.parametrize(("accountant", "records"), [("prv", 1), ("pld", 1), ("rdp", 1), ("prv", 2)])
def test_never_below_the_accountant_at_any_step(accountant: str, records: int, spent: tuple[Event, ...]) -> None:
    event, steps = Event(0.1, (1.1,)), 7
    schedule = epsilon_schedule(event, steps, spent, delta=1e-5, accountant=accountant, records_per_unit=records)
    for step in range(steps + 1):
        true = exact(event, step, spent, accountant, records)
        assert true - 1e-9 <= schedule(step) <= 1.1 * true + 0.02, step
    assert schedule(steps) == exact(event, steps, spent, accountant, records)
    assert math.isinf(schedule(steps + 1))


@pytest.mark.parametrize(
    ("q", "sigma", "steps"), [(0.014848, 0.539915, 204), (2000 / 67349, 1.25, 680), (0.3, 3.0, 900)]
)
def test_long_runs_are_rounded_up_between_the_points(q: float, sigma: float, steps: int) -> None:
    event = Event(q, (sigma,))
    schedule = epsilon_schedule(event, steps, delta=1e-5, accountant="pld")
    shown = [schedule(step) for step in range(steps + 1)]
    assert all(a <= b for a, b in itertools.pairwise(shown)) and len(set(shown)) > 60
    for step in (1, 2, steps // 7, steps // 3, steps - 1):
        true = exact(event, step, (), "pld", 1)
        assert true <= shown[step] <= 1.05 * true + 0.05
    assert shown[0] == 0 and shown[-1] == exact(event, steps, (), "pld", 1)


def test_several_steps_per_charge_and_several_releases() -> None:
    event = Event(0.05, (1.5, 2.0), steps=3)
    schedule = epsilon_schedule(event, 10, delta=1e-5)
    assert schedule(10) == enforced_epsilon([Event(0.05, (1.5, 2.0), 30)], 1e-5)
    assert schedule(4) >= enforced_epsilon([Event(0.05, (1.5, 2.0), 12)], 1e-5)


def test_nothing_and_infinity() -> None:
    assert epsilon_schedule(Event(0.1, (1.0,)), 0, delta=1e-5) == Schedule((0,), (0.0,))
    noiseless = epsilon_schedule(Event(0.1, (0.0,)), 5, delta=1e-5)
    assert noiseless(0) == 0 and noiseless(1) == noiseless(5) == math.inf
    assert epsilon_schedule(Event(0.1, (1.0,)), 5, [Event(0.1, (0.0,))], delta=1e-5)(0) == math.inf


def test_where_the_grid_would_be_large_rdp_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_private.accounting.schedule.MAX_GRID", 10)
    schedule = epsilon_schedule(Event(0.1, (1.1,)), 15, delta=1e-5, accountant="pld")
    assert schedule(7) == pytest.approx(
        min(accountants.rdp_epsilon(((0.1, 1.1, 7),), 1e-5), exact(Event(0.1, (1.1,)), 15, (), "pld", 1))
    )


def test_a_person_with_several_records_is_not_shown_the_price_of_one() -> None:
    hopeless = Event(0.5, (0.004,))
    schedule = epsilon_schedule(hopeless, 3, delta=1e-5, records_per_unit=2)
    assert schedule(1) >= accountants.rdp_epsilon(((1.0, 0.002, 1),), 1e-5)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="`delta`"):
        epsilon_schedule(Event(0.1, (1.0,)), 5, delta=0.0)
    with pytest.raises(ValueError, match="`step`"):
        epsilon_schedule(Event(0.1, (1.0,)), 5, delta=1e-5)(np.float64(0.5))
