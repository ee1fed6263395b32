"""One private step: the page an auditor reads.

    charge the ledger                                         the step is paid for before anything is computed
    for each micro-batch of the Poisson draw:
        forward, backward, a book of (a, ds)                  bookkeeping
        per-sample norms -> clip factors -> clipped sum       sensitivity: clip_norm
    sum over ranks
    add Gaussian noise, once                                  standard deviation: noise_multiplier * clip_norm
    divide by the *expected* batch size
    turn the blocks back into gradients -> .grad              post-processing from here on

An empty draw is a step like any other: its release is noise alone. Nothing un-noised leaves this file, unless
`log_nonprivate` asks for it by name.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_private.accounting.events import Event
from hf_private.distributed.fsdp import Shards, run_collectively
from hf_private.distributed.ranks import Ranks
from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.method import Full, Method
from hf_private.gradients.tensors import accumulation_dtype, full_precision

from .clipping import Clipping
from .noise import NoiseSource, reseed_global

Batch = Mapping[str, Any]
PerSampleLossFn = Callable[[nn.Module, Batch], Tensor]


class Mechanism:
    """The Gaussian mechanism on Poisson samples: clip, sum, noise, divide; writes `.grad` and nothing else.

    `per_sample_loss(model, batch)` gives the losses (N,) of a micro-batch. `charge(event)` writes the step to the
    ledger and raises if the budget does not allow it. `ranks` are those of torch's process group by default; a model
    under FSDP2 also needs `dummy()`, a public micro-batch for ranks that have run out of records.

    Guarantee: the release of one step has L2 sensitivity `clipping.clip_norm` with respect to adding or removing one
    record of the sample (each part its own norm, for methods of several parts), and Gaussian noise of
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
        self.model, self.per_sample_loss = model, per_sample_loss
        self.method = method or Full()
        self.clipping, self.noise, self.noise_multiplier = clipping, noise, noise_multiplier
        self.expected_batch_size = expected_batch_size
        self.charge, self.ranks = charge, ranks or Ranks()
        self.shards = Shards(model, self.ranks, dummy)
        self.parameters = self.shards.parameters
        if self.shards.sharded and not self.method.takes_shards:
            raise ValueError(
                f"`method` must work on sharded weights under FSDP2, got {type(self.method).__name__}. Use DDP, or"
                " plain book-keeping or carriers."
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
            reseed_global()  # a dropout mask that can be replayed is a side channel
        with full_precision(next(iter(self.parameters.values())).device):
            sums = run_collectively(self.ranks, self.model, self._clipped_sums, micro_batches)
        self.ranks.all_reduce_({block: sums[block] for block in sums if block not in self.shards.rows})
        stds = self.method.stds(self.noise_multiplier, self.clipping.clip_norm)
        self.noise.add_(self.steps, sums, stds, {b: x for b, x in self.shards.offsets().items() if b in sums})
        for block in sums.values():
            block.div_(self.expected_batch_size)
        for name, gradient in self.method.gradients(sums).items():
            self.parameters[name].grad = self.shards.gradient(name, gradient, whole=name not in sums)
        self.steps += 1

    def _clipped_sums(self, micro_batches: Iterable[Batch]) -> dict[str, Tensor]:
        """Sum of the clipped per-sample gradients by block; zeros where the draw reached nothing."""
        self.method.begin_step(self.steps)
        sums: dict[str, Tensor] = {}
        if self.nonprivate is not None:
            self.nonprivate = {"loss_sum": 0.0, "batch_size": 0, "nonfinite_records": 0}
        with BookKeeper(self.model, self.method) as book:
            for batch, counts in self.shards.micro_batches(micro_batches):
                losses = self.per_sample_loss(self.model, batch)
                book.backward(losses)
                if self.nonprivate is not None and counts:
                    self._note_nonprivate(losses.detach(), book)
                onto = None if self.shards.sharded else sums
                found: Mapping[str, Tensor] = {}
                if counts:
                    found = self.method.clipped_sums(book.pop_entries(), self.clipping, onto)
                else:  # a dummy's gradients are thrown away
                    book.pop_entries()
                for block, value in self.shards.scattered(found, self.method.blocks):
                    if block not in sums:
                        sums[block] = value
                    elif value is not sums[block]:  # else the method has added to it
                        sums[block].add_(value)
        some = next(iter(self.parameters.values()))
        for block, shape in self.method.blocks.items():
            if block not in sums:
                sums[block] = torch.zeros(
                    self.shards.shape(block, shape), dtype=accumulation_dtype(some), device=some.device
                )
        return {block: sums[block] for block in self.method.blocks}  # the same order on every rank

    def _note_nonprivate(self, losses: Tensor, book: BookKeeper) -> None:
        finite = torch.isfinite(losses) & torch.isfinite(book.norms())
        self.nonprivate["loss_sum"] += losses.where(finite, 0).sum().item()
        self.nonprivate["batch_size"] += len(losses)
        self.nonprivate["nonfinite_records"] += int((~finite).sum())
