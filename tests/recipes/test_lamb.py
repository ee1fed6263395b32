"""LAMB against its formula, and through Trainer's `optimizers`."""

import pytest
import torch
from lamb import Lamb, main


def test_the_first_step_has_the_length_of_the_weights():
    """Adam's first step is the sign of the gradient; LAMB's has length lr |w|. A zero tensor takes Adam's."""
    torch.manual_seed(0)
    weight, zero = torch.randn(4, 3, requires_grad=True), torch.zeros(5, requires_grad=True)
    before = weight.detach().clone()
    weight.grad, zero.grad = torch.randn(4, 3), torch.randn(5)
    Lamb([weight, zero], lr=0.1, eps=0.0).step()
    expected = before - 0.1 * before.norm() * weight.grad.sign() / 12**0.5
    torch.testing.assert_close(weight.detach(), expected)
    torch.testing.assert_close(zero.detach(), -0.1 * zero.grad.sign())


@pytest.mark.slow
def test_the_example_trains_with_it(capsys):
    main(["--steps", "2"])
    assert "epsilon" in capsys.readouterr().out
