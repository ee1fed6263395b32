"""Audit one step: check that no record influences it more than the noise covers, with this model, collator and loss.

The mechanism runs on a batch, and again without each of its records in turn, with the same randomness. The influence
of a record is the distance between the sums before noise. The accountant assumes that it is at most the sensitivity
for every record. This fails if two records interact: in the loss, in a batch statistic, or in the padding that a
collator adds.

Dropout is off, because its masks would differ between batches of different sizes. The result holds for the records of
the batch only; for all other records the guarantee rests on the engine.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_private.config import DPConfig
from hf_private.distributed.ranks import Ranks
from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.coverage import Entry, coverage
from hf_private.gradients.method import Method
from hf_private.gradients.undisturbed import tolerance
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.micro_batches import LogicalCollator, length_of, split
from hf_private.trainer.trainer import DPTrainer

Batch = Mapping[str, Any]
MicroBatches = list[tuple[list[int], Batch]]  # each with the indices of the records in its rows
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
    the gradient norm of record j changes by `change`, relatively, when record i is removed.
    """

    records: int
    sensitivity: float
    clip_norm: float
    worst: int
    coupled: tuple[tuple[int, int, float], ...]
    uncovered: tuple[Entry, ...]
    random_collator: bool

    @property
    def holds(self) -> bool:
        """Whether the audit found no problem."""
        return self.sensitivity <= self.clip_norm * (1 + ROUNDING) and not self.coupled and not self.uncovered


def audit_step(trainer: DPTrainer, records: int = 8) -> StepReport:
    """Examine one step on the first `records` records of a trainer. Do not train with this trainer afterwards."""
    refuse_units(trainer.dp_config)
    loader, model = trainer.get_train_dataloader(), trainer.model
    data: Any = loader.dataset
    collator = loader.collate_fn
    assert model is not None and isinstance(collator, LogicalCollator)  # as DPTrainer makes them
    return examine(
        model,
        PerSampleLoss(model, trainer.per_sample_loss, trainer.args.label_smoothing_factor),
        [data[index] for index in range(min(records, len(data)))],
        collator,
        Clipping(trainer.dp_config.clipping, trainer.dp_config.clip_norm, trainer.dp_config.gamma),
        trainer.create_method(),
        lambda batch: trainer._prepare_inputs(dict(batch)),
    )


def refuse_units(config: DPConfig) -> None:
    """The audit of a step removes records, so it says nothing about units of several."""
    for name in ("unit_column", "augmentations"):
        if getattr(config, name) not in (None, 1):
            raise ValueError(
                f"`{name}` must be left at its default in the audit of a step, got {getattr(config, name)!r}: it tests"
                " the influence of one record. Audit the same run without it, or with canaries, which may be units."
            )


def examine(
    model: nn.Module,
    loss: Callable[[nn.Module, Batch], Tensor],
    records: Sequence[Any],
    collator: LogicalCollator,
    clipping: Clipping,
    method: Method | None = None,
    prepare: Callable[[Batch], Batch] = dict,
) -> StepReport:
    """Examine one step of a model, loss and collator (with its limits for micro-batches) on given records."""
    if len(records) < 2:
        raise ValueError(f"`records` must hold at least 2 records, got {len(records)}: neighbours differ by one.")
    model.eval()
    batches = _Batches(records, collator, prepare)
    entries = coverage(model, lambda: loss(model, batches.whole[0][1]))  # freezes what is refused
    uncovered = tuple(entry for entry in entries if entry.status == "refused")
    if all(entry.status != "covered" for entry in entries):
        return StepReport(len(records), 0.0, clipping.clip_norm, 0, (), uncovered, batches.random)
    step = _Step(model, loss, clipping, method)
    sums = step.sums(batches.whole)
    norms = _norms(model, loss, batches.whole)
    limit = tolerance(next(p for p in model.parameters() if p.requires_grad).dtype)
    largest, worst, coupled = 0.0, 0, []
    for removed in range(len(records)):
        rest = batches.without(removed)
        influence = step.distance(sums, step.sums(rest))
        if influence > largest:
            largest, worst = influence, removed
        for record, norm in _norms(model, loss, rest).items():
            change = abs(norm - norms[record]) / max(norm + norms[record], 1e-12)
            if not change <= limit:  # also if it is not a number
                coupled.append((removed, record, change))
    sensitivity = largest * clipping.clip_norm
    return StepReport(len(records), sensitivity, clipping.clip_norm, worst, tuple(coupled), uncovered, batches.random)


class _Batches:
    """Micro-batches of all records (`whole`), or of all but one; `random` says whether the collator is random."""

    def __init__(self, records: Sequence[Any], collator: LogicalCollator, prepare: Callable[[Batch], Batch]) -> None:
        self.records = records
        self.collator = collator
        self.prepare = prepare
        indices = range(len(records))
        self.random = not _same(self._collate(indices, SEED), self._collate(indices, SEED + 1))
        self.whole = self._collate(indices, SEED)

    def without(self, removed: int) -> MicroBatches:
        """Collate the other records. If the collator is random, drop the record's row from `whole` instead."""
        if not self.random:
            return self._collate([n for n in range(len(self.records)) if n != removed], SEED)
        batches: MicroBatches = []
        for indices, batch in self.whole:
            keep = [row for row, index in enumerate(indices) if index != removed]
            if keep:
                rows = {key: x[keep] if isinstance(x, Tensor) else x for key, x in batch.items()}
                batches.append(([indices[row] for row in keep], rows))
        return batches

    def _collate(self, indices: Sequence[int], seed: int) -> MicroBatches:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        lengths = [length_of(self.records[n]) for n in indices]
        parts = split(lengths, self.collator.max_rows, self.collator.max_tokens)
        rows = [[indices[i] for i in part] for part in parts]
        return [(part, self.prepare(self.collator.collate([self.records[n] for n in part]))) for part in rows]


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
    """Gradient norm of each record, by index."""
    norms = {}
    for indices, batch in batches:
        with BookKeeper(model) as book:
            book.backward(loss(model, batch))
            norms |= dict(zip(indices, book.norms().tolist(), strict=True))
    return norms


def _same(batches: MicroBatches, others: MicroBatches) -> bool:
    for (_, batch), (_, other) in zip(batches, others, strict=True):
        if any(torch.is_tensor(x) and not torch.equal(x, other[key]) for key, x in batch.items()):
            return False
    return True
