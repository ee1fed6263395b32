"""Gradients of parts of a parameter: the experts of a 3-D weight, the thirds of a stacked projection."""

import torch
from torch import Tensor

from .persample import Dense, Grams, PerSample

Part = int | tuple[int, int]  # one index of the first axis, or a range of them


class Slices(PerSample):
    """A gradient that is 0 outside some parts of the parameter's first axis, which do not overlap.

    `parts` maps an index, or a range (start, stop), to the per-sample gradients of that part; `shape` is the whole
    parameter's. So an expert that no token of the batch reached costs nothing.
    """

    def __init__(self, parts: dict[Part, PerSample], shape: torch.Size) -> None:
        self.parts, self.shape = parts, shape

    def sq_norm(self, grams: Grams | None = None) -> Tensor:
        return torch.stack([value.sq_norm(grams) for value in self.parts.values()]).sum(0)

    def weighted_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        for part, value in self.parts.items():
            if into is None:
                first = value.weighted_sum(c)
                into = first.new_zeros(self.shape)
                into[_index(part)] = first
            else:
                value.weighted_sum(c, into[_index(part)])
        assert into is not None, "a gradient has parts"
        return into

    def dense(self) -> Tensor:
        formed = {part: value.dense() for part, value in self.parts.items()}
        some = next(iter(formed.values()))
        g = some.new_zeros(len(some), *self.shape)
        for part, value in formed.items():
            g[:, _index(part)] = value
        return g

    def masked(self, keep: Tensor) -> "Slices":
        return Slices({part: value.masked(keep) for part, value in self.parts.items()}, self.shape)

    def __add__(self, other: PerSample) -> PerSample:
        if not isinstance(other, Slices) or _overlap(self.parts, other.parts):
            return Dense(self.dense() + other.dense())
        parts = dict(self.parts)
        for part, value in other.parts.items():
            parts[part] = parts[part] + value if part in parts else value
        return Slices(parts, self.shape)


def _index(part: Part) -> int | slice:
    return part if isinstance(part, int) else slice(*part)


def _overlap(some: dict[Part, PerSample], others: dict[Part, PerSample]) -> bool:
    """Whether two parts share an index without being the same."""

    def span(part: Part) -> tuple[int, int]:
        return (part, part + 1) if isinstance(part, int) else part

    return any(a != b and span(a)[0] < span(b)[1] and span(b)[0] < span(a)[1] for a in some for b in others)
