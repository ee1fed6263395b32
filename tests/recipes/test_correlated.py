"""Correlated noise: the recursion against a dense solve, what a record adds to C g, the accounting, the groups."""

import numpy as np
import pytest
import torch
from correlated import BandedNoise, CyclicGroups, best_strategy, error, event, strategy, table

from hf_private.accounting.events import Event
from hf_private.mechanism.noise import NoiseSource

KEY = bytes(range(32))
STEPS, BANDS = 12, 3
COLUMN = torch.tensor([1.0, 0.6, 0.3], dtype=torch.float64)


def noise(source: NoiseSource, steps: int = STEPS) -> torch.Tensor:
    """The noise of all steps, (steps, elements)."""
    rows = []
    for step in range(steps):
        sums = {"w": torch.zeros(3, 5, dtype=torch.float64), "b": torch.zeros(4, dtype=torch.float64)}
        with source:
            source.add_(step, sums, {"w": 2.0, "b": 2.0})
        rows.append(torch.cat([x.flatten() for x in sums.values()]))
    return torch.stack(rows)


def test_the_buffers_solve_for_the_noise():
    c = strategy(COLUMN, STEPS)
    fresh = noise(NoiseSource(key=KEY))
    correlated = noise(BandedNoise(c, BANDS, key=KEY))
    torch.testing.assert_close(c @ correlated, fresh, rtol=0, atol=1e-12)
    assert (correlated - fresh).abs().max() > 0.1


def test_one_band_is_dp_sgd():
    assert torch.equal(noise(BandedNoise(strategy(COLUMN[:1], STEPS), 1, key=KEY)), noise(NoiseSource(key=KEY)))
    assert event(1000, 50, 10, 1, 0.7) == Event(0.05, (0.7,), 10)
    constant = torch.ones(STEPS, dtype=torch.float64)
    assert float(error(best_strategy(1, constant), constant)) == pytest.approx(((STEPS + 1) / 2) ** 0.5)


@pytest.mark.parametrize("first", range(BANDS))
def test_what_a_record_adds_at_its_steps_has_norm_one_and_does_not_meet(first: int):
    """The worst case of the accounting: ceil(T / b) releases of sensitivity 1, whatever the gradients' directions."""
    c = strategy(COLUMN, STEPS)
    added = c[:, first::BANDS]
    torch.testing.assert_close(added.T @ added, torch.eye(added.shape[1], dtype=torch.float64))
    assert added.shape[1] <= event(1000, 50, STEPS, BANDS, 1.0).steps
    too_often = c[:, first :: BANDS - 1]  # the control: one step sooner they meet
    assert (too_often.T @ too_often).tril(-1).max() > 0.1


def test_a_run_costs_the_steps_of_one_group_at_its_rate():
    assert event(1000, 50, 10, 4, 0.7) == Event(0.2, (0.7,), 3)
    with pytest.raises(ValueError, match="`bands`.*at most 20, got 21"):
        event(1000, 50, 10, 21, 0.7)


def test_records_are_drawn_from_their_group_only_at_the_rate_that_is_accounted():
    groups = CyclicGroups(20_000, 500, bands=4, key=KEY)
    drawn = [groups.draw(step) for step in range(40)]
    assert groups.rate == event(20_000, 500, 40, 4, 1.0).sample_rate == 0.1
    for step, records in enumerate(drawn):
        assert (groups.group[records] == step % 4).all()
    sizes = np.array([len(records) for records in drawn])
    assert abs(sizes.mean() - 500) < 4 * (500 / 40) ** 0.5 + 500 * 4 * (3 / 20_000) ** 0.5
    assert set(np.unique(groups.group)) == {0, 1, 2, 3}
    more = CyclicGroups(20_001, 500, bands=4, key=KEY)
    assert (more.group[:-1] == groups.group).all(), "a record that is added changes no other's group"


def test_the_best_of_two_bands_is_that_of_a_search():
    constant = torch.ones(5, dtype=torch.float64)
    tried = [
        float(error(strategy(torch.tensor([1.0, x], dtype=torch.float64), 5), constant))
        for x in torch.linspace(-1, 1, 401)
    ]
    assert float(error(best_strategy(2, constant), constant)) == pytest.approx(min(tried), rel=1e-4)
    assert min(tried) < float(error(best_strategy(1, constant), constant))


@pytest.mark.parametrize(
    "wrong", [strategy(COLUMN, STEPS) * 1.1, strategy(COLUMN, STEPS).T, strategy(COLUMN.repeat(2)[:4], STEPS)]
)
def test_a_strategy_that_the_accounting_does_not_cover_is_refused(wrong: torch.Tensor):
    with pytest.raises(ValueError, match="`strategy`"):
        BandedNoise(wrong, BANDS)


def test_steps_are_consecutive():
    source = BandedNoise(strategy(COLUMN, 2), BANDS, key=KEY)
    noise(source, 2)
    with pytest.raises(ValueError, match="`step`.*got 2"):
        source.add_(2, {"w": torch.zeros(2)}, {"w": 1.0})


def test_the_table_has_dp_sgd_as_its_unit():
    text = table({"tiny": (1000, 100, 12, 1e-3)}, [8.0], [1, 2])
    assert "| tiny | 8 | constant | 1.00 (" in text
