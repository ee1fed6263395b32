"""Poisson draws as a function of (secret key, counter), and the loader that reads them.

The accountant's amplification by sampling holds for one scheme: at every step each record is in the batch with
probability q, independently of all other records and steps. So the batch size is Binomial(n, q), and an empty batch is
a step like any other. One DataLoader item is one such logical batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from hf_private._validate import integer_at_least
from hf_private.randomness import Key, reseed_global


class PoissonSampler(Sampler[list[Any]]):
    """Batch sampler whose batch number `counter` is a function of (key, counter) alone.

    All ranks make the same draw, and each takes its share of it: a union of separate draws could contain a record
    twice. A pass over the sampler is an epoch of `steps_per_epoch` = ceil(n / B) draws, not a pass over the data.

    Guarantee: within one sampler only one pass uses a counter. A second `train()` needs a new sampler, which has a new
    key. Ranks share a `Key.shared(broadcast)`; a key given as bytes is for tests (`reproducible` is True, and the run
    is NOT PRIVATE).

    Args:
        num_records: n, treated as public.
        expected_batch_size: B over all ranks, at most n. The draw includes each record with probability q = B / n.
        steps_per_epoch: Length of a pass, ceil(n / B) by default.

    >>> sampler = PoissonSampler(num_records=1000, expected_batch_size=50)
    >>> sampler.sample_rate, len(sampler)
    (0.05, 20)
    >>> bool((sampler.draw(7) == sampler.draw(7)).all())
    True
    """

    def __init__(
        self,
        num_records: int,
        expected_batch_size: int,
        steps_per_epoch: int | None = None,
        key: Key | bytes | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        integer_at_least(1, num_records=num_records, expected_batch_size=expected_batch_size, world_size=world_size)
        integer_at_least(0, rank=rank)
        if expected_batch_size > num_records:
            raise ValueError(
                f"`expected_batch_size` must be at most `num_records` ({num_records}), got {expected_batch_size}. "
                "Lower it; with `num_records` every step uses all records."
            )
        if rank >= world_size:
            raise ValueError(f"`rank` must be below `world_size` ({world_size}), got {rank}.")
        if steps_per_epoch is None:
            steps_per_epoch = -(-num_records // expected_batch_size)
        integer_at_least(1, steps_per_epoch=steps_per_epoch)
        self.num_records = num_records
        self.expected_batch_size = expected_batch_size
        self.sample_rate = expected_batch_size / num_records
        self.rank = rank
        self.world_size = world_size
        self._steps_per_epoch = steps_per_epoch
        self._key = Key.of(key)
        self._epoch = 0  # the next pass
        self._first_unused_epoch = 0

    @property
    def reproducible(self) -> bool:
        """Whether the key may be known to others: a reproducible run is not private."""
        return self._key.reproducible

    def __len__(self) -> int:
        return self._steps_per_epoch

    def draw(self, counter: int) -> np.ndarray:
        """The whole logical batch number `counter`: sorted int64 indices (size,), size ~ Binomial(n, q).

        The gap from one drawn record to the next is geometric, P(gap > k) = (1 - q)^k. Drawing gaps is equivalent to
        n coin tosses, at a cost of O(q n). Uniforms have 53 bits: the error of q is about 1e-16.
        """
        integer_at_least(0, counter=counter)
        n = self.num_records
        q = self.sample_rate
        if q == 1:
            return np.arange(n)
        stream = self._key.stream("sample", counter)
        # Enough gaps to reach n, except in one draw out of a billion, which reads more of the stream.
        count = 2 * math.ceil((q * n + 6 * math.sqrt(q * n) + 8) / 2)
        drawn = []
        last = -1
        while last < n:
            uniforms = stream.uniforms(len(drawn) * count, count).numpy()
            gaps = np.floor(np.log(uniforms) / math.log1p(-q)) + 1
            indices = last + np.cumsum(np.minimum(gaps, n + 1).astype(np.int64))  # a gap beyond n ends the draw anyway
            drawn.append(indices[: np.searchsorted(indices, n)])
            last = indices[-1]
        return np.concatenate(drawn)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the number of the next pass, whose counters start at `epoch * len`."""
        integer_at_least(0, epoch=epoch)
        if epoch < self._first_unused_epoch:
            raise ValueError(
                f"`epoch` must be at least {self._first_unused_epoch}, got {epoch}: its batches were drawn before, and"
                " using a draw for two training steps invalidates the accounting. Make a new sampler, which draws a"
                " new key."
            )
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[Any]]:
        """This rank's part of each draw of the pass. Without `set_epoch`, a pass continues after the last one."""
        # DataLoader may call iter() and discard the result: the pass starts when the first batch is requested.
        epoch = self._epoch
        self._epoch = self._first_unused_epoch = epoch + 1
        reseed_global()  # augmentation inside the dataset runs before any collator
        for counter in range(epoch * len(self), (epoch + 1) * len(self)):
            yield self.share(counter)

    def share(self, counter: int) -> list[Any]:
        """This rank's part of a draw, possibly empty."""
        return self.draw(counter)[self.rank :: self.world_size].tolist()


class OneByOne(Dataset):
    """A dataset that is read one record at a time.

    DataLoader reads the whole draw at once from a dataset with `__getitems__`. A transform of it
    (`Dataset.with_transform`) could then pad or scale a record by its neighbours, unnoticed.
    """

    def __init__(self, records: Dataset | Sequence[Any]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)  # pyrefly: ignore[bad-argument-type]  # torch's Dataset declares no __len__

    def __getitem__(self, index: Any) -> Any:
        return self.records[index]


class PoissonLoader(DataLoader):
    """DataLoader over a `PoissonSampler` that passes Trainer's `set_epoch` on to it.

    Trainer calls `set_epoch` on the loader, or, after skipping the batches before a checkpoint, on the sampler. Do not
    `accelerator.prepare` it: that would shard the sampler a second time, and repeat or drop records.

    >>> loader = PoissonLoader(list(range(100)), PoissonSampler(100, 10), collate_fn=list)
    >>> loader.set_epoch(3)
    >>> len(list(loader)), loader.total_batch_size
    (10, 10)
    """

    def __init__(
        self,
        dataset: Dataset | Sequence[Any],
        sampler: PoissonSampler,
        collate_fn: Callable[[list[Any]], Any],
        **options: Any,
    ) -> None:
        # torch seeds workers from its global generator, whose seed may be known.
        super().__init__(
            OneByOne(dataset), batch_sampler=sampler, collate_fn=collate_fn, worker_init_fn=_reseed_worker, **options
        )

    @property
    def total_batch_size(self) -> int:
        """The expected batch size, by the name that Accelerate's loaders have for it."""
        assert isinstance(self.batch_sampler, PoissonSampler)
        return self.batch_sampler.expected_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the number of the next pass."""
        assert isinstance(self.batch_sampler, PoissonSampler)
        self.batch_sampler.set_epoch(epoch)


def _reseed_worker(worker: int) -> None:
    reseed_global()
