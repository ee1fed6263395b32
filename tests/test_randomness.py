"""Keys stay secret, streams are what they are said to be, and the global generators forget their seeds."""

import copy
import os
import pickle
import random

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from hf_private.randomness import Key, Keystream, reseed_global


def test_a_stream_is_aes_256_in_counter_mode():
    subkey = bytes(range(32))
    expected = Cipher(algorithms.AES(subkey), modes.CTR(bytes(16))).encryptor().update(bytes(8 * 1000))
    assert Keystream(subkey).words(0, 1000).numpy().tobytes() == expected
    assert Keystream(subkey).words(200, 30).numpy().tobytes() == expected[8 * 200 : 8 * 230]
    assert Keystream(subkey).words(8, 0).shape == (0,)
    with pytest.raises(ValueError, match="`start` and `count`"):
        Keystream(subkey).words(1, 2)


def test_different_labels_give_different_streams():
    key = Key(bytes(32))
    labels = [("noise", 1, "a"), ("noise", 11, "a"), ("noise", 1, "1a"), ("sample", 1), ("sample", "1"), ("sample1",)]
    starts = {tuple(key.stream(*label).words(0, 2).tolist()) for label in labels}
    assert len(starts) == len(labels)


def test_uniforms_are_in_the_half_open_interval_and_use_53_bits(monkeypatch):
    stream = Key(bytes(32)).stream("uniforms")
    uniforms = stream.uniforms(0, 1 << 16).numpy()
    assert 0 < uniforms.min() and uniforms.max() <= 1
    assert abs(uniforms.mean() - 0.5) < 0.005 and abs(uniforms.var() - 1 / 12) < 0.002
    assert (uniforms * 2.0**53 % 2).mean() == pytest.approx(0.5, abs=0.02)  # the last bit is alive
    for word, value in ((0, 2.0**-53), (-1, 1.0), (1 << 53, 2.0**-53)):  # 0 is never returned, 1 may be
        monkeypatch.setattr(Keystream, "words", lambda *_, word=word: torch.tensor([word]))
        assert stream.uniforms(0, 2).item() == value


def test_a_key_is_never_shown_or_copied():
    key = Key(b"0123456789abcdef" * 2)
    assert "0123" not in repr(key) + str(key)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy, lambda k: pickle.dumps(k.stream("a"))):
        with pytest.raises(TypeError, match="`Key(stream)?`"):
            attempt(key)
    with pytest.raises(TypeError):
        vars(key)  # no __dict__ for a logger to dump


@pytest.mark.parametrize("wrong, got", [(b"short", "5 bytes"), ("x" * 32, "str"), (7, "int")])
def test_a_wrong_key_is_refused_without_showing_it(wrong, got):
    with pytest.raises(ValueError, match=f"`key`.*, got {got}"):
        Key(wrong)


def test_ranks_share_the_key_of_rank_0_and_it_is_still_secret():
    sent = []
    first = Key.shared(lambda mine: sent.append(mine) or mine)
    second = Key.shared(lambda mine: sent[0])
    assert torch.equal(first.stream("a").words(0, 4), second.stream("a").words(0, 4))
    assert not first.reproducible and not second.reproducible and Key(sent[0]).reproducible
    assert not torch.equal(Key().stream("a").words(0, 4), Key().stream("a").words(0, 4))


def test_reseed_global_forgets_the_seed_of_each_generator():
    def draws(then):
        random.seed(42), np.random.seed(42), torch.manual_seed(42)
        then()
        return random.random(), np.random.rand(), torch.rand(1, dtype=torch.float64).item()

    assert draws(lambda: None) == draws(lambda: None)  # the control: without it they repeat
    one, two = draws(reseed_global), draws(reseed_global)
    assert all(a != b for a, b in zip(one, two, strict=True))


def test_reseed_global_asks_the_operating_system(monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda count: bytes(count))
    reseed_global()
    first = random.random(), np.random.rand(), torch.rand(1).item()
    reseed_global()
    assert first == (random.random(), np.random.rand(), torch.rand(1).item())
