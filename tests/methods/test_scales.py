"""Public weights of blocks in the joint clip (`Method.scales`), on BK, against gradients that were formed."""

import pytest
import torch

from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.method import Full
from hf_private.mechanism.clipping import MODES, Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from tests.support import oracle, zoo

EXACT = 1e-8


def scaled(gradients, scales):
    return [{name: scales.get(name, 1.0) * g for name, g in one.items()} for one in gradients]


@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet-gn"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_clips_scaled_gradients_and_divides_the_sum_by_the_scale(name, mode):
    torch.manual_seed(0)
    model, loss = zoo.build(name)
    model.eval()
    parameters = trainable(model)
    scales = {p: 0.1 + 3 * torch.rand(()).item() for p in list(parameters)[::2]}
    batch = zoo.make_batch(model, batch_size=4)
    wanted = scaled(oracle.per_sample_gradients(model, loss, batch), scales)
    clip = Clipping(mode, oracle.norms(wanted).median().item())
    squares = {p: torch.stack([one[p].square().sum() for one in wanted]) for p in parameters}
    factors = clip.factors(squares, parameters)
    method = Full()
    method.scales = scales
    mechanism = Mechanism(
        model, loss, method=method, clipping=clip, noise=NoiseSource(), noise_multiplier=0.0, sample_rate=0.1,
        expected_batch_size=1, charge=lambda event: None,
    )  # fmt: skip
    mechanism.step([{key: value[rows] for key, value in batch.items()} for rows in ([0, 1, 2], [3])])
    for p, parameter in parameters.items():
        total = sum(c * one[p] for c, one in zip(factors[p], wanted, strict=True)) / scales.get(p, 1.0)
        assert (parameter.grad - total).norm() <= EXACT * (1e-3 + total.norm()), p
