"""Drawing units and drawing records at equal epsilon: prices are the accountants', and noise is measured."""

import numpy as np
import pytest

from hf_private.accounting.budget import calibrate
from hf_private.accounting.unit_plans import compare_samplings

COUNTS = [1, 2, 2, 10] * 50


def plans(**changes):
    settings = {"batch": 20, "steps": 30, "epsilon": 8.0, "delta": 1e-5, "ks": [1, 2], "accountant": "rdp"}
    return {(plan.sampling, plan.k): plan for plan in compare_samplings(COUNTS, **settings | changes)}


def test_units_are_priced_as_one_record_and_records_as_a_group_of_k():
    found = plans()
    for (sampling, k), plan in found.items():
        group = k if sampling == "records" else 1
        assert plan.noise_multiplier == calibrate(8.0, 1e-5, 0.1, 30, accountant="rdp", records_per_unit=group)
        assert plan.batch == {"units": 20, "records": 75}[sampling], "the same share of what is drawn"
        assert plan.rows == pytest.approx(0.1 * sum(min(count, k) for count in COUNTS))


def test_with_one_record_of_each_unit_both_are_the_same_mechanism():
    one, other = plans()["units", 1], plans()["records", 1]
    assert (one.noise_multiplier, one.alike, one.unlike) == (other.noise_multiplier, other.alike, other.unlike)


@pytest.mark.parametrize(("kind", "shared"), [("alike", 1.0), ("unlike", 0.05)])
def test_noise_over_signal_is_what_clipped_gradients_show(kind, shared):
    """The signal of a step, from gradients with a common part, clipped as each sampling clips them."""
    # many units, so that the common part stands out
    random, width, k = np.random.default_rng(0), 3000, 2
    direction = np.eye(width)[0]
    signal = {"units": 0.0, "records": 0.0}
    for count in COUNTS:
        rows = min(count, k)
        own = random.normal(size=(1 if kind == "alike" else rows, width)) / np.sqrt(width)
        gradients = np.broadcast_to(shared * direction + own, (rows, width))
        clipped = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)  # all are long
        mean = gradients.mean(0)
        signal["records"] += clipped.sum(0) @ direction
        signal["units"] += mean @ direction / np.linalg.norm(mean)
    found = plans()
    one, other = found["units", k], found["records", k]
    measured = (one.noise_multiplier / signal["units"]) / (other.noise_multiplier / signal["records"])
    assert getattr(one, kind) / getattr(other, kind) == pytest.approx(measured, rel=0.1 if kind == "unlike" else 0.01)
    assert one.unlike / other.unlike < 0.85 * one.alike / other.alike, "the two are told apart"
