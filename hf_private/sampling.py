"""Poisson draws as a function of (secret key, counter), and their split into micro-batches.

The accountant's amplification by sampling holds for one scheme: at every step each record is in the batch with
probability q, independently of all others and of all other steps. So the batch size is Binomial(n, q), a batch may be
empty, and it still is a step. One DataLoader item is one such logical batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from .keystream import Key, reseed_global
from .validate import whole


class PoissonSampler(Sampler[list[int]]):
    """Batch sampler whose batch number `counter` is a function of (key, counter) alone.

    All ranks make the same draw, and each takes its share of it: a union of separate draws could hold a record twice.
    A pass over the sampler is an epoch of `steps_per_epoch` = ceil(n / B) draws, not a pass over the data.

    Guarantee: within one sampler a counter is used by one pass only. A second `train()` needs a new sampler, with the
    new key that comes with it. Ranks share a `Key.shared(broadcast)`; a key given as bytes is for tests
    (`reproducible` is True, and the run is NOT PRIVATE).

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
        whole(1, num_records=num_records, expected_batch_size=expected_batch_size, world_size=world_size)
        whole(0, rank=rank)
        if expected_batch_size > num_records:
            raise ValueError(
                f"`expected_batch_size` must be at most `num_records` ({num_records}), got {expected_batch_size}. "
                "Lower it; at `num_records` every step takes all records."
            )
        if rank >= world_size:
            raise ValueError(f"`rank` must be below `world_size` ({world_size}), got {rank}.")
        if steps_per_epoch is None:
            steps_per_epoch = -(-num_records // expected_batch_size)
        whole(1, steps_per_epoch=steps_per_epoch)
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
        """Whether somebody else may know the key: a reproducible run is not private."""
        return self._key.reproducible

    def __len__(self) -> int:
        return self._steps_per_epoch

    def draw(self, counter: int) -> np.ndarray:
        """The whole logical batch number `counter`: sorted int64 indices (size,), size ~ Binomial(n, q).

        From one drawn record to the next is a geometric gap, P(gap > k) = (1 - q)^k. Drawing gaps is the same as
        tossing n coins, at a cost of O(q n). Uniforms have 53 bits: q is met to about 1e-16.
        """
        whole(0, counter=counter)
        n, q = self.num_records, self.sample_rate
        if q == 1:
            return np.arange(n)
        stream = self._key.stream("sample", counter)
        # Enough gaps to reach n but for one draw in a billion; then the stream is read on.
        count = 2 * math.ceil((q * n + 6 * math.sqrt(q * n) + 8) / 2)
        drawn, last = [], -1
        while last < n:
            uniforms = stream.uniforms(len(drawn) * count, count).numpy()
            gaps = np.floor(np.log(uniforms) / math.log1p(-q)) + 1
            indices = last + np.cumsum(np.minimum(gaps, n + 1).astype(np.int64))  # a gap beyond n ends the draw anyway
            drawn.append(indices[: np.searchsorted(indices, n)])
            last = indices[-1]
        return np.concatenate(drawn)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be number `epoch`, that is, counters `epoch * len` and up."""
        whole(0, epoch=epoch)
        if epoch < self._first_unused_epoch:
            raise ValueError(
                f"`epoch` must be at least {self._first_unused_epoch}, got {epoch}: its batches have been drawn, "
                "and using a draw for two training steps voids the accounting. Make a new sampler: it draws a new key."
            )
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's share of each draw of the pass. Without `set_epoch`, a pass goes on where the last one ended."""
        # DataLoader may call iter() and throw the result away: the pass begins with the first batch that is asked for.
        epoch = self._epoch
        self._epoch = self._first_unused_epoch = epoch + 1
        reseed_global()  # the dataset's own augmentation runs before any collator could do this
        for counter in range(epoch * len(self), (epoch + 1) * len(self)):
            yield self.draw(counter)[self.rank :: self.world_size].tolist()


class PoissonLoader(DataLoader):
    """DataLoader over a `PoissonSampler` that hands Trainer's `set_epoch` on to it.

    Trainer calls `set_epoch` on the loader, or, after skipping the batches before a checkpoint, on the sampler. Do not
    `accelerator.prepare` it: that would shard the sampler once more, and repeat or drop records.

    >>> loader = PoissonLoader(list(range(100)), PoissonSampler(100, 10), LogicalCollator(sum, max_rows=4))
    >>> loader.set_epoch(3)
    >>> len(list(loader))
    10
    """

    def __init__(
        self,
        dataset: Dataset | Sequence[Any],
        sampler: PoissonSampler,
        collate_fn: Callable[[list[Any]], "LogicalBatch"],
        **options: Any,
    ) -> None:
        # Workers are seeded from torch's global generator, which somebody may know.
        super().__init__(
            dataset, batch_sampler=sampler, collate_fn=collate_fn, worker_init_fn=_reseed_worker, **options
        )

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be number `epoch`."""
        self.batch_sampler.set_epoch(epoch)


def _reseed_worker(worker: int) -> None:
    reseed_global()


class LogicalBatch:
    """One Poisson draw (this rank's share of it) as a list of collated micro-batches, possibly none.

    It is opaque on purpose. Trainer and Accelerate look for keys, lengths and `.to` in a batch, to count, log or move
    its contents; they find nothing here and pass it on to `training_step`. Its size is private: do not log it.

    >>> "labels" in LogicalBatch([{"labels": [1, 2]}], size=2)
    False
    """

    __slots__ = ("micro_batches", "size")

    def __init__(self, micro_batches: list[Any], size: int) -> None:
        self.micro_batches = micro_batches
        self.size = size  # records in all micro-batches together

    def __contains__(self, item: object) -> bool:
        return False


class LogicalCollator:
    """Turns the records of one draw into a `LogicalBatch`, with the user's collator for each micro-batch.

    Args:
        collator: The user's data collator: list of records to one batch.
        max_rows: Most records in a micro-batch.
        max_tokens: Most tokens in a micro-batch after padding (rows x longest). A longer record goes alone.
        rows_of: Names of tensors that must have one row for each record, also where it is alone. Clipping bounds the
            influence of a row: a record in several rows would have several times that, and records in one row would
            not be told apart. If any are named, all tensors of a batch are looked at, and its padding too.

    >>> collator = LogicalCollator(lambda records: [r["input_ids"] for r in records], max_rows=2)
    >>> collator([{"input_ids": [1]}, {"input_ids": [2, 3, 4]}, {"input_ids": [5, 6]}]).micro_batches
    [[[2, 3, 4], [5, 6]], [[1]]]
    """

    def __init__(
        self,
        collator: Callable[[list[Any]], Any],
        max_rows: int,
        max_tokens: int | None = None,
        rows_of: Sequence[str] = (),
    ) -> None:
        whole(1, max_rows=max_rows)
        if max_tokens is not None:
            whole(1, max_tokens=max_tokens)
        self.collator = collator
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.rows_of = tuple(rows_of)

    def __call__(self, features: list[Any]) -> LogicalBatch:
        reseed_global()  # masking collators draw from the global generators
        parts = split([length_of(feature) for feature in features], self.max_rows, self.max_tokens)
        return LogicalBatch([self.collate([features[i] for i in part]) for part in parts], size=len(features))

    def collate(self, records: list[Any]) -> Any:
        """One micro-batch, with one row for each record."""
        batch = self.collator(records)
        if self.rows_of:
            for name, value in batch.items():
                shape = getattr(value, "shape", ())
                if shape and shape[0] != len(records) and (name in self.rows_of or len(records) > 1):
                    raise ValueError(
                        f"`data_collator` must return one row for each record, got {shape[0]} rows of `{name}` for"
                        f" {len(records)} records. Do not pack or split records in it: cut the dataset into records"
                        " that fit, and set `records_per_unit` to the largest number that one person then has. What"
                        " records have different numbers of (images, say) needs `per_device_train_batch_size=1`."
                    )
            refuse_unmarked_padding(records, batch)
        return batch


def refuse_unmarked_padding(records: Sequence[Any], batch: Mapping[str, Any]) -> None:
    """Padding that nothing marks is text to a model, and there is as much of it as the longest neighbour asks for.

    Each record may have got as many tokens more as the longest has (a collator may add an end of text), not more.
    """
    if not all(isinstance(record, Mapping) and "input_ids" in record for record in records):
        return  # tokens are made in the collator: how many belong to a record is not known
    lengths, mask = [_tokens(record["input_ids"]) for record in records], batch.get("attention_mask")
    if len(set(lengths)) <= 1 or "input_ids" not in batch:
        return
    if mask is None:
        raise ValueError(
            "`data_collator` must return an `attention_mask` for records of different lengths, got none: padding would"
            " count as text. Take a collator that pads and masks, such as DataCollatorWithPadding."
        )
    marks = np.asarray(mask).reshape(len(records), -1).astype(bool).sum(1).tolist()
    added = [marked - length for marked, length in zip(marks, lengths, strict=True)]
    most = max(0, added[lengths.index(max(lengths))])
    if max(added) > most:
        raise ValueError(
            f"`attention_mask` must be 0 at padding, got a record of {lengths[added.index(max(added))]} tokens with"
            f" {max(added)} more in its mask: they would count as text. Let the collator mask what it pads."
        )


def split(lengths: Sequence[int], max_rows: int, max_tokens: int | None = None) -> list[list[int]]:
    """Positions of the records by micro-batch, longest first, so that memory runs out at once or never.

    >>> split([3, 9, 4, 2], max_rows=3, max_tokens=8)
    [[1], [2, 0], [3]]
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    parts, first = [], 0
    while first < len(order):
        longest = max(1, lengths[order[first]])
        rows = max_rows if max_tokens is None else min(max_rows, max(1, max_tokens // longest))
        parts.append(order[first : first + rows])
        first += rows
    return parts


def length_of(feature: Any) -> int:
    """Tokens of one record: of its input or of the decoder's labels, whichever is longer; 1 if it has no tokens."""
    if not isinstance(feature, Mapping) or "input_ids" not in feature:
        return 1
    return max(1, _tokens(feature["input_ids"]), _tokens(feature.get("labels")))


def _tokens(ids: Any) -> int:
    """Elements of a sequence, or of a ragged list of sequences once it is padded (multiple choice)."""
    shape = getattr(ids, "shape", None)
    if shape is not None:
        return math.prod(shape)
    if not isinstance(ids, Sequence):
        return 0
    return len(ids) * max(map(_tokens, ids), default=0) if ids and isinstance(ids[0], Sequence) else len(ids)
