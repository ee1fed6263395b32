"""Projections of gradients: the same for every form, and a fair estimate of distances."""

import pytest
import torch

from hf_private.gradients.persample import Dense
from hf_private.gradients.sketch import PROBES, distances, sketch
from tests.gradients.test_persample import draw


@pytest.mark.parametrize("kind", ["dense", "outer", "rows", "tied"])
def test_a_sketch_is_that_of_the_formed_gradient(kind):
    value = draw(kind, records=3, positions=4, seed=0)
    torch.testing.assert_close(sketch(value), sketch(Dense(value.dense())))
    assert sketch(value).shape == (3, PROBES)


def test_distances_are_fair():
    """Over many parameters the estimate is near the distance, also of gradients with equal norms."""
    torch.manual_seed(0)
    one = {f"w{i}": torch.randn(2, 5 + i, 7) for i in range(40)}
    two = {name: x.flip(1) for name, x in one.items()}
    exact = torch.stack([(one[name] - two[name]).square().sum((1, 2)) for name in one]).sum(0).sqrt()
    found = distances(*({name: sketch(Dense(x)) for name, x in part.items()} for part in (one, two)))
    torch.testing.assert_close(found, exact.double(), rtol=0.2, atol=0)
    assert not distances(*[{name: sketch(Dense(x)) for name, x in one.items()}] * 2).any()
