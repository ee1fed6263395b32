"""The noise has the right law, belongs to (key, step, name, element), and cannot be replayed.

The statistical tests use fixed keys, so they either always pass or always fail; each has a control that must fail.
"""

import copy
import pickle
import random

import numpy as np
import pytest
import torch
from scipy import stats

from hf_private.mechanism import noise as noise_room
from hf_private.mechanism.noise import NOISE_KINDS, NoiseSource
from hf_private.randomness import Key, Keystream

KEY = bytes(range(32))
both_kinds = pytest.mark.parametrize("kind", NOISE_KINDS)


def draw(shape=(4096,), std=1.0, step=0, name="w", kind="secure", key=KEY, dtype=torch.float64, offset=0):
    total = torch.zeros(shape, dtype=dtype)
    NoiseSource(kind, key).add_(step, {name: total}, {name: std}, {name: offset})
    return total


def looks_normal(sample: torch.Tensor, std: float) -> bool:
    return stats.kstest(sample.double().flatten().numpy(), stats.norm(0, std).cdf).pvalue > 0.001


# ---- the law


@both_kinds
@pytest.mark.parametrize("std", [1e-3, 1.0, 37.5])
def test_noise_is_gaussian_at_its_scale_and_at_no_other(kind, std):
    sample = draw((200, 500), std, kind=kind, dtype=torch.float32)
    assert looks_normal(sample, std)
    assert not looks_normal(sample, 0.9 * std)
    assert not looks_normal(sample, 1.1 * std)
    for wrong in (0.9 * std, 1.1 * std):
        assert not looks_normal(draw((200, 500), wrong, kind=kind), std)


@both_kinds
def test_both_halves_of_box_muller_are_gaussian_and_unrelated(kind):
    groups = draw((1024 * 128,), kind=kind).view(-1, 2, 64)
    cosines, sines = groups[:, 0].flatten(), groups[:, 1].flatten()
    assert looks_normal(cosines, 1.0) and looks_normal(sines, 1.0)
    for one, other in ((cosines, sines), (cosines**2, sines**2)):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / len(cosines) ** 0.5


def test_the_tails_are_there():
    sample = draw((2_000_000,)).numpy()
    assert abs(np.mean(sample**4) - 3) < 4 * (96 / len(sample)) ** 0.5
    assert abs(np.mean(sample**6) - 15) < 4 * (10170 / len(sample)) ** 0.5
    for threshold in (3.0, 3.5, 4.0):
        for tail in (sample > threshold, sample < -threshold):
            expected = len(sample) * stats.norm.sf(threshold)
            assert abs(tail.sum() - expected) < 4 * expected**0.5
            assert not abs(tail.sum() - len(sample) * stats.norm.sf(threshold / 0.9)) < 4 * expected**0.5  # control


def test_the_smallest_uniform_reaches_8_sigma(monkeypatch):
    monkeypatch.setattr(Keystream, "words", lambda self, start, count: torch.zeros(count, dtype=torch.int64))
    assert draw((128,)).max().item() == pytest.approx((2 * 53 * np.log(2)) ** 0.5)  # 8.57, and not infinite


def test_fast_normals_reach_8_sigma(monkeypatch):
    """One float32 normal ends at 5.8: a sum beyond it would show the record that pushed it there."""
    end = (2 * 24 * np.log(2)) ** 0.5
    monkeypatch.setattr(torch.Tensor, "normal_", lambda self, generator: self.fill_(end))
    assert draw((128,), kind="fast").max().item() == pytest.approx(2**0.5 * end)


@both_kinds
def test_neighbouring_elements_are_independent(kind):
    sample = draw((400_000,), kind=kind).numpy()
    for lag in (1, 2, 63, 64, 65, 128, 16384):
        assert abs(np.corrcoef(sample[:-lag], sample[lag:])[0, 1]) < 4.5 / len(sample) ** 0.5


@both_kinds
def test_steps_names_and_keys_are_independent(kind):
    base = draw((100_000,), kind=kind)
    others = [draw((100_000,), kind=kind, **change) for change in ({"step": 1}, {"name": "v"}, {"key": bytes(32)})]
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / 100_000**0.5
        assert looks_normal((base - other) / 2**0.5, 1.0)
    assert not looks_normal((base - draw((100_000,), kind=kind)) / 2**0.5, 1.0)  # control: the same noise again


@both_kinds
def test_the_float64_sum_is_rounded_once(kind):
    start = torch.linspace(-3, 3, 5000)
    total = start.clone()
    NoiseSource(kind, KEY).add_(0, {"w": total}, {"w": 0.5})
    assert torch.equal(total, (start.double() + draw((5000,), 0.5, kind=kind)).float())
    # the control: rounding the noise first, as `total += noise.float()` would
    assert not torch.equal(total, start + draw((5000,), 0.5, kind=kind).float())


def test_float32_sum_is_made_in_float64():
    start = torch.full((5000,), 1e4)
    total = start.clone()
    NoiseSource(key=KEY).add_(0, {"w": total}, {"w": 1e-3})
    exact = start.double() + draw((5000,), 1e-3)
    assert torch.equal(total, exact.float())
    assert not torch.equal(total.double(), exact)


# ---- a function of (key, step, name, element)


@both_kinds
def test_the_same_key_step_and_name_give_the_same_noise_beside_other_tensors(kind):
    alone = draw((300, 7), kind=kind, step=5)
    sums = {"other": torch.zeros(1000), "w": torch.zeros(300, 7, dtype=torch.float64)}
    source = NoiseSource(kind, KEY)
    source.add_(2, sums, {"other": 1.0, "w": 0.0})
    source.add_(5, sums, {"other": 1.0, "w": 1.0})
    assert torch.equal(sums["w"], alone)


@both_kinds
@pytest.mark.parametrize("cuts", [[1], [127], [128, 129], [1, 2, 3, 66], [16383, 16385], [40_001], [131_071, 131_073]])
def test_a_shard_draws_its_slice_of_the_full_noise(kind, cuts):
    full = draw((140_003,), kind=kind)
    ends = [0, *cuts, 140_003]
    shards = [draw((b - a,), kind=kind, offset=a) for a, b in zip(ends, ends[1:], strict=False)]
    assert torch.equal(torch.cat(shards), full)  # to the last bit


def test_random_slices_are_exact():
    full = draw((3000,))
    for _ in range(300):
        start, end = sorted(random.sample(range(3001), 2))
        assert torch.equal(draw((end - start,), offset=start), full[start:end])


def test_offsets_far_out_do_not_wrap():
    far = draw((10,), offset=2**40 + 3)
    assert torch.equal(far[5:], draw((5,), offset=2**40 + 8))
    assert not torch.equal(far, draw((10,), offset=3)) and not torch.equal(far, draw((10,), offset=2**32 + 3))


@both_kinds
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t().contiguous().t(),
        lambda t: torch.stack((t, t), dim=-1)[..., 0],
        lambda t: torch.cat((t, t), dim=1)[:, : t.shape[1]],
    ],
    ids=["contiguous", "transposed", "strided", "column block"],
)
@pytest.mark.parametrize("shape", [(30, 50), (3, 90_001), (90_001, 3), (1, 300_000)])
def test_strides_do_not_matter(kind, view, shape):
    total = view(torch.ones(shape, dtype=torch.float64))
    neighbours = total.untyped_storage().nbytes() // 8 - total.numel()
    NoiseSource(kind, KEY).add_(0, {"w": total}, {"w": 2.0})
    assert torch.equal(total, 1 + draw(shape, 2.0, kind=kind))
    whole_storage = torch.tensor(total.untyped_storage(), dtype=torch.uint8).view(torch.float64)
    assert (whole_storage == 1).sum() == neighbours  # what lies between the elements is untouched


def test_many_dimensions_and_scalars():
    shape = (2, 3, 70_000, 2)
    total = torch.zeros(2, 70_000, 3, 2, dtype=torch.float64).transpose(1, 2)
    source = NoiseSource(key=KEY)
    source.add_(0, {"w": total}, {"w": 1.0})
    assert torch.equal(total, draw(shape)) and source.drawn == total.numel()
    assert draw(()).item() == draw((1,)).item() != 0


@both_kinds
def test_temporaries_are_small(kind, monkeypatch):
    sizes = []
    name = f"_{kind}_normals"
    original = getattr(noise_room, name)

    def spied(stream, start, count):  # a number, or a tensor of as many elements
        sizes.append(count if kind == "secure" else count.numel())
        return original(stream, start, count)

    monkeypatch.setattr(noise_room, name, spied)
    total = torch.zeros(1_000_000, 1).expand(-1, 1)[::2]
    NoiseSource(kind, KEY).add_(0, {"w": total, "v": torch.zeros(700, 700)}, {"w": 1.0, "v": 1.0})
    assert sum(sizes) == 500_000 + 490_000 and max(sizes) <= 1 << 17


def test_fast_generators_have_more_than_32_bits():
    stream = Key(KEY).stream("noise", 0, "w")
    generators = [noise_room._generator(stream, chunk, torch.device("cpu")) for chunk in range(3)]
    states = [generator.get_state()[noise_room._MT19937_WORDS].view(torch.int64) for generator in generators]
    assert all(len(state.unique()) > 600 and state.max() < 2**32 for state in states)
    values = [torch.randn(100, generator=generator) for generator in generators]
    assert not torch.equal(values[0], values[1]) and not torch.equal(values[1], values[2])
    # the words are really used: a generator with the same seed and without them gives something else
    words = stream.words(0, 624)
    assert not torch.equal(values[0], torch.randn(100, generator=torch.Generator().manual_seed(int(words[0]))))


# ---- every element, every block, counted


@both_kinds
def test_rows_without_a_gradient_are_noised_and_all_elements_are_counted(kind):
    embedding = torch.zeros(1000, 16)
    embedding[3] = 1.0
    source = NoiseSource(kind)
    sums = {"embedding": embedding, "bias": torch.zeros(17), "still": torch.ones(5), "none": torch.zeros(0, 4)}
    source.add_(0, sums, {"embedding": 1.0, "bias": 1.0, "still": 0.0, "none": 1.0})
    assert (embedding != 0).all() and (sums["bias"] != 0).all()
    assert torch.equal(sums["still"], torch.ones(5))
    assert source.drawn == 16_000 + 17
    source.add_(1, {"bias": sums["bias"]}, {"bias": 1.0})
    assert source.drawn == 17


def test_an_empty_step_is_a_step():
    source = NoiseSource()
    source.add_(0, {}, {})
    assert source.drawn == 0
    with pytest.raises(ValueError, match="`step`"):
        source.add_(0, {}, {})


def test_leaf_parameters_may_be_noised():
    parameter = torch.nn.Parameter(torch.zeros(10))
    NoiseSource().add_(0, {"w": parameter}, {"w": 1.0})
    assert (parameter != 0).all() and parameter.grad_fn is None


# ---- nobody can replay it


@both_kinds
def test_two_sources_differ_whatever_the_global_seed(kind):
    samples = []
    for _ in range(2):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        source = NoiseSource(kind)
        assert not source.reproducible
        sums = {"w": torch.zeros(100)}
        source.add_(0, sums, {"w": 1.0})
        samples.append(sums["w"])
    assert not (samples[0] == samples[1]).any()


@both_kinds
def test_global_generators_are_not_touched(kind):
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    draw((1000,), kind=kind, key=None)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all() and random.getstate() == before[2]


def test_a_given_key_is_called_reproducible_and_a_shared_one_is_not():
    assert NoiseSource(key=KEY).reproducible
    assert not NoiseSource(key=Key.shared(lambda mine: mine)).reproducible


def test_a_source_cannot_be_saved_or_copied():
    source = NoiseSource(key=KEY)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="`NoiseSource`"):
            attempt(source)
    assert str(KEY) not in repr(vars(source))


def test_a_step_is_used_once_and_steps_increase():
    source = NoiseSource()
    sums = {"w": torch.zeros(3)}
    source.add_(4, sums, {"w": 1.0})
    kept = sums["w"].clone()
    for step in (4, 3, 0):
        with pytest.raises(ValueError, match=f"`step`.*got {step}"):
            source.add_(step, sums, {"w": 1.0})
    assert torch.equal(sums["w"], kept)
    source.add_(9, sums, {"w": 1.0})


# ---- refusals, before anything is drawn


@pytest.mark.parametrize(
    "change, message",
    [
        ({"stds": {"a": 1.0, "b": float("nan")}}, r"`stds\['b'\]`.*got nan"),
        ({"stds": {"a": 1.0, "b": float("inf")}}, r"`stds\['b'\]`.*got inf"),
        ({"stds": {"a": 1.0, "b": -0.5}}, r"`stds\['b'\]`.*got -0.5"),
        ({"stds": {"a": 1.0}}, r"mismatch at \['b'\]"),
        ({"stds": {"a": 1.0, "b": 1.0, "c": 1.0}}, r"mismatch at \['c'\]"),
        ({"offsets": {"d": 0}}, r"mismatch at \['d'\]"),
        ({"offsets": {"b": -1}}, r"`offsets\['b'\]`.*got -1"),
        ({"sums": {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float16)}}, r"`sums\['b'\]` .*float16"),
        ({"sums": {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.bfloat16)}}, r"`sums\['b'\]` .*bfloat16"),
        ({"sums": {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int64)}}, r"`sums\['b'\]` .*int64"),
        ({"step": -1}, "`step`.*got -1"),
        ({"step": 1.0}, "`step`.*got 1.0"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_draw(change, message):
    right = {"step": 0, "sums": {"a": torch.zeros(2), "b": torch.zeros(2)}, "stds": {"a": 1.0, "b": 1.0}}
    arguments = right | change
    source = NoiseSource()
    with pytest.raises(ValueError, match=message):
        source.add_(**arguments)
    assert not any(total.any() for total in arguments["sums"].values())
    source.add_(**right)  # and the step was not used up


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="`kind`.*got 'slow'"):
        NoiseSource("slow")
