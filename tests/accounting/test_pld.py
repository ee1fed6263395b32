"""The privacy loss of a step on its whole grid, against dp-accounting's own point by point."""

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as package

from hf_private.accounting.pld import one_step

CASES = [
    (0.0038, 0.4637, 1e-3),
    (0.02, 1.0, 1e-4),
    (0.5, 0.7, 1e-3),
    (0.999, 2.0, 1e-3),
    (0.3, 8.0, 1e-3),
    (1.0, 3.0, 1e-3),
]


@pytest.mark.parametrize(("q", "sigma", "interval"), CASES)
def test_one_step_is_that_of_the_package(q, sigma, interval):
    theirs = package.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=interval)
    ours = one_step(q, sigma, interval, records=1)
    for direction in ("_pmf_remove", "_pmf_add"):
        wanted, found = (getattr(losses, direction).to_dense_pmf() for losses in (theirs, ours))
        assert (found._lower_loss, found.size) == (wanted._lower_loss, wanted.size)
        np.testing.assert_allclose(found._probs, wanted._probs, rtol=1e-9, atol=1e-15)
        assert found._infinity_mass == pytest.approx(wanted._infinity_mass, rel=1e-9, abs=1e-18)
