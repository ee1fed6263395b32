"""Clip factors from squared norms: they bound the influence of one record.

The gradient of every record is multiplied by a factor c_n with |c_n g_n| <= clip_norm, whatever the gradient is.
A record whose norm is not finite gets the factor 0.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_private import _validate as validate

SMALLEST = 1e-6  # clip norm
NEGLIGIBLE = 1e-12  # norm below which AUTO-V drops a record: float32 squares of its elements may be 0
MODES = {  # name -> (rule for the factor, what is clipped together)
    "flat": ("clip", "all"),
    "automatic": ("normalise", "all"),
    "global": ("drop", "all"),
    "per-layer": ("clip", "layer"),
    "per-block": ("clip", "block"),
    "automatic-per-layer": ("normalise", "layer"),
}


def slack(dtype: torch.dtype) -> float:
    """Relative slack by which factors are lowered, so that rounding never lets a record exceed the clip norm."""
    return 1e-12 if dtype == torch.float64 else 1e-5


def layer_of(block: str) -> str:
    """The layer that a block belongs to: `encoder.0.fc1` for `encoder.0.fc1.weight` and `encoder.0.fc1.weight:L`."""
    return block.split(":")[0].rpartition(".")[0]


def numbered_block_of(block: str) -> str:
    """The numbered block that a released block belongs to: `encoder.0`; outside of any, its layer."""
    numbered = re.match(r"(.*?\.)?\d+(?=\.)", block)
    return numbered[0] if numbered else layer_of(block)


GROUPING = {"layer": layer_of, "block": numbered_block_of}


@dataclass(frozen=True)
class Clipping:
    """How records are clipped; the joint sensitivity of all blocks is `clip_norm` in every mode.

    - `flat`: factor min(1, C / |g_n|) over all blocks together (Abadi et al. 2016).
    - `automatic`: factor C / (|g_n| + gamma), AUTO-S (Bu et al. 2022b). C then only rescales the learning rate. With
      gamma=0 it is AUTO-V: every record has norm C, except those below 1e-12, which are dropped.
    - `global`: factor 1 if |g_n| <= C, otherwise 0 (Bu et al. 2021, with Z = C: another Z rescales signal and noise).
    - `per-layer`, `per-block`: each of K layers or numbered blocks is clipped to C / sqrt(K) separately (group-wise
      clipping).
    - `automatic-per-layer`: each of K layers gets the factor (C / sqrt(K)) / (|g_n| + gamma).

    Guarantee: |sum over blocks of c_n g_n| <= C for each record n, whatever its gradient is. So adding or removing one
    record changes the release by at most C, and all modes cost the same epsilon.

    >>> import torch
    >>> Clipping("flat", clip_norm=1.0).factors({"w": torch.tensor([4.0, 0.25])})["w"]
    tensor([0.5000, 1.0000])
    """

    mode: str = "flat"
    clip_norm: float = 1.0
    gamma: float = 0.01

    def __post_init__(self) -> None:
        validate.one_of(MODES, clipping=self.mode)
        validate.positive(clip_norm=self.clip_norm)
        validate.non_negative(gamma=self.gamma)
        if self.clip_norm < SMALLEST:
            raise ValueError(
                f"`clip_norm` must be at least {SMALLEST:g}, got {self.clip_norm}: in float32 the squares of such"
                " gradients are 0, so they would not be clipped. Scale the learning rate instead."
            )
        if self.rule == "normalise" and math.isinf(self.clip_norm):
            raise ValueError(f"`clip_norm` must be finite with clipping={self.mode!r}, got inf. Use clipping='flat'.")

    @property
    def group_of(self) -> Callable[[str], str]:
        """fn(block) -> the group of blocks that it is clipped with; "" for all together."""
        return GROUPING.get(MODES[self.mode][1], lambda block: "")

    @property
    def rule(self) -> str:
        """How a factor follows from a norm: "clip", "normalise" or "drop"."""
        return MODES[self.mode][0]

    def factors(self, sq_norms: Mapping[str, Tensor], blocks: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Factors (N,) by block, from squared norms (N,) by block.

        `blocks` names every block that the method releases. Where groups of blocks are clipped separately, K counts
        all of them, including those that this batch did not reach, because K must not depend on the data.
        """
        total = torch.stack([*sq_norms.values()]).sum(0)
        finite = torch.isfinite(total)
        if MODES[self.mode][1] == "all":
            factor = self._factor(total, self.clip_norm).where(finite, 0)
            return dict.fromkeys(sq_norms, factor)
        group_of = self.group_of
        groups = {group_of(block) for block in (blocks or sq_norms)}
        by_group: dict[str, Tensor] = {}
        for block, sq_norm in sq_norms.items():
            group = group_of(block)
            by_group[group] = by_group[group] + sq_norm if group in by_group else sq_norm
        share = self.clip_norm / math.sqrt(len(groups))
        factors = {group: self._factor(sq_norm, share).where(finite, 0) for group, sq_norm in by_group.items()}
        return {block: factors[group_of(block)] for block in sq_norms}

    def with_norm(self, clip_norm: float) -> "Clipping":
        """The same mode with another clip norm."""
        return replace(self, clip_norm=clip_norm)

    def _factor(self, sq_norm: Tensor, clip_norm: float) -> Tensor:
        norm = sq_norm.sqrt()
        if math.isinf(clip_norm):
            return torch.ones_like(norm)
        lowered = clip_norm * (1 - slack(norm.dtype))
        if self.rule == "normalise":
            factor = lowered / (norm + self.gamma)
            return factor if self.gamma else factor.where(norm >= NEGLIGIBLE, 0)
        if self.rule == "drop":
            return (norm <= lowered).to(norm.dtype)
        return (lowered / norm).clamp(max=1)
