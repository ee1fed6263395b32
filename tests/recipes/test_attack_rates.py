"""The attack on canaries: its test is the likelihood ratio, bounds hold, and too small a claim is refuted."""

import json
from pathlib import Path
from typing import Any

import attack_rates
import numpy as np
import pytest
from attack_rates import Setting, compare, likelihood_ratio, main, thresholds
from scipy.stats import norm

from hf_private.accounting.events import Event
from hf_private.accounting.risk import risk

EVENT = Event(0.3, (0.8,), 4)
TINY = {"tiny": Setting({"target_epsilon": 30.0, "accountant": "rdp"}, 3)}


def test_the_likelihood_ratio_is_that_of_the_densities() -> None:
    sums = np.random.default_rng(0).normal(0.5, 1, (4, 7))
    member = 0.7 * norm.pdf(sums, 0, 0.8) + 0.3 * norm.pdf(sums, 1, 0.8)
    expected = np.log(member / norm.pdf(sums, 0, 0.8)).sum(axis=0)
    assert likelihood_ratio(sums, EVENT) == pytest.approx(expected)


def test_the_simulated_attack_reaches_the_bounds() -> None:
    """The best test on the worst case: what it finds is the bound, so that a looser test cannot hide an error."""
    draw, size = np.random.default_rng(1), 40_000
    noise = 0.8 * draw.standard_normal((2, 4, size))
    ratios = [likelihood_ratio(x, EVENT) for x in (noise[0] + (draw.random((4, size)) < 0.3), noise[1])]
    bounds, at = risk([EVENT], 1e-5), thresholds(EVENT)
    found, alarms = (ratio > at["advantage"] for ratio in ratios)
    assert found.mean() - alarms.mean() == pytest.approx(bounds.advantage, abs=0.01)
    for rate, bound in bounds.tpr.items():
        found, alarms = (ratio > at[f"{rate:g}"] for ratio in ratios)
        assert alarms.mean() == pytest.approx(rate, rel=0.3)
        assert found.mean() == pytest.approx(bound, rel=0.15)


def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(attack_rates, "SETTINGS", TINY)
    monkeypatch.setattr(attack_rates, "SIMULATED", 20_000)
    main(["--runs", "1", "--canaries", "150", "--output", str(folder)])
    (found,) = json.loads((folder / "attack_rates.json").read_text())["runs"]
    return found


def test_bounds_hold_a_claim_of_more_noise_is_refuted_and_a_second_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(tmp_path, monkeypatch)
    assert not any(row["refuted"] for row in compare(found, 4))
    assert "1 runs, 4 comparisons: 0 refute" in (tmp_path / "attack_rates.md").read_text()
    (event,) = [Event.from_dict(one) for one in found["events"]]
    claimed = Event(event.sample_rate, (4 * event.noise_multiplier,), event.steps)
    assert any(row["refuted"] for row in compare({**found, "events": [claimed.to_dict()]}, 4))
    monkeypatch.setattr(attack_rates, "attack", None)
    run(tmp_path, monkeypatch)
