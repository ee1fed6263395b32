"""Parts of parameters have names, and gradients that belong into those of the whole.

`w@T` is the transpose of `w`, `w@I3:8,16,4` index 3 of its first axis, where `w` is (8, 16, 4), `w@S0-8:24,8` a range
of it, `w@R:16,4` the same numbers in another shape, and `w@C` in another precision.
"""

from torch import Size

from .layers.attribution import PART
from .persample import Dense, Outer, PerSample, widen
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
    """The gradients of a matrix from those of its transpose."""
    if isinstance(value, Outer) and len(value.shape) == 2:
        return Outer(value.right, value.left)
    return Dense(widen(value.dense()).transpose(1, 2))


def reshaped(value: PerSample, shape: Size) -> PerSample:
    """The same gradients in another shape."""
    if isinstance(value, Outer):
        return Outer(value.left, value.right, shape)
    g = value.dense()
    return Dense(g.reshape(len(g), *shape))
