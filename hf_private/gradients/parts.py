"""Parts of parameters have names, and gradients that belong into those of the whole."""

from collections.abc import Mapping

from torch import Tensor

from .layers.attribution import PART
from .persample import PerSample
from .slices import Slices, transposed


def whole(name: str, value: PerSample, parameters: Mapping[str, Tensor]) -> tuple[str, PerSample]:
    """The name of a parameter, and its gradients from those of a part of it: `w@3`, `w@0:8`, `w@T`, `w@3@T`."""
    while PART in name:
        name, _, part = name.rpartition(PART)
        if part == "T":
            value = transposed(value)
        else:
            start, colon, stop = part.partition(":")
            value = Slices({(int(start), int(stop)) if colon else int(start): value}, parameters[name].shape)
    return name, value
