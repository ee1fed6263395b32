"""The draws are Poisson (a shuffled loader would be caught), pure in (key, counter), and reach training_step whole."""

import copy
import pickle
import random
import time
from itertools import combinations

import datasets
import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.utils import send_to_device
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hf_private.mechanism.sampling import PoissonLoader, PoissonSampler
from hf_private.randomness import Key, Keystream
from hf_private.tasks.micro_batches import LogicalBatch, LogicalCollator, split

KEY = bytes(range(32))


# ---- the law of the draw


def membership(batches: list[np.ndarray], n: int) -> np.ndarray:
    """(steps, n) zero-one matrix of who is in which batch."""
    members = np.zeros((len(batches), n))
    for row, batch in zip(members, batches, strict=True):
        row[batch] = 1
    return members


def poisson_p_values(members: np.ndarray, q: float) -> dict[str, float]:
    """Tests that hold for independent coins with probability q; each p-value is uniform in (0, 1) for those."""
    steps, n = members.shape
    counts = members.sum(0)
    chi_square = ((counts - steps * q) ** 2 / (steps * q * (1 - q))).sum()
    frequency = 2 * min(stats.chi2.cdf(chi_square, n), stats.chi2.sf(chi_square, n))  # too even is wrong, too
    coins = (members - q) / (q * (1 - q)) ** 0.5
    # Each entry has mean 0 and variance 1, and no two are correlated. Their sums are normal, while a single one is too
    # skewed for a test on all entries' distribution: such a test rejects true coins.
    pairs = (coins.T @ coins / steps**0.5)[np.triu_indices(n, 1)]
    neighbours = (coins[:, :-1] * coins[:, 1:]).sum(0) / steps**0.5
    after = (coins[:-1] * coins[1:]).sum(0) / (steps - 1) ** 0.5  # the same record in the next step
    sizes = members.sum(1)
    edges = stats.binom.ppf(np.linspace(0.1, 0.9, 9), n, q)
    observed = np.histogram(sizes, np.concatenate(([-np.inf], edges + 0.5, [np.inf])))[0]
    expected = np.diff(np.concatenate(([0], stats.binom.cdf(edges, n, q), [1]))) * steps
    return {
        "inclusion frequency": frequency,
        **{
            name: 2 * stats.norm.sf(abs(values.sum()) / len(values) ** 0.5)
            for name, values in (("pair correlation", pairs), ("neighbours", neighbours), ("next step", after))
        },
        "batch size": stats.chisquare(observed, expected).pvalue,
    }


def test_draws_are_independent_coins_and_a_shuffled_loader_is_caught():
    n, size, steps = 300, 30, 4000
    sampler = PoissonSampler(n, size, key=KEY)
    poisson = poisson_p_values(membership([sampler.draw(t) for t in range(steps)], n), sampler.sample_rate)
    assert min(poisson.values()) > 0.001, poisson

    rng = np.random.default_rng(0)
    epochs = [rng.permutation(n).reshape(-1, size) for _ in range(steps * size // n)]
    shuffled = poisson_p_values(membership([batch for epoch in epochs for batch in epoch], n), size / n)
    shuffled.pop("neighbours")  # it is there for faults of the gaps; a shuffle couples all pairs alike, and little
    assert max(shuffled.values()) < 1e-6, shuffled

    coupled = membership([np.unique([*sampler.draw(t), *(sampler.draw(t) + 1) % n]) for t in range(steps)], n)
    assert poisson_p_values(coupled, coupled.mean())["neighbours"] < 1e-6

    for wrong in (0.9, 1.1):  # and so is a wrong rate
        off = poisson_p_values(membership([sampler.draw(t) for t in range(steps)], n), wrong * size / n)
        assert off["inclusion frequency"] < 1e-6 and off["batch size"] < 1e-6


@pytest.mark.parametrize("n, size", [(3, 1), (3, 2), (4, 3)])
def test_every_subset_has_its_probability(n, size):
    sampler, steps = PoissonSampler(n, size, key=KEY), 8000
    subsets = [subset for k in range(n + 1) for subset in combinations(range(n), k)]
    counts = dict.fromkeys(subsets, 0)
    for counter in range(steps):
        counts[tuple(sampler.draw(counter).tolist())] += 1
    q = size / n
    expected = [steps * q ** len(s) * (1 - q) ** (n - len(s)) for s in subsets]
    assert stats.chisquare(list(counts.values()), expected).pvalue > 0.001
    wrong = [steps / len(subsets)] * len(subsets)  # control: all subsets alike
    assert stats.chisquare(list(counts.values()), wrong).pvalue < 1e-6


def test_a_small_rate_of_a_large_set_is_met():
    n, steps = 10**8, 200
    sampler = PoissonSampler(n, 1000, key=KEY)
    draws = [sampler.draw(t) for t in range(steps)]
    assert abs(sum(map(len, draws)) - 1000 * steps) < 4 * (1000 * steps) ** 0.5
    places = np.concatenate(draws) / n
    assert stats.kstest(places, "uniform").pvalue > 0.001
    assert stats.kstest(places * 0.99, "uniform").pvalue < 1e-6  # control: the last percent is never reached
    for draw in draws:
        assert draw.dtype == np.int64 and (np.diff(draw) > 0).all() and draw[0] >= 0 and draw[-1] < n


def test_a_draw_takes_milliseconds_whatever_n():
    sampler, best = PoissonSampler(10**8, 1000), float("inf")
    for counter in range(10):
        start = time.process_time()
        sampler.draw(counter)
        best = min(best, time.process_time() - start)
    assert best < 0.02


def test_rate_1_draws_every_record_and_tiny_datasets_work():
    for n in (1, 2, 5):
        assert PoissonSampler(n, n).draw(3).tolist() == list(range(n))
    sizes = [len(PoissonSampler(2, 1, key=KEY).draw(t)) for t in range(200)]
    assert set(sizes) == {0, 1, 2}  # empty batches included
    assert len(PoissonSampler(2, 1)) == 2 and len(PoissonSampler(10, 3)) == 4 and len(PoissonSampler(10, 10)) == 1


def test_the_stream_is_read_on_when_the_first_gaps_do_not_reach_the_end(monkeypatch):
    starts = []

    def ones(self, start, count):  # gap 1 each: everybody is drawn
        starts.append(start)
        return torch.ones(count, dtype=torch.float64)

    monkeypatch.setattr(Keystream, "uniforms", ones)
    assert PoissonSampler(5000, 10).draw(0).tolist() == list(range(5000))
    assert len(starts) > 2 and len(set(starts)) == len(starts)


# ---- pure in (key, counter), each used once


def test_a_draw_is_a_function_of_key_and_counter():
    sampler, again = PoissonSampler(1000, 100, key=KEY), PoissonSampler(1000, 100, key=KEY)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    forward = [sampler.draw(t).tolist() for t in range(20)]
    assert forward == [again.draw(t).tolist() for t in reversed(range(20))][::-1]
    assert len({tuple(draw) for draw in forward}) == 20
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    assert PoissonSampler(1000, 100).draw(0).tolist() != PoissonSampler(1000, 100).draw(0).tolist()
    assert sampler.reproducible and not PoissonSampler(1000, 100).reproducible
    assert not PoissonSampler(1000, 100, key=Key.shared(lambda mine: mine)).reproducible


def test_passes_run_on_and_set_epoch_positions_them():
    sampler = PoissonSampler(100, 30, key=KEY)
    draws = [sampler.draw(t).tolist() for t in range(24)]
    assert list(sampler) == draws[0:4]
    assert list(sampler) == draws[4:8]
    sampler.set_epoch(5)
    assert list(sampler) == draws[20:24]


def test_a_counter_is_used_by_one_pass_only():
    sampler = PoissonSampler(100, 30, key=KEY)
    sampler.set_epoch(0), sampler.set_epoch(0), iter(sampler)  # nothing is drawn yet
    begun = iter(sampler)
    next(begun)
    with pytest.raises(ValueError, match="`epoch`.*got 0"):
        sampler.set_epoch(0)
    assert next(iter(sampler)) == sampler.draw(4).tolist()  # a broken-off pass is not repeated
    assert next(begun) == sampler.draw(1).tolist()  # and may go on


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_partition_the_draw(world_size):
    ranks = [PoissonSampler(500, 40, key=KEY, rank=rank, world_size=world_size) for rank in range(world_size)]
    whole = PoissonSampler(500, 40, key=KEY)
    for counter, shares in enumerate(zip(*ranks, strict=True)):
        together = [index for share in shares for index in share]
        assert sorted(together) == whole.draw(counter).tolist() and len(set(together)) == len(together)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert ranks[0].sample_rate == whole.sample_rate and len(ranks[0]) == len(whole)


def test_a_sampler_cannot_be_saved_or_copied():
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="`(PoissonSampler|Key)`"):
            attempt(PoissonSampler(10, 2))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"expected_batch_size": 11}, r"`expected_batch_size`.*got 11"),
        ({"expected_batch_size": 0}, "`expected_batch_size`.*got 0"),
        ({"expected_batch_size": 2.5}, "`expected_batch_size`.*got 2.5"),
        ({"num_records": 0}, "`num_records`.*got 0"),
        ({"steps_per_epoch": 0}, "`steps_per_epoch`.*got 0"),
        ({"rank": 2, "world_size": 2}, r"`rank`.*got 2"),
        ({"rank": -1}, "`rank`.*got -1"),
        ({"key": b"seed"}, "`key`"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        PoissonSampler(**{"num_records": 10, "expected_batch_size": 2} | change)


# ---- micro-batches


@settings(deadline=None)  # the machine may be busy
@given(
    lengths=st.lists(st.integers(0, 50), max_size=60),
    max_rows=st.integers(1, 9),
    max_tokens=st.none() | st.integers(1, 120),
)
def test_split_takes_every_record_once_and_keeps_the_bounds(lengths, max_rows, max_tokens):
    parts = split(lengths, max_rows, max_tokens)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    flat = [lengths[i] for part in parts for i in part]
    assert flat == sorted(lengths, reverse=True)  # the largest first
    for part, following in zip(parts, [*parts[1:], []], strict=False):
        longest = max(1, *(lengths[i] for i in part))
        assert 1 <= len(part) <= max_rows
        assert len(part) == 1 or max_tokens is None or len(part) * longest <= max_tokens
        if following:  # no part ends early
            assert len(part) == max_rows or (len(part) + 1) * longest > max_tokens


def test_split_is_quick():
    start = time.process_time()
    split(list(range(200_000)), max_rows=1)
    assert time.process_time() - start < 2


def as_is(features):
    return {"rows": features}


@pytest.mark.parametrize(
    "record, tokens",
    [
        ({"input_ids": [1, 2, 3]}, 3),
        ({"input_ids": torch.ones(5, dtype=torch.long), "labels": torch.tensor(1)}, 5),
        ({"input_ids": np.ones(5), "labels": 1}, 5),
        ({"input_ids": [1, 2], "labels": [1, 2, 3, 4, 5, 6]}, 6),  # sequence to sequence
        ({"input_ids": [[1, 2, 3], [1]], "labels": 0}, 6),  # multiple choice, padded
        ({"input_ids": []}, 1),
        ({"pixel_values": torch.ones(3, 8, 8), "labels": [0.0, 1.0]}, 1),
        ((torch.ones(9), 1), 1),
    ],
)
def test_lengths_of_records(record, tokens):
    # n such records fill a micro-batch of n * tokens exactly, and one token less does not hold them
    full = LogicalCollator(as_is, max_rows=100, max_tokens=4 * tokens)([record] * 4)
    assert [len(part["rows"]) for part in full.micro_batches] == [4] and full.size == 4
    tight = LogicalCollator(as_is, max_rows=100, max_tokens=max(1, 4 * tokens - 1))([record] * 4)
    assert [len(part["rows"]) for part in tight.micro_batches] == [3, 1]


def test_rows_are_bounded_where_tokens_would_allow_more():
    assert split([1] * 10, max_rows=4, max_tokens=1000) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_record_longer_than_the_bound_goes_alone():
    records = [{"input_ids": [0] * length} for length in (3, 50, 4, 60)]
    parts = LogicalCollator(as_is, max_rows=8, max_tokens=10)(records).micro_batches
    assert [[len(r["input_ids"]) for r in part["rows"]] for part in parts] == [[60], [50], [4, 3]]


@pytest.mark.parametrize("arguments", [{"max_rows": 0}, {"max_rows": 2, "max_tokens": 0}, {"max_rows": 1.5}])
def test_wrong_bounds_are_refused(arguments):
    with pytest.raises(ValueError, match="`max_rows`|`max_tokens`"):
        LogicalCollator(as_is, **arguments)


# ---- on the way through DataLoader, Accelerate and Trainer


def test_trainer_and_accelerate_find_nothing_in_a_logical_batch():
    batch = LogicalBatch([{"labels": torch.ones(2), "input_ids": torch.ones(2, 3)}], size=2)
    assert send_to_device(batch, torch.device("meta")) is batch
    assert batch.micro_batches[0]["labels"].device.type == "cpu"
    assert "labels" not in batch and "input_ids" not in batch
    for name in ("__len__", "__iter__", "__getitem__", "to", "keys", "items", "pin_memory", "__dict__"):
        assert not hasattr(batch, name)
    assert "2" not in type(batch).__repr__(batch).split(" at ")[0]
    # the control: as a list of micro-batches the whole draw would be moved to the device at once
    assert send_to_device(batch.micro_batches, torch.device("meta"))[0]["labels"].device.type == "meta"


class Records(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"input_ids": [index] * (1 + index % 5)}


def mask(features):
    """A collator that draws, as a masking language model's does."""
    return {"ids": [f["input_ids"] for f in features], "mask": (torch.rand(1), np.random.rand(), random.random())}


def contents(batches):
    return [[part["ids"] for part in batch.micro_batches] for batch in batches]


def loader(**options):
    sampler = PoissonSampler(40, 2, key=KEY)
    return PoissonLoader(Records(), sampler, LogicalCollator(mask, max_rows=2, max_tokens=8), **options)


def test_workers_give_the_same_batches_and_empty_ones_arrive():
    expected = [PoissonSampler(40, 2, key=KEY).draw(t).tolist() for t in range(60)]
    by_epoch = []
    workers = loader(num_workers=2, persistent_workers=True)
    plain = loader()
    for epoch in range(3):
        workers.set_epoch(epoch), plain.set_epoch(epoch)
        batches = list(workers)
        assert contents(batches) == contents(plain)
        by_epoch += batches
    assert [sorted(r[0] for part in c for r in part) for c in contents(by_epoch)] == expected
    assert [batch.size for batch in by_epoch] == [len(draw) for draw in expected]
    assert any(batch.size == 0 and batch.micro_batches == [] for batch in by_epoch)


def test_the_loader_hands_set_epoch_on():
    whole, ahead = loader(), loader()
    epochs = [contents(whole) for _ in range(3)]
    ahead.set_epoch(2)
    assert contents(ahead) == epochs[2] != epochs[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_in_the_middle_of_an_epoch_continues_the_draws(num_workers):
    full = loader()
    epochs = [contents(full) for _ in range(3)]

    resumed = loader(num_workers=num_workers)
    skipping = skip_first_batches(resumed, 7)
    # what Trainer does with it in _run_epoch: the loader is a plain one by now, its sampler wrapped
    assert not hasattr(skipping, "set_epoch")
    skipping.batch_sampler.batch_sampler.set_epoch(1)
    assert contents(skipping) == epochs[1][7:] and len(skipping) == 13
    resumed.set_epoch(2)
    assert contents(resumed) == epochs[2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_collators_and_datasets_draw_what_no_seed_repeats(num_workers):
    class Augmented(Records):
        def __getitem__(self, index):
            return {"input_ids": [index], "drawn": (torch.rand(1).item(), np.random.rand(), random.random())}

    def first_draws():
        random.seed(42), np.random.seed(42), torch.manual_seed(42)
        sampler = PoissonSampler(40, 30, key=KEY)
        batches = list(PoissonLoader(Augmented(), sampler, LogicalCollator(both, 100), num_workers=num_workers))
        return [value for batch in batches for part in batch.micro_batches for value in part]

    def both(features):
        own = torch.rand(1).item(), np.random.rand(), random.random()
        return [value for drawn in (own, *(f["drawn"] for f in features)) for value in drawn]

    one, two = first_draws(), first_draws()
    assert len(one) == len(two) > 50 and not set(one) & set(two)
    assert len(set(one)) == len(one)  # and no two workers share a seed


def test_a_collator_reseeds_by_itself():
    def draws(collator):
        random.seed(42), np.random.seed(42), torch.manual_seed(42)
        return collator([{"input_ids": [1]}])

    assert draws(mask)["mask"] == draws(mask)["mask"]  # the control
    one, two = (draws(LogicalCollator(mask, max_rows=1)).micro_batches[0]["mask"] for _ in range(2))
    assert all(a != b for a, b in zip(one, two, strict=True))


def test_a_collator_can_be_sent_to_a_worker():
    collator = pickle.loads(pickle.dumps(LogicalCollator(as_is, max_rows=3, max_tokens=9)))
    batch = pickle.loads(pickle.dumps(collator([{"input_ids": [1]}])))
    assert batch.micro_batches == [{"rows": [{"input_ids": [1]}]}] and batch.size == 1
    assert collator([]).micro_batches == [] and collator([]).size == 0


def test_a_transform_of_the_dataset_never_sees_two_records():
    """DataLoader asks a `datasets.Dataset` for a whole draw at once, and a transform could let its records meet."""
    seen = []

    def transform(batch):
        seen.append(len(batch["x"]))
        return batch

    records = datasets.Dataset.from_dict({"x": list(range(60))}).with_transform(transform)
    drawn = [len(batch) for batch in PoissonLoader(records, PoissonSampler(60, 20), collate_fn=list)]
    assert sum(drawn) == len(seen) > 3
    assert set(seen) == {1}
