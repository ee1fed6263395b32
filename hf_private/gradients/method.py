"""BK: every trainable parameter at full rank (Bu et al. 2022). Also the base class of the other methods."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .persample import Dense, Outer, PerSample, may_remove, sq_norms, weighted_sum


class Clip(Protocol):
    """What a method needs of `mechanism.clipping.Clipping`."""

    @property
    def mode(self) -> str: ...

    @property
    def clip_norm(self) -> float: ...

    def factors(self, sq_norms: Mapping[str, Tensor], blocks: Any = None) -> dict[str, Tensor]:
        """Factors (N,) by block, from squared norms (N,) by block."""
        ...

    def with_norm(self, clip_norm: float) -> "Clip":
        """The same mode with another clip norm."""
        ...


class Method:
    """A gradient method. This base class releases the clipped sum of every trainable parameter.

    A *block* is one released tensor. Here the blocks are the parameters, by name. A method that releases something
    else (low-rank factors, embeddings) overrides `observe`, `blocks`, `gradient` and, if needed, the rest.
    """

    drops_inputs = False  # whether `observe` reduces (a, ds) to something smaller, inside the backward pass
    # Whether the method works under FSDP2. There `parameters` are DTensors, and summing an entry is a collective that
    # leaves each rank its rows: `add_clipped_sums` must sum every entry once, in the order of `entries`.
    takes_shards = False

    parameters: dict[str, nn.Parameter]
    blocks: dict[str, torch.Size]
    # Public weight s of a block in the joint clip, 1 where absent: records are clipped by the norm of s g, the sum of
    # c s g gets the same noise as every block, and `gradient` divides by s. A small s leaves more of the clip norm to
    # the other blocks, and adds more noise to this one. It must not depend on records.
    scales: Mapping[str, float] = MappingProxyType({})

    def describe(self) -> str:
        """What the ledger records and the card says. Override it to name the method and its settings.

        The package's own methods record their class; the card describes them from `DPConfig` (`methods.registry`).
        """
        return type(self).__name__

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take the trainable parameters, by their first name in the model."""
        self.parameters = dict(parameters)
        self.blocks = {name: p.shape for name, p in parameters.items()}

    def begin_run(
        self, folder: str | Path, resumes: bool = False, writes: bool = True, state: str | Path | None = None
    ) -> None:
        """Prepare a run, after `attach`. `folder` is for local files, which one rank `writes`; a run that `resumes`
        finds the files of its first start there, and what `save_state` wrote in the folder `state`."""

    def save_state(self, folder: str | Path, writes: bool = True) -> None:
        """Write to the folder of a checkpoint what a resumed run cannot compute again: nothing, here."""

    def begin_step(self, step: int) -> None:
        """Prepare a logical step from public quantities only; a resumed run continues to count `step`."""

    def observe(self, name: str, value: PerSample) -> dict[str, PerSample]:
        """The entries for one use of parameter `name`, by block; called inside the backward pass."""
        # BK-MixOpt: the smaller of (a, ds) and the gradients themselves.
        if isinstance(value, Outer) and value.instantiating_is_smaller():
            value = Dense(value.dense())
        return {name: value}

    def add_clipped_sums(self, entries: dict[str, PerSample], clipping: Clip, sums: dict[str, Tensor]) -> None:
        """Add the clipped per-sample gradients of one micro-batch to `sums`, in place; sensitivity: the clip norm.

        The first micro-batch that reaches a block creates its sum, so no zeros are filled in. `entries` is emptied:
        each entry is freed as soon as it is summed, because the book may be larger than the model.
        """
        factors = clipping.factors(self.scaled_sq_norms(sq_norms(entries)), self.blocks)
        distinct = {id(c): c for c in factors.values()}  # one for all blocks, except with per-layer clipping
        removes = {key: may_remove(c) for key, c in distinct.items()}
        for block in list(entries):
            c = factors[block]
            scaled = c * self.scales[block] if block in self.scales else c
            sums[block] = weighted_sum(entries.pop(block), scaled, sums.get(block), removes[id(c)])

    def scaled_sq_norms(self, sq_norms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Squared norms (N,) by block of what is clipped: |s g|^2."""
        return {block: sq * self.scales[block] ** 2 if block in self.scales else sq for block, sq in sq_norms.items()}

    def stds(self, noise_multiplier: float, clip_norm: float) -> dict[str, float]:
        """Standard deviation of the noise on each block."""
        std = noise_multiplier * clip_norm if noise_multiplier else 0.0  # the non-private twin has clip_norm = inf
        return dict.fromkeys(self.blocks, std)

    def releases(self, noise_multiplier: float) -> tuple[float, ...]:
        """The noise multipliers of the Gaussian releases that one step makes on its sample."""
        return (noise_multiplier,)

    def gradient(self, name: str, sums: Mapping[str, Tensor]) -> Tensor:
        """The gradient of parameter `name` from the noised and averaged blocks (post-processing)."""
        return sums[name] / self.scales[name] if name in self.scales else sums[name]


class Full(Method):
    """Plain DP-SGD by book-keeping: exact clipping of all trainable parameters in one backward pass."""

    takes_shards = True
