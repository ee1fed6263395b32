"""Moments in the coordinates of carriers: Adam's first step, and what is left of them when carriers change."""

import pytest
import torch
from moments import InCoordinates
from torch import nn

from hf_private.gradients.bookkeeper import trainable
from hf_private.methods.carriers.lowrank import LowRank
from hf_private.methods.carriers.method import Carriers, Target


def attached(method: Carriers) -> Carriers:
    torch.manual_seed(0)
    method.attach(trainable(nn.Linear(6, 5, bias=False)))
    method.begin_step(0)
    return method


def released(method: Carriers) -> dict[str, torch.Tensor]:
    return {block: torch.randn(shape) for block, shape in method.blocks.items()}


def test_the_first_step_is_adams() -> None:
    """Without a past, Adam takes the sign of each number of dL and dR."""
    method = attached(InCoordinates({"weight": Target(2)}, carry=False, refresh=5))
    sums = released(method)
    wanted = method.carriers["weight"].reconstruct({side: sums[f"weight:{side}"].sign() for side in "LR"})
    torch.testing.assert_close(method.gradient("weight", sums), wanted)


@pytest.mark.parametrize("carry", [True, False])
def test_moments_are_carried_over_to_new_carriers_or_forgotten(carry: bool) -> None:
    method = attached(InCoordinates({"weight": Target(2)}, carry=carry, source="random", refresh=2))
    for step in range(2):
        method.begin_step(step)
        method.gradient("weight", released(method))
    old, moments = method.carriers["weight"], method.moments["weight"]
    assert isinstance(old, LowRank)
    matrix, squares = old.reconstruct(moments[0]), moments[1]["R"].clone()
    method.begin_step(2)
    new = method.carriers["weight"]
    assert isinstance(new, LowRank) and not torch.equal(new.left, old.left)
    if not carry:
        assert not method.moments and method.steps["weight"] == 0
        return
    torch.testing.assert_close(method.moments["weight"][0]["R"], new.left.T @ matrix)
    torch.testing.assert_close(method.moments["weight"][0]["L"], (matrix @ new.right.T).T)
    assert torch.equal(method.moments["weight"][1]["R"], squares) and method.steps["weight"] == 2
