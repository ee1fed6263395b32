"""Builds the mechanism of one `train()`: secret keys, self-check, open ledger."""

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import nn
from transformers.utils import logging

from hf_private.accounting.signal import noise_to_signal
from hf_private.distributed.fsdp import run_collectively
from hf_private.gradients.method import Method
from hf_private.gradients.selfcheck import LENGTH, self_check
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from hf_private.randomness import Key
from hf_private.tasks.long_rows import longer_rows
from hf_private.tasks.packed_weights import keep_unpacked
from hf_private.tasks.unit_loss import CHECKED_ROWS, Loss, MakeBatch, UnitLoss, made_up_units

from .data_guards import longest_record, try_records

if TYPE_CHECKING:
    from .training_run import TrainingMixin

logger = logging.get_logger(__name__)


class Keys(NamedTuple):
    """The secrets of one `train()`: never saved, and drawn anew by the next."""

    sampling: Key | bytes
    noise: Key | bytes


def build_mechanism(
    trainer: "TrainingMixin", model: nn.Module, method: Method, keys: Keys, sample_rate: float, steps: int
) -> Mechanism:
    """Check the gradients of the model, open the ledger for this number of steps, and build the mechanism of a step.

    Args:
        model: The model that the steps run, as the ranks have sharded it.
        sample_rate: Probability of each record, or unit, to be drawn for a step.
    """
    config, ranks = trainer.dp_config, trainer.ranks
    keep_unpacked(model)
    loss = trainer.create_loss(model)
    meet = trainer.args.per_device_train_batch_size > 1
    clipping = Clipping(config.clipping, config.clip_norm, config.gamma)
    longer = longer_rows(model, LENGTH, partial(longest_record, trainer)) if meet else []
    checks: list[tuple[Loss, MakeBatch]] = [(loss, trainer.public_batch)]
    if config.draws_units or config.augmentations > 1:  # rows that are clipped as one; single ones occur, too
        checks.append((UnitLoss(loss, CHECKED_ROWS), made_up_units(trainer.public_batch, CHECKED_ROWS)))
    for checked, make_batch in checks:
        args = (model, checked, make_batch, meet, clipping.clip_norm, clipping.gamma, clipping.group_of, longer)
        logger.info(run_collectively(ranks, model, self_check, *args))
    run_collectively(ranks, model, try_records, trainer, model, loss)
    noise = NoiseSource(config.noise, keys.noise)
    run = trainer.provenance.open_run(
        sample_rate,
        steps,
        method.releases,
        {
            **config.to_dict(),
            "expected_batch_size": trainer.expected_batch_size,
            "num_records": None if config.draws_units else trainer.num_records,
            "num_units": trainer.num_units,
            "method": method.describe(),
            "reproducible": noise.reproducible,
            "ranks": ranks.world_size,
            **objective_of(trainer),
        },
    )
    mechanism = Mechanism(
        model,
        loss,
        method=method,
        clipping=clipping,
        noise=noise,
        noise_multiplier=run.plan.noise_multiplier,
        sample_rate=sample_rate,
        expected_batch_size=trainer.expected_batch_size,
        charge=run.charge,
        ranks=ranks,
        dummy=lambda: trainer._prepare_inputs(trainer.public_batch(1, LENGTH)),
        log_nonprivate=config.log_nonprivate,
    )
    if trainer.is_world_process_zero():
        _announce_noise(method, run.plan.noise_multiplier, trainer.expected_batch_size)
    mechanism.steps = trainer.state.global_step  # with a test key, a resumed run repeats the noise of its steps
    return mechanism


def objective_of(trainer: "TrainingMixin") -> dict[str, str]:
    """The objective, as a setting, if it has a name."""
    return {} if trainer.objective_name is None else {"objective": trainer.objective_name}


def _announce_noise(method: Method, noise_multiplier: float, expected_batch_size: int) -> None:
    """Say how loud the noise of a step is; warn if the run may learn nothing. It reads no data."""
    if not noise_multiplier:
        return
    noised = sum(shape.numel() for shape in method.blocks.values())
    # GEP splits a step into two releases, each with more noise than the effective multiplier
    found = noise_to_signal(max(method.releases(noise_multiplier)), noised, expected_batch_size)
    if found.warning:
        logger.warning(found.warning)
    else:
        logger.info(str(found))
