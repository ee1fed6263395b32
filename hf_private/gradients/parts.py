"""Parts of parameters have names, and gradients that belong into those of the whole.

`w@T` is the transpose of `w` (of its last two axes), `w@I3:8,16,4` index 3 of its first axis, where `w` is (8, 16, 4),
`w@S0-8:24,8` a range of it, `w@R:16,4` the same numbers in another shape, and `w@C` in another precision.
"""

from torch import Size

from .layers.attribution import PART
from .persample import Dense, Outer, PerSample, widen
from .ragged import Ragged
from .slices import Slices


def whole(name: str, value: PerSample) -> tuple[str, PerSample]:
    """The name of a parameter, and its gradients from those of a part of it."""
    while PART in name:
        name, _, part = name.rpartition(PART)
        what, _, numbers = part[1:].partition(":")
        shape = Size(int(n) for n in numbers.split(",") if n)
        if part[0] == "T":
            value = transposed(value)
        elif part[0] == "R":
            value = reshaped(value, shape)
        elif part[0] == "I":
            value = Slices({int(what): value}, shape)
        elif part[0] == "S":
            start, stop = map(int, what.split("-"))
            value = Slices({(start, stop): value}, shape)
    return name, value


def transposed(value: PerSample) -> PerSample:
    """The gradients of a parameter from those of its transpose."""
    if isinstance(value, Outer) and len(value.shape) == 2:
        return Outer(value.right, value.left)
    if isinstance(value, Ragged):
        return value.transposed()
    if isinstance(value, Slices) and all(isinstance(part, int) for part in value.parts):
        *front, rows, columns = value.shape
        return Slices({part: transposed(v) for part, v in value.parts.items()}, Size([*front, columns, rows]))
    return Dense(widen(value.dense()).mT)


def reshaped(value: PerSample, shape: Size) -> PerSample:
    """The same gradients in another shape."""
    if isinstance(value, Outer):
        return Outer(value.left, value.right, shape)
    if isinstance(value, Slices) and value.shape[2:] == shape[1:] and all(isinstance(p, int) for p in value.parts):
        rows = value.shape[1]  # (groups, rows, ...) of (groups * rows, ...)
        return Slices({(p * rows, (p + 1) * rows): v for p, v in value.parts.items()}, shape)  # pyrefly: ignore
    g = value.dense()
    return Dense(g.reshape(len(g), *shape))
