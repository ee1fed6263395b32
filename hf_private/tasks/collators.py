"""Tests a data collator: does a record's row depend on the other records of its batch?

Clipping bounds what a row contributes, so a row must be a function of one record. MixUp, statistics of a batch and
truncation to the shortest record break that, and so does padding that no mask marks, because the longest record of the
batch decides how much of it there is. `check_collator` replaces the neighbours of a record and compares its row.

The test runs on made-up records with the schema of the dataset, so its outcome says nothing about the data. A collator
that fails on those (one that looks up files or ids, say) is tested on a few records of the dataset instead. Nothing
about them leaves the test but the name of a field and one bit: a refusal. The data holder sees it before anything is
charged or released.
"""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .heads import IGNORE_INDEX
from .losses import LABEL_NAMES
from .made_up import UnknownSchemaError, ranges_of, sample, schema_of
from .micro_batches import CollatorError

Batch = Mapping[str, Any]
Collate = Callable[[list[Any]], Batch]

TURNS = 3  # records that are looked at
SEEDS = 32  # a collator that mixes records in one batch of five is caught all but once in a thousand times
LEVELS = (0.05, 0.5, 0.95)  # constants that stand for random numbers
LENGTH, SHORTER, LONGER = 7, (3, 5, 6), (12, 9, 7)
REMEDY = "Do it for each record by itself, in the dataset, or set `per_device_train_batch_size=1`."


class HeldRandomness(TorchDispatchMode):
    """Replaces torch's random numbers by a constant level in (0, 1), so that a longer batch draws the same ones."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self.level = level

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        drawn = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(drawn, Tensor):
            return drawn
        name = func.overloadpacket.__name__
        if name in ("bernoulli", "bernoulli_"):
            p = args[1] if len(args) > 1 and args[1] is not None else args[0]
            return drawn.copy_(torch.as_tensor(p) > self.level)
        if name == "randperm":
            order = torch.arange(len(drawn))
            return drawn.copy_(order if self.level < 0.5 else order.flip(0))
        if drawn.is_floating_point():
            return drawn.fill_(self.level)
        return drawn.fill_(1 if name == "randint" else int(self.level > 0.5))


@contextmanager
def _generators_restored() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def check_collator(collate: Collate, dataset: Any, model: nn.Module) -> None:
    """Refuse a collator in whose batches a record's row depends on its neighbours, beyond padding that is marked.

    `collate` turns a list of records into a batch. Raises `CollatorError` with the name of the field and a remedy.

    >>> batch_statistics = lambda records: {"x": (x := torch.stack(records)) - x.mean(0)}
    >>> check_collator(batch_statistics, torch.randn(20, 3), nn.Linear(3, 2))
    Traceback (most recent call last):
        ...
    hf_private.tasks.micro_batches.CollatorError: `data_collator` must keep records independent...
    """
    if len(dataset) < 2:
        return
    with _generators_restored():
        one, equal, varied = _records(collate, dataset, model)
        for turn, (record, neighbours) in enumerate(_turns(one, equal)):
            try:
                trial = _Trial(collate, record, neighbours, varied)
                trial.check_equal_lengths(range(turn, SEEDS, TURNS))
                trial.check_lengths()
            except CollatorError:
                raise
            except Exception as error:  # its text may quote a record
                raise CollatorError(
                    f"`data_collator` must turn any number of records into a batch, got {type(error).__name__} for"
                    " some. Call it on two of your records to see the error."
                ) from None


def _turns(one: list[Any], equal: list[list[Any]]) -> Iterator[tuple[list[Any], list[list[Any]]]]:
    """Three records in turn, each with two groups of neighbours: nothing happens to the record that has the largest
    number, if a collator spreads that."""
    yield one, equal
    for group in range(len(equal)):
        swapped = [[*one, *others[1:]] if n == group else others for n, others in enumerate(equal)]
        yield equal[group][:1], swapped


def _records(collate: Collate, dataset: Any, model: nn.Module) -> tuple[list[Any], list[list[Any]], list[list[Any]]]:
    """A record, two groups of neighbours of its length, and two groups of other lengths."""
    known = sample(dataset)
    try:
        make, generator = schema_of(known, ranges_of(model)), torch.Generator().manual_seed(0)
        one, *others = (make(LENGTH, generator) for _ in range(7))
        varied = [[make(length, generator) for length in lengths] for lengths in (SHORTER, LONGER)]
        equal = [others[:3], others[3:]]
        collate(copy.deepcopy([one, *equal[0]]))
    except CollatorError:
        raise
    except UnknownSchemaError:
        pass
    except Exception:  # a collator may raise anything for unknown content
        pass
    else:
        return [one], equal, varied
    first, *rest = known
    groups = [rest[:3], rest[-3:]]
    try:
        collate(copy.deepcopy([first, *groups[0]]))
    except CollatorError:
        raise
    except Exception as error:
        fields = sorted(map(str, first)) if isinstance(first, Mapping) else type(first).__name__
        hint = ""
        if isinstance(first, Mapping) and "input_ids" not in first:
            hint = " The records hold no `input_ids`: tokenize the dataset (`dataset.map(tokenizer, ...)`) first."
        # the error's own text may quote a record
        raise CollatorError(
            f"`data_collator` must turn records into a batch, got {type(error).__name__} for records with the fields"
            f" {fields}.{hint} Call it on two of your records to see the error."
        ) from None
    return [first], groups, groups


class _Trial:
    """One collator and the records that it is tried on."""

    def __init__(self, collate: Collate, one: list[Any], equal: list[list[Any]], varied: list[list[Any]]) -> None:
        self.collate = collate
        self.one = one
        self.equal = equal
        self.varied = varied
        self._copied = False
        batch = [*one, *equal[0]]
        if not _same(self._run(batch), self._run(batch)):  # it has a generator or a counter of its own
            self._copied = True
            if not _same(self._run(batch), self._run(batch)):
                raise CollatorError(
                    "`data_collator` must give the same batch for the same records and seeds, got different ones, so"
                    " it cannot be tested. Draw from the global generators of random, numpy or torch."
                )

    def _run(self, records: Sequence[Any], seed: int = 0, level: float | None = None) -> Batch:
        for seeded in (random.seed, np.random.seed, torch.manual_seed):
            seeded(seed)
        collate = copy.deepcopy(self.collate) if self._copied else self.collate
        copies = copy.deepcopy(list(records))  # some collators take fields out of the records
        if level is None:
            return collate(copies)
        with HeldRandomness(level):
            return collate(copies)

    def check_equal_lengths(self, seeds: Sequence[int]) -> None:
        """Replace the neighbours by others of the same length, under equal seeds."""
        batch = [*self.one, *self.equal[0]]
        random_fields = _differing(self._run(batch), [self._run(batch, seed) for seed in range(1, 4)])
        for seed in seeds if random_fields else seeds[:2]:
            first, second = (self._run([*self.one, *others], seed) for others in self.equal)
            if _shapes(first) == _shapes(second):
                _compare(first, second, 0, 0, frozenset())

    def check_lengths(self) -> None:
        """Replace the neighbours by shorter and longer ones, and change their number, with the randomness held."""
        shorter, longer = self.varied
        try:
            self._run([*self.one, *longer])
        except CollatorError:
            raise
        except Exception:  # it does not pad: records of different lengths fail, visibly
            shorter, longer = self.equal
        for level in LEVELS:
            batch = [*self.one, *longer]
            loose = _differing(self._run(batch, 0, level), [self._run(batch, seed, level) for seed in (1, 2)])
            _compare(self._run([*self.one, *shorter], 0, level), self._run(batch, 0, level), 0, 0, loose)
            last = len(batch) - 1
            before = self._run([*shorter, *self.one], 0, level), self._run([*longer, *self.one], 0, level)
            _compare(*before, last, last, loose)
            _compare(self._run([*self.one, longer[0]], 0, level), self._run(batch, 0, level), 0, 0, loose)


def _compare(first: Batch, second: Batch, row: int, other: int, loose: frozenset[str]) -> None:
    """Compare a record's row in two batches. `loose` fields are random in themselves: only their padding counts."""
    if first.keys() != second.keys():
        _refuse(sorted({*first} ^ {*second})[0], "appears or disappears with the other records of the batch")
    grown: dict[str, list[Tensor]] = {}
    for name in first:
        a, b = _row(first, name, row), _row(second, name, other)
        if a is None or b is None or a.ndim != b.ndim:
            if not _equal(first[name], second[name]):
                _refuse(name, "changes with the other records of the batch, and has no row for each record")
            continue
        box = tuple(slice(min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
        if name not in loose and not _equal(a[box], b[box]):
            _refuse(
                name,
                "of a record changes when the other records of its batch are replaced, as with MixUp, statistics of a"
                " batch or left padding",
            )
        if a.shape != b.shape:
            grown[name] = [_outside(x, box) for x in (a, b)]
    _check_padding(grown)


def _check_padding(grown: dict[str, list[Tensor]]) -> None:
    """Check that values which a longer neighbour adds to a row are marked as padding: mask 0, labels -100."""
    marks = {name for name in grown if _is_mask(name)}
    for name, parts in grown.items():
        values = torch.cat([part.double() for part in parts])
        if name in LABEL_NAMES:
            if bool((values != IGNORE_INDEX).any()):
                _refuse(name, f"of a record grows beside a longer one with labels other than {IGNORE_INDEX}")
        elif name in marks:
            if bool((values != 0).any()):
                _refuse(
                    name,
                    "of a record is not 0 in places that it has only beside some neighbours: padding is not marked, or"
                    " records are cut to the length of the shortest",
                )
        else:
            decodes = name.startswith("decoder_")
            fitting = {mark for mark in marks if mark.startswith("decoder_") == decodes}
            if decodes and "labels" in grown:
                fitting.add("labels")
            if not fitting:
                _refuse(
                    name,
                    "of a record grows beside a longer one and no mask marks the padding. Return an `attention_mask`"
                    " that is 0 there",
                )


def _is_mask(name: str) -> bool:
    return name.endswith("mask") and name != "special_tokens_mask"


def _refuse(name: str, what: str) -> None:
    raise CollatorError(f"`data_collator` must keep records independent, but `{name}` {what}. {REMEDY}")


def _row(batch: Batch, name: str, row: int) -> Tensor | None:
    """One row of a field as a tensor; None if the field has no rows of numbers."""
    value = batch[name]
    if not isinstance(value, (Tensor, np.ndarray, list)) or len(np.shape(value)) == 0 or len(value) <= row:
        return None
    try:
        return torch.as_tensor(np.asarray(value[row]))
    except (TypeError, ValueError):
        return None


def _outside(x: Tensor, box: tuple[slice, ...]) -> Tensor:
    """The elements of `x` outside a box."""
    outside = torch.ones(x.shape, dtype=torch.bool)
    outside[box] = False
    return x[outside]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, (Tensor, np.ndarray)) and isinstance(b, (Tensor, np.ndarray)):
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.is_floating_point():
            return torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
        return torch.equal(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and bool(a == b)


def _same(first: Batch, second: Batch) -> bool:
    return first.keys() == second.keys() and all(_equal(first[name], second[name]) for name in first)


def _differing(batch: Batch, others: list[Batch]) -> frozenset[str]:
    """Names of fields that are not the same in all of these batches."""
    return frozenset(name for name in batch for other in others if not _equal(batch[name], other.get(name)))


def _shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in batch.items() if hasattr(value, "shape")}
