"""Noise that background threads compute ahead is the noise; a thread that fails fails the step."""

import threading
import time

import pytest
import torch

from hf_private.mechanism import noise as module
from hf_private.mechanism.ahead import Ahead, free_threads
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism

KEY = bytes(range(32))
STDS = {"large": 0.5, "small": 2.0, "none": 0.0, "turned": 1.0, "shard": 1.5}
OFFSETS = {"shard": 12345}
CPU = torch.device("cpu")


def blocks():
    """Several pieces, one, none, one with strides, and a part of a tensor."""
    return {
        "large": torch.zeros(3, 70001),
        "small": torch.zeros(7),
        "none": torch.zeros(5),
        "turned": torch.zeros(40, 50).t(),
        "shard": torch.zeros(1000),
    }


def noised(monkeypatch, threads, steps=(0, 1)):
    """The sums of two steps, with noise by this many threads; -1 does not begin at all."""
    monkeypatch.setattr(module, "free_threads", lambda device: threads)
    source, found = NoiseSource(key=KEY), []
    for step in steps:
        sums = blocks()
        with source:
            if threads >= 0:
                source.begin(step, {name: x.numel() for name, x in sums.items()}, STDS, CPU, OFFSETS)
            source.add_(step, sums, STDS, OFFSETS)
        found.append(sums)
    return found


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_noise_is_the_same_to_the_bit_whoever_computes_it(monkeypatch, threads):
    monkeypatch.setattr(module, "_AHEAD", 3 * module._CHUNK)
    for mine, plain in zip(noised(monkeypatch, threads), noised(monkeypatch, -1), strict=True):
        assert all(torch.equal(mine[name], plain[name]) for name in STDS)
        assert not mine["none"].any() and mine["turned"].all()


def test_the_threads_do_the_work(monkeypatch):
    seen, compute = [], module._secure_normals

    def spied(*args):
        seen.append(threading.current_thread().name)
        return compute(*args)

    monkeypatch.setattr(module, "_secure_normals", spied)
    monkeypatch.setattr(module, "free_threads", lambda device: 1)
    source, sums = NoiseSource(key=KEY), blocks()
    with source:
        source.begin(0, {name: x.numel() for name, x in sums.items()}, STDS, CPU, OFFSETS)
        while len(seen) < 4:
            time.sleep(0.001)
        source.add_(0, sums, STDS, OFFSETS)
    assert sum(name.startswith("noise") for name in seen) >= 4
    assert len(seen) == 5  # each piece once: two of `large`, one of the other three


class Failure(Exception):
    pass


def mechanism(charge=lambda event: None):
    model = torch.nn.Linear(3, 2)
    return Mechanism(
        model,
        lambda model, batch: model(batch["x"]).square().sum(1),
        clipping=Clipping(clip_norm=1.0),
        noise=NoiseSource(),
        noise_multiplier=1.0,
        sample_rate=0.1,
        expected_batch_size=4.0,
        charge=charge,
    )


@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt, MemoryError])
def test_a_failing_thread_fails_the_step_and_nothing_is_released(monkeypatch, error):
    def fails(*args):
        if threading.current_thread().name.startswith("noise"):
            raise error
        time.sleep(0.2)  # so that the threads take the rest
        return module.torch.zeros(args[2], dtype=torch.float64)

    private = mechanism()
    monkeypatch.setattr(module, "_secure_normals", fails)
    monkeypatch.setattr(module, "free_threads", lambda device: 2)

    def batches():
        yield {"x": torch.randn(4, 3)}
        time.sleep(0.1)  # the threads run

    with pytest.raises(error):
        private.step(batches())
    assert all(p.grad is None for p in private.parameters.values())
    assert private.steps == 0


def test_an_interrupted_step_leaves_no_thread_and_no_noise(monkeypatch):
    monkeypatch.setattr(module, "free_threads", lambda device: 2)
    private = mechanism()

    def interrupted():
        yield {"x": torch.randn(4, 3)}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        private.step(interrupted())
    assert not private.noise._ahead._values
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("noise") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    private.step([{"x": torch.randn(4, 3)}])
    assert all(p.grad.all() for p in private.parameters.values())


def test_pieces_may_be_taken_in_any_order_and_others_too():
    with Ahead(lambda piece: piece * 10, range(8), threads=2, most=3) as ahead:
        assert [ahead.take(piece) for piece in (5, 2, 0, 9, 1, 7, 3)] == [50, 20, 0, 90, 10, 70, 30]


def test_only_so_many_values_exist_at_a_time():
    alive, most = [], []

    def compute(piece):
        alive.append(piece)
        most.append(len(alive))
        return piece

    with Ahead(compute, range(100), threads=3, most=7) as ahead:
        for piece in range(100):
            if piece % 9 == 0:
                time.sleep(0.002)
            alive.remove(ahead.take(piece))
    assert max(most) <= 8  # and the one that is in use


def test_free_threads_are_those_that_nothing_else_uses(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert free_threads(CPU) == 1 and free_threads(torch.device("cuda")) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_threads(CPU) == 0 and free_threads(torch.device("cuda")) == 1
