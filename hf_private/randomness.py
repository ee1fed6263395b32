"""Randomness from the operating system: secret keys, their streams, and fresh seeds for the global generators.

A `Key` is 32 secret bytes. A label such as ("noise", step, name) selects one of its streams, and a position selects a
word of that stream. Every draw is a pure function of (key, label, position), on any rank and in any order.
"""

import hashlib
import hmac
import json
import os
import random
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

KEY_BYTES = 32
_BLOCK_WORDS = 2  # an AES block is 16 bytes
_LOW_53_BITS = (1 << 53) - 1


class Key:
    """32 secret bytes that are never shown, copied or saved.

    `Key()` asks the operating system. `Key(fixed)` is for tests: its draws can be repeated, so the run is not private
    and must say so (`reproducible` is True).

    >>> Key()
    Key(secret)
    >>> Key(bytes(32)).reproducible
    True
    """

    __slots__ = ("_bytes", "reproducible")

    def __init__(self, fixed: bytes | None = None) -> None:
        self.reproducible = fixed is not None
        self._bytes = os.urandom(KEY_BYTES) if fixed is None else fixed
        if not isinstance(self._bytes, bytes) or len(self._bytes) != KEY_BYTES:
            got = f"{len(self._bytes)} bytes" if isinstance(fixed, bytes) else type(fixed).__name__
            raise ValueError(f"`key` must be {KEY_BYTES} bytes or None (drawn from the operating system), got {got}.")

    @classmethod
    def shared(cls, broadcast: Callable[[bytes], bytes]) -> "Key":
        """One secret key for all ranks: `broadcast` takes this rank's 32 random bytes and returns those of rank 0."""
        key = cls(broadcast(os.urandom(KEY_BYTES)))
        key.reproducible = False  # the bytes come from rank 0's operating system
        return key

    @classmethod
    def of(cls, key: "Key | bytes | None") -> "Key":
        """The key for a `key` argument: a `Key` is returned as it is, bytes make a fixed key, None draws one."""
        return key if isinstance(key, Key) else cls(key)

    def stream(self, *label: str | int) -> "Keystream":
        """The stream that belongs to `label`."""
        # A subkey for each label: streams of different labels cannot overlap, however long they are. JSON
        # distinguishes ("a", 1) from ("a1",).
        return Keystream(hmac.digest(self._bytes, json.dumps(label).encode(), hashlib.sha256))

    def __repr__(self) -> str:
        return "Key(secret)"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_to_copy(self)


def refuse_to_copy(thing: object) -> NoReturn:
    """Raise the error for an object that holds a key and is pickled or copied."""
    raise TypeError(
        f"`{type(thing).__name__}` cannot be pickled or copied: it holds a secret key, and anyone with the key can "
        "undo the privacy of the run. Make a new one, which draws a new key."
    )


class Keystream:
    """AES-256 in counter mode: an endless sequence of random 64-bit words, readable from any even position.

    >>> words = Key(bytes(32)).stream("doctest").words(0, 8)
    >>> torch.equal(words[6:], Key(bytes(32)).stream("doctest").words(6, 2))
    True
    """

    __slots__ = ("_subkey",)

    def __init__(self, subkey: bytes) -> None:
        self._subkey = subkey

    def words(self, start: int, count: int) -> Tensor:
        """Words `start` to `start + count` (both even) as int64 (count,)."""
        block, odd = divmod(start, _BLOCK_WORDS)
        if odd or count % _BLOCK_WORDS:
            raise ValueError(f"`start` and `count` must be even (whole AES blocks), got {start} and {count}.")
        if count == 0:
            return torch.empty(0, dtype=torch.int64)
        words = np.zeros(count + _BLOCK_WORDS, dtype=np.int64)  # older `update_into` needs a spare block in its buffer
        text = words.data.cast("B")
        cipher = Cipher(algorithms.AES(self._subkey), modes.CTR(block.to_bytes(16, "big")))
        cipher.encryptor().update_into(text[: 8 * count], text)  # the keystream is the encryption of zeros
        return torch.from_numpy(words[:count])

    def uniforms(self, start: int, count: int) -> Tensor:
        """Words `start` to `start + count` as float64 uniforms in (0, 1] with 53 random bits."""
        return self.words(start, count).bitwise_and_(_LOW_53_BITS).to(torch.float64).add_(1.0).mul_(2.0**-53)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_to_copy(self)


def reseed_global() -> None:
    """Seed the global generators of `random`, numpy and torch from the operating system.

    Dropout masks, masking collators and augmentation draw from them, and Trainer seeds them from `args.seed`, which
    is published. Every step calls this function, so that nobody can replay a mask.

    >>> torch.manual_seed(0); first = torch.rand(1)  # doctest: +ELLIPSIS
    <torch...>
    >>> torch.manual_seed(0); reseed_global(); bool(torch.rand(1) == first)  # doctest: +ELLIPSIS
    <torch...>
    False
    """
    random.seed(os.urandom(KEY_BYTES))
    np.random.seed(np.frombuffer(os.urandom(KEY_BYTES), dtype=np.uint32))
    # On CPU torch keeps only 32 bits of the seed: manual_seed(s) and manual_seed(s + 2**32) give the same generator.
    # That is enough for a dropout mask, but not to hide a record: noise and sampling use `Key` instead.
    torch.manual_seed(int.from_bytes(os.urandom(8), "little"))
