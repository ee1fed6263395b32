"""One private step: clipped, summed, noised once, divided by the expected size, and paid for first."""

import math
import weakref

import pytest
import torch
from scipy import stats

from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.method import Full
from hf_private.gradients.persample import Dense
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from tests.support import oracle, zoo

KEY = bytes(range(32))


def make(model, loss, charged=None, **changes):
    settings = dict(
        clipping=Clipping("flat", 0.1),
        noise=NoiseSource("secure", key=KEY),
        noise_multiplier=1.0,
        sample_rate=0.1,
        expected_batch_size=4,
        charge=([] if charged is None else charged).append,
    )
    return Mechanism(model, loss, **settings | changes)


def split(batch, size):
    total = len(next(iter(batch.values())))
    return [{k: x[i : i + size] for k, x in batch.items()} for i in range(0, total, size)]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_without_noise_the_step_is_the_papers_formula(name):
    model, loss = zoo.build(name)
    model.eval()
    batch = zoo.make_batch(model, 5)
    make(model, loss, noise_multiplier=0.0).step(split(batch, 2))
    per_sample = oracle.per_sample_gradients(model, loss, batch)
    factors = (0.1 / oracle.norms(per_sample)).clamp(max=1)
    for name, wanted in oracle.weighted_sum(per_sample, factors).items():
        torch.testing.assert_close(model.get_parameter(name).grad, wanted / 4, rtol=1e-6, atol=1e-12)


def test_coarse_products_and_autocast_around_a_step_change_nothing():
    """A ghost norm of rounded operands can be far too small; PEFT's notebooks train inside an autocast."""
    model, loss = zoo.build("bert", torch.float32)
    batch, seen = zoo.make_batch(model.eval(), 6), []

    def watched(model, batch):
        places = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
        seen.append(({place.fp32_precision for place in places}, torch.is_autocast_enabled("cpu")))
        return loss(model, batch)

    make(model, watched).step([batch])
    wanted = gradients(model)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            make(model, watched).step([batch])
        assert torch.get_float32_matmul_precision() == "medium", "it is put back"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == [({"ieee"}, False)] * 2
    for name, got in gradients(model).items():
        assert torch.equal(got, wanted[name]), name


def test_each_entry_is_freed_once_it_is_summed_and_sums_grow_in_place():
    alive: weakref.WeakSet = weakref.WeakSet()
    counts = []

    class Watched(Dense):
        def __init__(self, g):
            super().__init__(g)
            alive.add(self)

        def weighted_sum(self, c, into=None):
            counts.append(len(alive))
            return super().weighted_sum(c, into)

    method, sums = Full(), {}
    method.attach({f"{i}.weight": torch.nn.Parameter(torch.zeros(2)) for i in range(4)})
    for _ in range(2):
        entries = {name: Watched(torch.ones(3, 2)) for name in method.parameters}
        before = {name: total.data_ptr() for name, total in sums.items()}
        method.add_clipped_sums(entries, Clipping(clip_norm=math.inf), sums)
        assert not entries and all(sums[name].data_ptr() == address for name, address in before.items())
    assert counts == [4, 3, 2, 1] * 2
    assert all(torch.equal(total, torch.full((2,), 6.0)) for total in sums.values())


@pytest.mark.parametrize("mode", ["flat", "automatic", "per-layer"])
@pytest.mark.parametrize("size", [1, 4])
def test_micro_batches_change_the_speed_only(mode, size):
    """Promise 8: same draw, same noise, same update."""
    model, loss = zoo.build("gpt2", torch.float32)
    model.eval()
    batch = zoo.make_batch(model, 9)
    make(model, loss, clipping=Clipping(mode, 0.1)).step([batch])
    whole = gradients(model)
    make(model, loss, clipping=Clipping(mode, 0.1)).step(split(batch, size))
    for name, g in gradients(model).items():
        torch.testing.assert_close(g, whole[name], rtol=1e-5, atol=1e-7)


def test_an_empty_draw_is_paid_for_and_releases_noise_of_the_right_scale():
    model, loss = zoo.build("bert", torch.float32)
    charged = []
    mechanism, drawn = make(model, loss, charged, noise_multiplier=1.5, noise=NoiseSource()), []
    for _ in range(8):
        mechanism.step([])
        drawn += [g.flatten() for g in gradients(model).values()]
    assert [event.noise_multiplier for event in charged] == [1.5] * 8
    noise = torch.cat(drawn).double()
    std = 1.5 * 0.1 / 4
    assert stats.kstest(noise / std, "norm").pvalue > 1e-4
    for wrong in (0.9, 1.1):  # the control: a wrong scale must be rejected
        assert stats.kstest(noise / std / wrong, "norm").pvalue < 1e-6


def test_noise_is_added_once_whatever_the_number_of_micro_batches():
    model, loss = zoo.build("bert", torch.float32)
    model.eval()
    batch = zoo.make_batch(model, 8)
    make(model, loss, noise_multiplier=0.0).step([batch])
    clean = gradients(model)
    make(model, loss, noise_multiplier=3.0, noise=NoiseSource()).step(split(batch, 1))
    noise = torch.cat([(g - clean[name]).flatten() for name, g in gradients(model).items()]).double()
    assert abs(noise.std().item() / (3.0 * 0.1 / 4) - 1) < 0.03


def test_the_sum_is_divided_by_the_expected_size_not_the_realised_one():
    model, loss = zoo.build("bert")
    model.eval()
    batch = zoo.make_batch(model, 3)
    make(model, loss, noise_multiplier=0.0, expected_batch_size=4).step([batch])
    small = gradients(model)
    make(model, loss, noise_multiplier=0.0, expected_batch_size=8).step([batch])
    for name, g in gradients(model).items():
        torch.testing.assert_close(g * 2, small[name])


@pytest.mark.parametrize("mode", ["flat", "automatic", "per-layer"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_one_record_moves_the_release_by_at_most_the_clip_norm(name, mode):
    """Neighbours: the same batch with one record's factor set to 0, in float32; gradients far above the clip norm."""
    clip_norm = 0.01
    model, loss = zoo.build(name, torch.float32)
    model.eval()
    method, clipping = Full(), Clipping(mode, clip_norm, gamma=1e-6)
    method.attach(dict(model.named_parameters()))
    with BookKeeper(model, method) as book:
        book.backward(loss(model, zoo.make_batch(model, 4)))
        assert (book.norms() > clip_norm).all()
        whole: dict[str, torch.Tensor] = {}
        method.add_clipped_sums(dict(book.entries()), clipping, whole)

        class Without:
            def factors(self, sq_norms, blocks):
                kept = clipping.factors(sq_norms, blocks)
                return {block: c * torch.tensor([1.0, 1.0, 0.0, 1.0]) for block, c in kept.items()}

        rest: dict[str, torch.Tensor] = {}
        method.add_clipped_sums(dict(book.entries()), Without(), rest)
    moved = torch.cat([(whole[b] - rest[b]).flatten() for b in whole]).double().norm()
    assert moved <= clip_norm * (1 + 1e-4)
    assert moved >= clip_norm * 0.9, "the bound would hold for a mechanism that clips far too much"


def test_a_step_that_is_not_paid_for_computes_and_releases_nothing():
    model, loss = zoo.build("bert", torch.float32)
    calls = []

    def refuse(event):
        raise RuntimeError("budget")

    mechanism = make(model, lambda *a: calls.append(a), charge=refuse)
    with pytest.raises(RuntimeError, match="budget"):
        mechanism.step([zoo.make_batch(model, 2)])
    assert not calls and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", ["flat", "per-layer"])
def test_a_nan_record_does_not_reach_the_release(mode):
    model, loss = zoo.build("bert", torch.float32)
    model.eval()
    batch = zoo.make_batch(model, 3)

    def poisoned(model, batch):
        return loss(model, batch) * torch.tensor([1.0, float("nan"), 1.0])

    make(model, poisoned, clipping=Clipping(mode, 0.1)).step([batch])
    got = gradients(model)
    make(model, loss, clipping=Clipping(mode, 0.1)).step([{k: x[[0, 2]] for k, x in batch.items()}])
    for name, g in gradients(model).items():
        torch.testing.assert_close(g, got[name], rtol=1e-5, atol=1e-7)


def test_unreached_parameters_are_noised_too():
    model, loss = zoo.build("bert", torch.float32)
    model.unused = torch.nn.Linear(50, 40)
    make(model, loss).step([zoo.make_batch(model, 2)])
    assert model.unused.weight.grad.std() > 0


def test_bf16_models_get_bf16_gradients_from_a_wide_sum():
    model, loss = zoo.build("bert", torch.bfloat16)
    make(model, loss).step([zoo.make_batch(model, 2)])
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())


def test_nothing_unnoised_is_kept_unless_asked_for_by_name():
    model, loss = zoo.build("bert", torch.float32)
    batch = zoo.make_batch(model, 3)
    mechanism = make(model, loss)
    mechanism.step([batch])
    assert mechanism.nonprivate is None
    asked = make(model, loss, log_nonprivate=True)
    asked.step(split(batch, 2))
    assert asked.nonprivate["batch_size"] == 3 and asked.nonprivate["loss_sum"] > 0


def test_dropout_masks_cannot_be_replayed_from_a_seed():
    model, loss = zoo.build("bert", torch.float32)
    model.train()
    batch = zoo.make_batch(model, 3)
    released = []
    for _ in range(2):
        torch.manual_seed(42)
        make(model, loss, noise_multiplier=0.0, noise=NoiseSource()).step([batch])
        released.append(torch.cat([g.flatten() for g in gradients(model).values()]))
    assert not torch.allclose(*released)
