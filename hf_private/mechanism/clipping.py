"""Clip factors from squared norms: they bound the influence of one record.

The gradient of every record is multiplied by a factor c_n with |c_n g_n| <= clip_norm, whatever the gradient is.
A record whose norm is not finite gets the factor 0.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_private import _validate as validate

SMALLEST = 1e-6  # clip norm
MODES = ("flat", "automatic", "per-layer")


def slack(dtype: torch.dtype) -> float:
    """Relative slack by which factors are lowered, so that rounding never lets a record exceed the clip norm."""
    return 1e-12 if dtype == torch.float64 else 1e-5


def layer_of(block: str) -> str:
    """The layer that a block belongs to: `encoder.0.fc1` for `encoder.0.fc1.weight` and `encoder.0.fc1.weight:L`."""
    return block.split(":")[0].rpartition(".")[0]


@dataclass(frozen=True)
class Clipping:
    """How records are clipped; the joint sensitivity of all blocks is `clip_norm` in every mode.

    - `flat`: factor min(1, C / |g_n|) over all blocks together.
    - `automatic` (AUTO-S): factor C / (|g_n| + gamma); the size of C then only rescales the learning rate.
    - `per-layer`: each of K layers is clipped to C / sqrt(K) separately.

    >>> import torch
    >>> Clipping("flat", clip_norm=1.0).factors({"w": torch.tensor([4.0, 0.25])})["w"]
    tensor([0.5000, 1.0000])
    """

    mode: str = "flat"
    clip_norm: float = 1.0
    gamma: float = 0.01

    def __post_init__(self) -> None:
        validate.one_of(MODES, clipping=self.mode)
        validate.positive(clip_norm=self.clip_norm, gamma=self.gamma)
        if self.clip_norm < SMALLEST:
            raise ValueError(
                f"`clip_norm` must be at least {SMALLEST:g}, got {self.clip_norm}: in float32 the squares of such"
                " gradients are 0, so they would not be clipped. Scale the learning rate instead."
            )
        if self.mode == "automatic" and math.isinf(self.clip_norm):
            raise ValueError("`clip_norm` must be finite with clipping='automatic', got inf. Use clipping='flat'.")

    def factors(self, sq_norms: Mapping[str, Tensor], blocks: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Factors (N,) by block, from squared norms (N,) by block.

        `blocks` names every block that the method releases. With `per-layer`, K counts all of them, including those
        that this batch did not reach, because K must not depend on the data.
        """
        total = torch.stack([*sq_norms.values()]).sum(0)
        finite = torch.isfinite(total)
        if self.mode != "per-layer":
            factor = self._factor(total, self.clip_norm).where(finite, 0)
            return dict.fromkeys(sq_norms, factor)
        layers = {layer_of(block) for block in (blocks or sq_norms)}
        by_layer: dict[str, Tensor] = {}
        for block, sq_norm in sq_norms.items():
            layer = layer_of(block)
            by_layer[layer] = by_layer[layer] + sq_norm if layer in by_layer else sq_norm
        share = self.clip_norm / math.sqrt(len(layers))
        factors = {layer: self._factor(sq_norm, share).where(finite, 0) for layer, sq_norm in by_layer.items()}
        return {block: factors[layer_of(block)] for block in sq_norms}

    def with_norm(self, clip_norm: float) -> "Clipping":
        """The same mode with another clip norm."""
        return replace(self, clip_norm=clip_norm)

    def _factor(self, sq_norm: Tensor, clip_norm: float) -> Tensor:
        norm = sq_norm.sqrt()
        if math.isinf(clip_norm):
            return torch.ones_like(norm)
        if self.mode == "automatic":
            return (clip_norm * (1 - slack(norm.dtype))) / (norm + self.gamma)
        return ((clip_norm * (1 - slack(norm.dtype))) / norm).clamp(max=1)
