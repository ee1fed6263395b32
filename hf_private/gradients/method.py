"""BK: every trainable parameter at full rank (Bu et al. 2022). Also the base that other methods change."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from .persample import Dense, Outer, PerSample, sq_norms, weighted_sum


class Factors(Protocol):
    """What a method needs of clipping.Clipping: factors (N,) by block from squared norms (N,) by block."""

    def factors(self, sq_norms: Mapping[str, Tensor], blocks: Mapping[str, torch.Size]) -> dict[str, Tensor]: ...


class Lazily(Mapping[str, Tensor]):
    """Tensors by name, each made once, when it is asked for, and then forgotten with all that it was made from: the
    tensors together may be as large as the model, and the book larger. What is in `onto` is given to its maker."""

    def __init__(self, makers: Mapping[str, Callable[..., Tensor]], onto: Mapping[str, Tensor] | None = None) -> None:
        self._makers, self._onto = dict(makers), onto or {}

    def __getitem__(self, name: str) -> Tensor:
        make = self._makers.pop(name)
        return make(self._onto[name]) if name in self._onto else make()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._makers))

    def __len__(self) -> int:
        return len(self._makers)


class Method:
    """A gradient method; this base releases every trainable parameter's clipped sum itself.

    A *block* is one released tensor. Here the blocks are the parameters, by name; a method that releases something
    else (low-rank factors, embeddings) changes `observe`, `blocks`, `gradients` and, if it must, the rest.
    """

    drops_inputs = False  # whether `observe` reduces (a, ds) to something smaller, inside the backward pass
    takes_shards = False  # under FSDP2 `parameters` are DTensors, and so is what is summed for a block named as one

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take the trainable parameters, by their first name in the model."""
        self.parameters = dict(parameters)
        self.blocks: dict[str, torch.Size] = {name: p.shape for name, p in parameters.items()}

    def begin_run(self, folder: str | Path, resumes: bool = False, writes: bool = True) -> None:
        """Prepare a run, once attached: `folder` is for its local files, which one rank `writes`; a run that
        `resumes` finds there what it wrote when it began."""

    def begin_step(self, step: int) -> None:
        """Prepare a logical step from public quantities only; `step` counts on when a run is resumed."""

    def observe(self, name: str, value: PerSample) -> dict[str, PerSample]:
        """What goes into the book for one use of parameter `name`; called inside the backward pass."""
        # BK-MixOpt: the smaller of (a, ds) and the gradients themselves.
        if isinstance(value, Outer) and value.instantiating_is_smaller():
            value = Dense(value.dense())
        return {name: value}

    def clipped_sums(
        self, records: Mapping[str, PerSample], clipping: Factors, onto: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        """The sum over the batch of clipped per-sample gradients, by block; its sensitivity is the clip norm.

        `onto` are sums of other micro-batches. A method may add to them in place, and returns them then: a temporary
        as large as a vocabulary is not free.
        """
        factors = clipping.factors(sq_norms(records), self.blocks)
        distinct = {id(c): c for c in factors.values()}  # one for all blocks, unless layers are clipped by themselves
        removes = {key: not c.all() for key, c in distinct.items()}

        def maker(block: str, value: PerSample) -> Callable[..., Tensor]:
            return partial(weighted_sum, value, factors[block], removes=removes[id(factors[block])])

        return Lazily({block: maker(block, value) for block, value in records.items()}, onto)

    def stds(self, noise_multiplier: float, clip_norm: float) -> dict[str, float]:
        """Standard deviation of the noise on each block."""
        std = noise_multiplier * clip_norm if noise_multiplier else 0.0  # the non-private twin has clip_norm = inf
        return dict.fromkeys(self.blocks, std)

    def releases(self, noise_multiplier: float) -> tuple[float, ...]:
        """The noise multipliers of the Gaussian releases that one step makes on its sample."""
        return (noise_multiplier,)

    def gradients(self, sums: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The parameters' gradients, from the noised and averaged blocks (post-processing)."""
        return dict(sums)


class Full(Method):
    """Plain DP-SGD by book-keeping: exact clipping of all trainable parameters in one backward pass."""

    takes_shards = True
