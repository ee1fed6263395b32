"""Bugs that other libraries had and that no other test here would see: found by putting them in (tests/mutations)."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from hf_private.distributed.ranks import Ranks
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from hf_private.spending.ledger import PrivacyLedger
from tests.support import training, zoo

KEY = bytes(range(32))


class Pair(Ranks):
    """Two ranks with the same share, as far as the sum goes."""

    def all_reduce_(self, sums: Mapping[str, torch.Tensor]) -> None:
        for block in sums.values():
            block.mul_(2)


def mechanism(model, loss, **changes) -> Mechanism:
    settings = {"noise_multiplier": 1.0, "ranks": None, **changes}
    return Mechanism(
        model, loss, clipping=Clipping("flat", 0.1), noise=NoiseSource(key=KEY), sample_rate=0.1,
        expected_batch_size=4, charge=lambda event: None, **settings,
    )  # fmt: skip


def released(made: Mechanism, batches: list) -> torch.Tensor:
    made.step(batches)
    return torch.cat([p.grad.flatten() for p in made.parameters.values()])


def test_noise_comes_after_the_sum_over_ranks() -> None:
    """The sum of two ranks is twice one rank's; the noise is that of one."""
    model, loss = zoo.build("bert", torch.float32)
    model.eval()
    batch = [zoo.make_batch(model, 3)]
    clean = released(mechanism(model, loss, noise_multiplier=0.0), batch)
    noise = released(mechanism(model, loss), [])
    both = released(mechanism(model, loss, ranks=Pair()), batch)
    torch.testing.assert_close(both, 2 * clean + noise, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(both, 2 * clean + 2 * noise, rtol=1e-4, atol=1e-6)


def test_an_empty_batch_after_a_full_one_is_noise_alone() -> None:
    """No made-up record, and nothing of the step before, stands in for a draw that came out empty."""
    model, loss = zoo.build("bert", torch.float32)
    made = mechanism(model, loss, noise_multiplier=0.0)
    assert released(made, [zoo.make_batch(model, 3)]).any()
    assert not released(made, []).any()


@pytest.mark.parametrize("accumulation", [1, 4])
def test_accumulation_changes_neither_steps_nor_sample_rate(tmp_path: Path, accumulation: int) -> None:
    """Trainer's steps are updates, and a step samples the logical batch: 8 of 40 records, 6 times, either way."""
    made = training.trainer(
        tmp_path, dp={"noise_multiplier": None, "target_epsilon": 3.0}, max_steps=6,
        per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    made.train()
    (event,) = PrivacyLedger.read(tmp_path / "_dp" / "ledger.jsonl").events
    assert (event.steps, event.sample_rate) == (6, 8 / training.RECORDS)
    assert made.spending.last_run["planned_steps"] == made.state.global_step == 6
    assert 2.9 < made.spending.epsilon() <= 3.0
