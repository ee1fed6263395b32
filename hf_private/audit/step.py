"""Audit one step: check that no record influences it more than the noise covers, with this model, collator and loss.

The mechanism runs on a batch, and again without each of its records in turn, with the same randomness. The influence
of a record is the distance between the sums before noise. The accountant assumes that it is at most the sensitivity
for every record. This fails if two records interact: in the loss, in a batch statistic, or in the padding that a
collator adds. Where units are drawn, each of them is removed with all of its records.

Dropout is off, because its masks would differ between batches of different sizes. The result holds for the records of
the batch only; for all other records the guarantee rests on the engine.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_private.distributed.ranks import Ranks
from hf_private.gradients.bookkeeper import BookKeeper, rows_per_record
from hf_private.gradients.coverage import Entry, coverage
from hf_private.gradients.method import Method
from hf_private.gradients.persample import sq_norms
from hf_private.gradients.undisturbed import tolerance
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.sampling import PoissonLoader, PoissonSampler
from hf_private.mechanism.step import Mechanism
from hf_private.mechanism.units import UnitBatch, UnitSampler, WholeUnits
from hf_private.tasks.micro_batches import LogicalCollator
from hf_private.trainer.trainer import DPTrainer

Batch = Mapping[str, Any]
MicroBatches = list[tuple[list[int], UnitBatch]]  # each with the indices of the records, or units, in it
SEED = 0
ROUNDING = 1e-3  # relative; larger than the rounding errors of float32


class _RecordingNoise(NoiseSource):
    """Adds no noise; records the sums that it would be added to, and its scale."""

    def __init__(self) -> None:
        super().__init__(key=bytes(32))
        self.sums: dict[str, Tensor] = {}
        self.stds: dict[str, float] = {}

    def add_(self, step: int, sums: dict, stds: dict, offsets: dict | None = None) -> None:
        self.sums = {block: value.clone() for block, value in sums.items()}
        self.stds = dict(stds)


@dataclass(frozen=True)
class StepReport:
    """Result of the audit of one step.

    `sensitivity` is the largest influence of a record; the noise covers `clip_norm`. `coupled` lists (i, j, change):
    the gradient norm of record j changes by `change`, relatively, when record i is removed. `each` is "record", or
    "unit" where units are drawn; all that is said of records then holds for units.
    """

    records: int
    sensitivity: float
    clip_norm: float
    worst: int
    coupled: tuple[tuple[int, int, float], ...]
    uncovered: tuple[Entry, ...]
    random_collator: bool
    each: str = "record"

    @property
    def holds(self) -> bool:
        """Whether the audit found no problem."""
        return self.sensitivity <= self.clip_norm * (1 + ROUNDING) and not self.coupled and not self.uncovered


def audit_step(trainer: DPTrainer, records: int = 8) -> StepReport:
    """Examine one step on the first `records` records of a trainer. Do not train with this trainer afterwards.

    Where units are drawn, on the first units, each with at most k of its records. Where records of units are drawn, on
    records: the accountant prices k of them.
    """
    loader, model = trainer.get_train_dataloader(), trainer.model
    data: Any = loader.dataset
    sampler = loader.batch_sampler
    assert model is not None and isinstance(sampler, PoissonSampler)  # as DPTrainer makes them
    first = range(min(records, sampler.num_records))
    if isinstance(sampler, UnitSampler):
        units = [data[sampler.rows(one, counter=0)] for one in first]
    else:
        units = [[data[one]] for one in first]
    report = examine(
        model,
        trainer.create_loss(model),
        units,
        _logical_collator(loader),
        Clipping(trainer.dp_config.clipping, trainer.dp_config.clip_norm, trainer.dp_config.gamma),
        trainer.create_method(),
        lambda batch: trainer._prepare_inputs(dict(batch)),
    )
    return replace(report, each="unit") if trainer.dp_config.draws_units else report


def _logical_collator(loader: PoissonLoader) -> LogicalCollator:
    """The collator of a loader's records: itself, or the one whose method makes micro-batches of units."""
    found = getattr(loader.collate_fn, "__self__", loader.collate_fn)
    assert isinstance(found, LogicalCollator)  # as DPTrainer makes them
    return found


def examine(
    model: nn.Module,
    loss: Callable[[nn.Module, Batch], Tensor],
    units: Sequence[list[Any]],
    collator: LogicalCollator,
    clipping: Clipping,
    method: Method | None = None,
    prepare: Callable[[Batch], Batch] = dict,
) -> StepReport:
    """Examine one step of a model, loss and collator (with its limits for micro-batches) on given units, which are
    lists of records that are clipped as one. A record alone is a unit of one."""
    if len(units) < 2:
        raise ValueError(f"`records` must be at least 2, got {len(units)} in the batch: neighbours differ by one.")
    model.eval()
    batches = _Batches(units, collator, prepare)
    some = batches.whole[0][1].batch
    entries = coverage(model, lambda: loss(model, some), rows_per_record(loss))  # freezes what is refused
    uncovered = tuple(entry for entry in entries if entry.status == "refused")
    if all(entry.status != "covered" for entry in entries):
        return StepReport(len(units), 0.0, clipping.clip_norm, 0, (), uncovered, batches.random)
    step = _Step(model, loss, clipping, method)
    sums = step.sums(batches.whole)
    norms = _norms(model, loss, batches.whole)
    limit = tolerance(next(p for p in model.parameters() if p.requires_grad).dtype)
    largest, worst, coupled = 0.0, 0, []
    for removed in range(len(units)):
        rest = batches.without(removed)
        influence = step.distance(sums, step.sums(rest))
        if influence > largest:
            largest, worst = influence, removed
        for record, norm in _norms(model, loss, rest).items():
            change = abs(norm - norms[record]) / max(norm + norms[record], 1e-12)
            if not change <= limit:  # also if it is not a number
                coupled.append((removed, record, change))
    sensitivity = largest * clipping.clip_norm
    return StepReport(len(units), sensitivity, clipping.clip_norm, worst, tuple(coupled), uncovered, batches.random)


class _Batches:
    """Micro-batches of all units (`whole`), or of all but one; `random` says whether the collator is random."""

    def __init__(
        self, units: Sequence[list[Any]], collator: LogicalCollator, prepare: Callable[[Batch], Batch]
    ) -> None:
        self.units = units
        self.collator = collator
        self.prepare = prepare
        indices = range(len(units))
        self.random = not _same(self._collate(indices, SEED), self._collate(indices, SEED + 1))
        self.whole = self._collate(indices, SEED)

    def without(self, removed: int) -> MicroBatches:
        """Collate the other units. If the collator is random, drop the unit's rows from `whole` instead."""
        if not self.random:
            return self._collate([n for n in range(len(self.units)) if n != removed], SEED)
        batches: MicroBatches = []
        for indices, part in self.whole:
            others = [index for index in indices if index != removed]
            rows = [row for row in range(len(indices) * part.rows) if indices[row // part.rows] != removed]
            if others:
                batches.append((others, part.map(partial(_rows_of, rows=rows))))
        return batches

    def _collate(self, indices: Sequence[int], seed: int) -> MicroBatches:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        parts = self.collator.unit_parts([self.units[n] for n in indices])
        return [([indices[place] for place in places], part.map(self.prepare)) for places, part in parts]


def _rows_of(batch: Batch, rows: list[int]) -> Batch:
    """Some rows of a batch."""
    return {key: x[rows] if isinstance(x, Tensor) else x for key, x in batch.items()}


class _Step:
    """The mechanism, without noise; every call is step 0."""

    def __init__(self, model: nn.Module, loss: Callable, clipping: Clipping, method: Method | None) -> None:
        self.noise = _RecordingNoise()
        self.mechanism = Mechanism(
            model,
            loss,
            method=method,
            clipping=clipping,
            noise=self.noise,
            noise_multiplier=1.0,
            sample_rate=1.0,
            expected_batch_size=1,
            charge=lambda event: None,
            ranks=Ranks.alone(),
        )

    def sums(self, batches: MicroBatches) -> dict[str, Tensor]:
        """The clipped sums of a batch before noise."""
        torch.manual_seed(SEED)
        self.mechanism.steps = 0
        self.mechanism.step([batch for _, batch in batches])
        return self.noise.sums

    def distance(self, sums: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        """Distance over all blocks in standard deviations of noise with multiplier 1: the accountant assumes 1."""
        parts = [(sums[block] - other[block]).double().norm() / std for block, std in self.noise.stds.items()]
        return torch.stack(parts).norm().item()


def _norms(model: nn.Module, loss: Callable, batches: MicroBatches) -> dict[int, float]:
    """Gradient norm of each unit, by index."""
    norms, units, rows_of_loss = {}, WholeUnits(), rows_per_record(loss)
    for indices, part in batches:
        with BookKeeper(model) as book:
            book.rows_per_record = part.rows * rows_of_loss
            losses = part.losses(loss(model, part.batch), book.num_rows // rows_of_loss)
            book.backward(losses)
            joined = units.join(book.pop_entries(), losses, part)
        if joined:
            total = torch.stack([*sq_norms(joined[0]).values()]).sum(0).sqrt()
            norms |= dict(zip(indices, total.tolist(), strict=True))
    return norms


def _same(batches: MicroBatches, others: MicroBatches) -> bool:
    for (_, one), (_, other) in zip(batches, others, strict=True):
        if any(torch.is_tensor(x) and not torch.equal(x, other.batch[key]) for key, x in one.batch.items()):
            return False
    return True
