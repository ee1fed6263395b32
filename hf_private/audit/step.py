"""One step under the microscope: is the sensitivity what the noise was made for, with this model, collator and loss?

The mechanism runs on a batch, and again without each of its records in turn, with the same randomness. What the sums
before the noise differ by is the influence of that record. The accountant's premise is that noise of multiplier sigma
has sigma times that, for every record; where two records meet (in the loss, in a batch statistic, in the padding that
a collator adds) it fails, and no amount of noise is the right one.

Dropout is off: its masks would differ between batches of different size. What is shown is about the records at hand,
as in any test; the guarantee for all others rests on the engine.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_private.distributed.ranks import Ranks
from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.coverage import Entry, coverage
from hf_private.gradients.method import Method
from hf_private.gradients.selfcheck import tolerance
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.micro_batches import LogicalCollator, length_of, split
from hf_private.trainer.trainer import DPTrainer

Batch = Mapping[str, Any]
SEED = 0
ROUNDING = 1e-3  # relative; clip factors leave room for more than float32 makes of it


class _Witness(NoiseSource):
    """Adds no noise, but keeps what it would be added to, and its scale."""

    def __init__(self) -> None:
        super().__init__(key=bytes(32))

    def add_(self, step: int, sums: dict, stds: dict, offsets: dict | None = None) -> None:
        self.sums, self.stds = {block: value.clone() for block, value in sums.items()}, dict(stds)


@dataclass(frozen=True)
class StepReport:
    """What one step showed.

    `sensitivity` is the largest influence of a record, in units that make `clip_norm` what the noise covers; `coupled`
    are pairs (i, j) where record j's gradient moved by `change`, relatively, when record i was taken away.
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
        """Whether nothing was found."""
        return self.sensitivity <= self.clip_norm * (1 + ROUNDING) and not self.coupled and not self.uncovered


def audit_step(trainer: DPTrainer, records: int = 8) -> StepReport:
    """Examine one step on the first `records` records of a trainer that is not used otherwise."""
    method, loader, model = trainer.create_method(), trainer.get_train_dataloader(), trainer.model
    data = loader.dataset
    some = [data[index] for index in range(min(records, len(data)))]
    loss = PerSampleLoss(model, trainer.per_sample_loss, trainer.args.label_smoothing_factor)
    clipping = Clipping(trainer.dp_config.clipping, trainer.dp_config.clip_norm)
    return examine(model, loss, some, loader.collate_fn, clipping, method, trainer._prepare_inputs)


def examine(
    model: nn.Module,
    loss: Callable[[nn.Module, Batch], Tensor],
    records: Sequence[Any],
    collator: LogicalCollator,
    clipping: Clipping,
    method: Method | None = None,
    prepare: Callable[[Batch], Batch] = dict,
) -> StepReport:
    """Examine one step of a model, loss and collator (with its bounds of a micro-batch) on given records."""
    if len(records) < 2:
        raise ValueError(f"`records` must hold at least 2 records, got {len(records)}: neighbours differ by one.")
    model.eval()
    batches = _Batches(records, collator, prepare)
    whole = batches.without(None)
    entries = coverage(model, lambda: loss(model, whole[0][1]))  # freezes what is refused
    uncovered = tuple(entry for entry in entries if entry.status == "refused")
    if all(entry.status != "covered" for entry in entries):
        return StepReport(len(records), 0.0, clipping.clip_norm, 0, (), uncovered, batches.random)
    step = _Step(model, loss, clipping, method)
    release, norms = step.release(whole), _norms(model, loss, whole)
    limit = tolerance(next(p for p in model.parameters() if p.requires_grad).dtype)
    largest, worst, coupled = 0.0, 0, []
    for removed in range(len(records)):
        rest = batches.without(removed)
        influence = step.distance(release, step.release(rest))
        if influence > largest:
            largest, worst = influence, removed
        for record, norm in _norms(model, loss, rest).items():
            change = abs(norm - norms[record]) / max(norm + norms[record], 1e-12)
            if not change <= limit:
                coupled.append((removed, record, change))
    sensitivity = largest * clipping.clip_norm
    return StepReport(len(records), sensitivity, clipping.clip_norm, worst, tuple(coupled), uncovered, batches.random)


class _Batches:
    """Micro-batches of the records, all or without one, each with the numbers of the records in its rows."""

    def __init__(self, records: Sequence[Any], collator: LogicalCollator, prepare: Callable[[Batch], Batch]) -> None:
        self.records, self.collator, self.prepare = records, collator, prepare
        everybody = range(len(records))
        self.random = not _same(self._collate(everybody, SEED), self._collate(everybody, SEED + 1))
        self.whole = self._collate(everybody, SEED)

    def without(self, removed: int | None) -> list[tuple[list[int], Batch]]:
        """Collated anew, unless the collator draws at random: then the record's row is taken out of the same draw."""
        if removed is None:
            return self.whole
        if not self.random:
            return self._collate([n for n in range(len(self.records)) if n != removed], SEED)
        found = []
        for numbers, batch in self.whole:
            keep = [row for row, number in enumerate(numbers) if number != removed]
            if keep:
                rows = {key: x[keep] if isinstance(x, Tensor) else x for key, x in batch.items()}
                found.append(([numbers[row] for row in keep], rows))
        return found

    def _collate(self, numbers: Sequence[int], seed: int) -> list[tuple[list[int], Batch]]:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        lengths = [length_of(self.records[n]) for n in numbers]
        parts = split(lengths, self.collator.max_rows, self.collator.max_tokens)
        rows = [[numbers[i] for i in part] for part in parts]
        return [(part, self.prepare(self.collator.collate([self.records[n] for n in part]))) for part in rows]


class _Step:
    """The mechanism, with a witness instead of noise; every release is of step 0."""

    def __init__(self, model: nn.Module, loss: Callable, clipping: Clipping, method: Method | None) -> None:
        self.witness = _Witness()
        self.mechanism = Mechanism(
            model,
            loss,
            method=method,
            clipping=clipping,
            noise=self.witness,
            noise_multiplier=1.0,
            sample_rate=1.0,
            expected_batch_size=1,
            charge=lambda event: None,
            ranks=Ranks.alone(),
        )

    def release(self, batches: list[tuple[list[int], Batch]]) -> dict[str, Tensor]:
        torch.manual_seed(SEED)
        self.mechanism.steps = 0
        self.mechanism.step([batch for _, batch in batches])
        return self.witness.sums

    def distance(self, release: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        """Distance in standard deviations of noise of multiplier 1, over all blocks: 1 is what is accounted."""
        parts = [(release[b] - other[b]).double().norm() / std for b, std in self.witness.stds.items()]
        return torch.stack(parts).norm().item()


def _norms(model: nn.Module, loss: Callable, batches: list[tuple[list[int], Batch]]) -> dict[int, float]:
    """Gradient norm by number of the record."""
    found = {}
    for numbers, batch in batches:
        with BookKeeper(model) as book:
            book.backward(loss(model, batch))
            found |= dict(zip(numbers, book.norms().tolist(), strict=True))
    return found


def _same(batches: list[tuple[list[int], Batch]], others: list[tuple[list[int], Batch]]) -> bool:
    pairs = zip(batches, others, strict=True)
    return all(
        torch.equal(x, other[key])
        for (_, batch), (_, other) in pairs
        for key, x in batch.items()
        if torch.is_tensor(x)
    )
