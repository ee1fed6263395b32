"""The only place that draws noise: N(0, std^2), once per step, on every element of every released tensor.

The noise of an element is a function of (key, step, tensor name, element index). So all ranks add the same noise
without communication, a shard draws exactly its slice of the noise of the full tensor, and neither the order of the
tensors nor the number of ranks changes the update.

For the same reason background threads may compute it while the passes of a step run (`begin`): they change no number.

Limits: rounding a float64 sum to float32 hides the low bits that floating-point attacks read (Mironov 2012; Jin et al.
2022). This is a mitigation, not a proof, which would need a discrete Gaussian.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from hf_private._validate import integer_at_least, one_of
from hf_private.randomness import Key, Keystream, refuse_to_copy, reseed_global

from .ahead import Ahead, free_threads

__all__ = ["NOISE_KINDS", "NoiseSource", "reseed_global"]

NOISE_KINDS = ("secure", "fast")
_DTYPES = (torch.float32, torch.float64)
_CHUNK = 1 << 17  # elements at a time: temporaries of 1 MB
# Numbers that are computed ahead, at most. Beside another device the memory of the host has little else to hold.
_AHEAD, _AHEAD_OF_DEVICE = 1 << 25, 1 << 27
_HALF = 64  # a group of 2 * _HALF elements is made of _HALF radii and _HALF angles
_FAST_CHUNK = 1 << 14  # elements that share one torch generator
_MT19937_WORDS = slice(24, 24 + 624 * 8)  # where a CPU generator's state holds its 624 words


class _Piece(NamedTuple):
    """Some consecutive elements of one block's noise."""

    step: int
    name: str
    start: int
    count: int
    pinned: bool  # for an asynchronous copy to a CUDA device


class NoiseSource:
    """Gaussian noise that nobody can replay.

    `kind="secure"` turns an AES-256-CTR keystream into normals by Box-Muller in float64. `kind="fast"` uses torch's
    generators on the device of the tensor, or on the CPU if it has none: they are not cryptographic, and the card says
    so.

    `key=None` draws 32 bytes from the operating system; they are never saved, and the source refuses to be pickled.
    Ranks share a `Key.shared(broadcast)`. Bytes fix the noise for tests: `reproducible` is True, and the run is NOT
    PRIVATE.

    Guarantee: a step number is used at most once, because two releases with the same noise reveal their difference.

    >>> sums = {"head.weight": torch.zeros(3, 4), "head.bias": torch.zeros(3)}
    >>> noise = NoiseSource()
    >>> noise.add_(step=0, sums=sums, stds={"head.weight": 1.0, "head.bias": 1.0})
    >>> noise.drawn, bool((sums["head.weight"] != 0).all()), noise.reproducible
    (15, True, False)
    """

    def __init__(self, kind: str = "secure", key: Key | bytes | None = None) -> None:
        one_of(NOISE_KINDS, kind=kind)
        self.kind = kind
        self.drawn = 0  # elements drawn by the last `add_`
        self._key = Key.of(key)
        self._last_step = -1
        self._ahead = Ahead(self._normals, (), threads=0, most=0)

    @property
    def reproducible(self) -> bool:
        """Whether the key may be known to others: a reproducible run is not private."""
        return self._key.reproducible

    def begin(
        self,
        step: int,
        sizes: Mapping[str, int],
        stds: Mapping[str, float],
        device: torch.device,
        offsets: Mapping[str, int] | None = None,
    ) -> None:
        """Let free cores compute the noise that `add_` will need. It changes the speed, and nothing else.

        `sizes` has the number of elements by name, in the order of `sums`. What is left over is dropped at the end of
        the `with` block of this object.
        """
        self._ahead.close()
        if self.kind != "secure":
            return
        starts = {name: (offsets or {}).get(name, 0) for name in sizes if stds[name] != 0}
        pieces = (
            _Piece(step, name, start + first, min(_CHUNK, sizes[name] - first), device.type == "cuda")
            for name, start in starts.items()
            for first in range(0, sizes[name], _CHUNK)
        )
        numbers = _AHEAD if device.type == "cpu" else _AHEAD_OF_DEVICE
        self._ahead = Ahead(self._normals, pieces, free_threads(device), most=numbers // _CHUNK)

    def __enter__(self) -> "NoiseSource":
        return self

    def __exit__(self, *_: object) -> None:
        self._ahead.close()

    def _normals(self, piece: _Piece) -> Tensor:
        """The noise of a piece at standard deviation 1, float64 (count,) in the memory of the host."""
        normals = _secure_normals(self._key.stream("noise", piece.step, piece.name), piece.start, piece.count)
        return normals.pin_memory() if piece.pinned else normals

    @torch.no_grad()
    def add_(
        self, step: int, sums: dict[str, Tensor], stds: dict[str, float], offsets: dict[str, int] | None = None
    ) -> None:
        """Add N(0, std^2) in place to every element of every tensor, reached by a gradient or not.

        Args:
            step: Number of the release, greater than any before.
            sums: Clipped sums by name, any shape, float32 or float64. Noise is added in float64 and the result rounded
                to the dtype of the tensor.
            stds: Standard deviation by name. 0 draws nothing.
            offsets: For shards: row-major index in the full tensor of the first element of the shard.
        """
        offsets = offsets or {}
        _check(sums, stds, offsets)
        integer_at_least(0, step=step)
        if step <= self._last_step:
            raise ValueError(
                f"`step` must be greater than {self._last_step}, got {step}: the noise of a step is used once, because"
                " two releases with the same noise reveal their difference. Count steps upward, or make a new"
                " NoiseSource."
            )
        self._last_step = step
        self.drawn = 0
        for name, total in sums.items():
            if stds[name] == 0:
                continue
            for start, piece in _pieces(total, offsets.get(name, 0)):
                if self.kind == "secure":
                    normals = self._ahead.take(_Piece(step, name, start, piece.numel(), piece.is_cuda))
                    drawn = normals.to(piece.device, non_blocking=True)
                else:
                    drawn = _fast_normals(self._key.stream("noise", step, name), start, piece)
                noise = drawn.mul_(stds[name]).view(piece.shape)
                piece.copy_(noise.add_(piece))
            self.drawn += total.numel()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_to_copy(self)


def _check(sums: dict[str, Tensor], stds: dict[str, float], offsets: dict[str, int]) -> None:
    """Refuse before the first draw, so that an error leaves no tensor half noised."""
    if sums.keys() != stds.keys() or not offsets.keys() <= sums.keys():
        odd = sorted((sums.keys() ^ stds.keys()) | (offsets.keys() - sums.keys()))
        raise ValueError(
            f"`stds` must name exactly the tensors of `sums`, and `offsets` some of them, got a mismatch at {odd}. "
            "Every released block needs its noise: take both from the same method."
        )
    for name, total in sums.items():
        if total.dtype not in _DTYPES:
            raise ValueError(
                f"`sums[{name!r}]` must be one of {', '.join(map(str, _DTYPES))}, got {total.dtype}. Sum in float32."
            )
        if isinstance(stds[name], bool) or not math.isfinite(stds[name]) or stds[name] < 0:
            raise ValueError(f"`stds[{name!r}]` must be finite and >= 0, got {stds[name]!r}.")
        integer_at_least(0, **{f"offsets[{name!r}]": offsets.get(name, 0)})


def _pieces(total: Tensor, start: int) -> Iterator[tuple[int, Tensor]]:
    """Cut a tensor of any strides into views of at most _CHUNK elements, with the row-major index of their first."""
    if total.is_contiguous():
        total = total.view(-1)
    if total.numel() <= _CHUNK:
        if total.numel():
            yield start, total
        return
    row = total.numel() // total.shape[0]
    rows = max(1, _CHUNK // row)
    for first in range(0, total.shape[0], rows):
        # A row that is too long is cut along its own dimensions.
        part = total[first] if row > _CHUNK else total[first : first + rows]
        yield from _pieces(part, start + first * row)


def _secure_normals(stream: Keystream, start: int, count: int) -> Tensor:
    """Normals `start` to `start + count` of a stream: float64 (count,)."""
    # Only whole groups are computed, so that each element passes through the same vector instructions whatever the
    # slice, and the result is equal to the last bit.
    group = 2 * _HALF
    first, end = start // group * group, start + count
    uniforms = stream.uniforms(first, -(-(end - first) // group) * group).view(-1, 2, _HALF)
    radii = uniforms[:, 0].log().mul_(-2).sqrt_()  # (groups, _HALF); uniforms are in (0, 1], so the log is finite
    angles = uniforms[:, 1] * (2 * math.pi)
    normals = torch.stack((angles.cos().mul_(radii), angles.sin_().mul_(radii)), dim=1)
    return normals.view(-1)[start - first : end - first]


def _fast_normals(stream: Keystream, start: int, like: Tensor) -> Tensor:
    """As above on the device of `like` (count = like.numel()), from torch generators: each normal is the sum of two
    float32 normals of half the variance.

    A single float32 normal has 24 random bits and never exceeds 5.8 deviations. A sum that one record has pushed out
    of that range would reveal the record, more often than delta permits. Two together reach 8.2 deviations.
    """
    end = start + like.numel()
    chunks = range(start // _FAST_CHUNK, -(-end // _FAST_CHUNK))
    device = _generator_device(like.device)
    drawn = torch.empty(len(chunks), 2, _FAST_CHUNK, device=device)
    for row, chunk in zip(drawn, chunks, strict=True):
        row.normal_(generator=_generator(stream, chunk, device))
    first = chunks.start * _FAST_CHUNK
    normals = drawn.sum(1, dtype=torch.float64).mul_(math.sqrt(0.5)).view(-1)[start - first : end - first]
    return normals.to(like.device, non_blocking=True)


@functools.cache
def _generator_device(device: torch.device) -> torch.device:
    """Where noise for a device is drawn: there, or on the CPU if torch has no generator for it."""
    try:
        torch.Generator(device)
    except RuntimeError:
        return torch.device("cpu")
    return device


def _generator(stream: Keystream, chunk: int, device: torch.device) -> torch.Generator:
    """A torch generator for one chunk of one stream."""
    words = stream.words(624 * chunk, 624)
    generator = torch.Generator(device).manual_seed(int(words[0]))
    if device.type == "cpu":
        # manual_seed keeps 32 bits on CPU: after about 2^16 chunks two of them would get the same noise. So fill the
        # whole state of the generator, 624 words of 32 bits.
        state = generator.get_state()
        state[_MT19937_WORDS] = words.bitwise_and_(0xFFFFFFFF).view(torch.uint8)
        generator.set_state(state)
    return generator
