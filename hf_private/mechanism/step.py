"""One private step, as an auditor reads it.

    charge the ledger                                         the step is paid for before anything is computed
    for each micro-batch of the Poisson draw:
        forward, backward, a book of (a, ds)                  bookkeeping
        (rows of one unit: their mean loss, one entry)        `units.UnitBatch`
        per-sample norms -> clip factors -> clipped sum       sensitivity: clip_norm
    sum over ranks
    add Gaussian noise, once                                  standard deviation: noise_multiplier * clip_norm
    divide by the *expected* batch size
    turn the blocks back into gradients -> .grad              post-processing from here on

An empty draw is a step like any other: its release is pure noise. Nothing leaves this file without noise, unless
`log_nonprivate` asks for it by name.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_private.accounting.events import Event
from hf_private.distributed.fsdp import Shards, run_collectively
from hf_private.distributed.ranks import Ranks
from hf_private.gradients.bookkeeper import BookKeeper, rows_per_record
from hf_private.gradients.method import Full, Method
from hf_private.gradients.persample import PerSample, sq_norms
from hf_private.gradients.tensors import accumulation_dtype, full_precision

from .clipping import Clipping
from .noise import NoiseSource, reseed_global
from .units import UnitBatch, WholeUnits, as_unit_batch

Batch = Mapping[str, Any] | UnitBatch
PerSampleLossFn = Callable[[nn.Module, Mapping[str, Any]], Tensor]


class Mechanism:
    """The Gaussian mechanism on Poisson samples: clip, sum, noise, divide; writes `.grad` and nothing else.

    `per_sample_loss(model, batch)` returns the losses (N,) of the rows of a micro-batch. Each row is a record, unless
    the micro-batch is a `UnitBatch`, whose units have several rows and are clipped as one. `charge(event)` writes the
    step to the ledger and raises an error if the budget does not permit it. `ranks` defaults to torch's process group.
    A model under FSDP2 also needs `dummy()`, which makes a public micro-batch for ranks that have run out of records.

    Guarantee: the release of one step has L2 sensitivity `clipping.clip_norm` with respect to adding or removing one
    record of the sample, or one unit (each part its own norm, for methods with several parts), and Gaussian noise of
    `noise_multiplier` times that. Micro-batches and ranks change the speed only.
    """

    def __init__(
        self,
        model: nn.Module,
        per_sample_loss: PerSampleLossFn,
        *,
        clipping: Clipping,
        noise: NoiseSource,
        noise_multiplier: float,
        sample_rate: float,
        expected_batch_size: float,
        charge: Callable[[Event], None],
        method: Method | None = None,
        ranks: Ranks | None = None,
        dummy: Callable[[], Batch] | None = None,
        log_nonprivate: bool = False,
    ) -> None:
        self.model = model
        self.per_sample_loss = per_sample_loss
        self.method = method or Full()
        self.clipping = clipping
        self.noise = noise
        self.noise_multiplier = noise_multiplier
        self.expected_batch_size = expected_batch_size
        self.charge = charge
        self.ranks = ranks or Ranks()
        self.shards = Shards(model, self.ranks, dummy)
        self.parameters = self.shards.parameters
        if self.shards.sharded and not self.method.takes_shards:
            raise ValueError(
                f"`method` must support sharded weights under FSDP2, got {self.method.describe()}. Use DDP, or train"
                " with plain book-keeping or carriers."
            )
        self.method.attach(self.parameters)
        self.event = Event(sample_rate=sample_rate, releases=self.method.releases(noise_multiplier))
        self.steps = 0
        self.nonprivate: dict[str, float] | None = {} if log_nonprivate else None

    def step(self, micro_batches: Iterable[Batch]) -> None:
        """Run one logical step on this rank's share of a Poisson draw, and leave the private gradient in `.grad`."""
        self.ranks.run_on_all(self.charge, self.event)
        self.ranks.begin_step(self.parameters)
        if not self.noise.reproducible:
            reseed_global()  # a dropout mask that somebody can replay is a side channel
        with self.noise:
            with full_precision(next(iter(self.parameters.values())).device):
                sums = run_collectively(self.ranks, self.model, self._clipped_sums, micro_batches)
            self.ranks.all_reduce_({block: sums[block] for block in sums if block not in self.shards.rows})
            self.noise.add_(self.steps, sums, self._stds(), self._offsets())
        for block in sums.values():
            block.div_(self.expected_batch_size)
        for name, p in self.parameters.items():  # one at a time: under FSDP2 a whole gradient is large
            p.grad = self.shards.gradient(name, self.method.gradient(name, sums), whole=name not in sums)
        self.steps += 1

    def _stds(self) -> dict[str, float]:
        return self.method.stds(self.noise_multiplier, self.clipping.clip_norm)

    def _offsets(self) -> dict[str, int]:
        return {block: offset for block, offset in self.shards.offsets().items() if block in self.method.blocks}

    def _begin_noise(self) -> None:
        """Let free cores compute the noise of this step while the passes run."""
        sizes = {block: self.shards.shape(block, shape).numel() for block, shape in self.method.blocks.items()}
        device = next(iter(self.parameters.values())).device
        self.noise.begin(self.steps, sizes, self._stds(), device, self._offsets())

    def _clipped_sums(self, micro_batches: Iterable[Batch]) -> dict[str, Tensor]:
        """Sum of the clipped per-sample gradients by block; zeros where no record reached the block."""
        self.method.begin_step(self.steps)
        self._begin_noise()
        sums: dict[str, Tensor] = {}
        if self.nonprivate is not None:
            self.nonprivate = {"loss_sum": 0.0, "batch_size": 0, "nonfinite_records": 0}
        units = WholeUnits()
        rows_of_loss = rows_per_record(self.per_sample_loss)
        with BookKeeper(self.model, self.method) as book:
            for batch, counts in self.shards.micro_batches(micro_batches):
                part = as_unit_batch(batch)
                book.rows_per_record = part.rows * rows_of_loss
                losses = part.losses(self.per_sample_loss(self.model, part.batch), book.num_rows // rows_of_loss)
                book.backward(losses)
                entries = book.pop_entries()
                joined = units.join(entries, losses, part) if counts else None
                if joined is None:  # the gradients of a dummy, or a part of a unit
                    entries.clear()
                else:
                    entries, losses = joined
                    if self.nonprivate is not None:
                        _note_nonprivate(self.nonprivate, losses.detach(), entries)
                entries = self.shards.scattered(entries, self.method.blocks, len(losses))
                if entries:
                    self.method.add_clipped_sums(entries, self.clipping, sums)
        if self.nonprivate is not None:  # read once: the host waits for the device
            self.nonprivate = {name: float(total) for name, total in self.nonprivate.items()}
        some = next(iter(self.parameters.values()))
        for block, shape in self.method.blocks.items():
            if block not in sums:
                sums[block] = torch.zeros(
                    self.shards.shape(block, shape), dtype=accumulation_dtype(some), device=some.device
                )
        return {block: sums[block] for block in self.method.blocks}  # the same order on every rank


def _note_nonprivate(totals: dict[str, Any], losses: Tensor, entries: Mapping[str, PerSample]) -> None:
    finite = torch.isfinite(losses) & torch.isfinite(torch.stack([*sq_norms(entries).values()]).sum(0))
    totals["loss_sum"] += losses.where(finite, 0).sum()
    totals["batch_size"] += len(losses)
    totals["nonfinite_records"] += (~finite).sum()
