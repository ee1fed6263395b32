"""RGP and LSG: each targeted weight is trained through two thin matrices, its gradient carriers (lowrank.py).

Carriers and importance are read off the weights, which are public once noise was added to every gradient before. The
forward pass is the plain model's, since W = L R + (W - L R), and what a layer has seen can be dropped inside the
backward pass.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_private.gradients.method import Lazily, Method
from hf_private.gradients.persample import PerSample, widen
from hf_private.gradients.tensors import accumulation_dtype, like, unsharded
from hf_private.methods.subspace import public_generator

from .lowrank import LowRank, Submatrix, important, kept, power_method

SOURCES = ("weight", "history", "random")
START = "start.safetensors"


@dataclass(frozen=True)
class Target:
    """How one weight is trained: `rank` of its carriers (None: no carriers, the kept submatrix itself), and which
    of them get gradients: "L", "R" or both."""

    rank: int | None
    sides: tuple[str, ...] = ("L", "R")


class Carriers(Method):
    """RGP, LSG and their baselines on the weights in `targets`; every other trainable parameter at full rank.

    Args:
        targets: Rank and sides by parameter name.
        source: What the carriers are the principal directions of: the "weight" (LSG), its "history" W_t - W_0 after
            `warmup_steps` on the weight (RGP), or nothing, "random" (RGP-random).
        power_iterations: Iterations of Algorithm 2.
        refresh: Carriers and importance are computed every so many steps.
        sparsity: Part p of the rows of dL and of the columns of dR that is left out (LSG), from step `sparsity_start`
            on. Without carriers (rank None) that part of the weight's elements.
        seed: Public; with the step and the weight's name it gives the power method's start.

    Guarantee: names and shapes of the blocks depend on the step and the settings, carriers and kept neurons on the
    weights besides; nothing here reads a record before it is clipped.

    >>> import torch
    >>> from torch import nn
    >>> method = Carriers({"weight": Target(rank=2)})
    >>> method.attach(dict(nn.Linear(6, 5, bias=False).named_parameters()))
    >>> method.blocks
    {'weight:L': torch.Size([2, 5]), 'weight:R': torch.Size([2, 6])}
    """

    drops_inputs = True
    takes_shards = True

    def __init__(
        self,
        targets: Mapping[str, Target],
        *,
        source: str = "weight",
        power_iterations: int = 1,
        refresh: int = 1,
        warmup_steps: int = 0,
        sparsity: float = 0.0,
        sparsity_start: int = 0,
        seed: int = 0,
    ) -> None:
        self.targets, self.source, self.power_iterations = dict(targets), source, power_iterations
        self.refresh, self.warmup_steps = refresh, warmup_steps
        self.sparsity, self.sparsity_start, self.seed = sparsity, sparsity_start, seed
        self.start: dict[str, Tensor] = {}  # W_0, for source="history"
        self.carriers: dict[str, LowRank | Submatrix] = {}
        self._sparse = False

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().attach(parameters)
        if missing := [name for name in self.targets if name not in self.parameters]:
            raise ValueError(f"`{missing[0]}` must be trainable to have carriers, got a frozen or absent parameter.")
        self.carriers = {}
        self.blocks = self.blocks_at(0)

    # ---- what is released

    def blocks_at(self, step: int) -> dict[str, torch.Size]:
        """Every block of a step, by name: carriers of the targets, then the other parameters."""
        sparsity = self._sparsity(step)
        blocks: dict[str, torch.Size] = {}
        for name, target in self.targets.items():
            shape = self.parameters[name].shape
            p = sparsity if target.rank else 1 - math.sqrt(1 - sparsity)
            rows, columns = kept(shape[0], p), kept(shape[1], p) * shape[2:].numel()
            if target.rank is None:
                blocks[f"{name}:S"] = torch.Size((rows, columns))
            for side, size in (("L", rows), ("R", columns)):
                if target.rank and side in target.sides:
                    blocks[f"{name}:{side}"] = torch.Size((target.rank, size))
        return blocks | {name: p.shape for name, p in self.parameters.items() if name not in self.targets}

    def _sparsity(self, step: int) -> float:
        return self.sparsity if step >= self.sparsity_start else 0.0

    def observe(self, name: str, value: PerSample) -> dict[str, PerSample]:
        if name not in self.targets:
            return super().observe(name, value)
        return {f"{name}:{side}": part for side, part in self.carriers[name].project(value)}

    def gradients(self, sums: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        full = {name: partial(sums.get, name) for name in sums if name in self.parameters}
        return Lazily(full | {name: partial(self._reconstruct, name, sums) for name in self.carriers})

    def _reconstruct(self, name: str, sums: Mapping[str, Tensor]) -> Tensor:
        parts = {side: sums[f"{name}:{side}"] for side in "LRS" if f"{name}:{side}" in sums}
        return self.carriers[name].reconstruct(parts).view(self.parameters[name].shape)

    # ---- public quantities: carriers and importance, from the weights

    @torch.no_grad()
    def begin_step(self, step: int) -> None:
        if self.source == "history" and not self.start:
            self.start = {name: self.parameters[name].detach().clone() for name in self.targets}
        sparse = self._sparsity(step) > 0
        if not self.carriers or step % self.refresh == 0 or sparse != self._sparse:
            self._sparse, self.blocks = sparse, self.blocks_at(step)
            self.carriers = dict(self._compute(step))

    def _compute(self, step: int) -> Iterator[tuple[str, LowRank | Submatrix]]:
        groups: dict[tuple, list[str]] = {}  # weights of one shape share the orthonormalisation
        for name, target in self.targets.items():
            if target.rank is None:
                p = 1 - math.sqrt(1 - self._sparsity(step))
                yield name, Submatrix(*important(unsharded(self.parameters[name]), p), self.parameters[name].shape)
            else:
                weight = self.parameters[name]
                key = (target.rank, weight.shape[0], weight.shape[1:].numel(), weight.dtype, weight.device)
                groups.setdefault(key, []).append(name)
        for (rank, *_), names in groups.items():
            matrices = [self._reader(name, step) for name in names]
            starts = [self._gaussian(name, step, rank) for name in names]
            iterations = 0 if self.source == "random" else self.power_iterations
            for name, left, right in zip(names, *power_method(matrices, starts, iterations), strict=True):
                keep = important(unsharded(self.parameters[name]), self.sparsity) if self._sparse else ()
                yield name, LowRank(left, right, self.targets[name].sides, keep)

    def _matrix(self, name: str) -> Tensor:
        """The weight as (rows, columns), float32 or better."""
        return widen(unsharded(self.parameters[name].detach()).flatten(1))

    def _reader(self, name: str, step: int) -> Callable[[], Tensor]:
        """What a weight's carriers are taken from; read when needed, as a difference is as large as the weight."""
        if self.source != "history" or step < self.warmup_steps:
            return lambda: self._matrix(name)

        def moved() -> Tensor:
            return self._matrix(name) - widen(unsharded(self.start[name]).flatten(1))

        return moved if moved().any() else lambda: self._matrix(name)

    def _gaussian(self, name: str, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Starts (rows, r) and (r, columns), the same on every rank and in every run with this seed."""
        generator = public_generator(self.seed, step, name)
        weight = self.parameters[name]
        dtype = accumulation_dtype(weight)
        right = torch.randn(rank, weight.shape[1:].numel(), generator=generator, dtype=dtype)
        left = torch.randn(weight.shape[0], rank, generator=generator, dtype=dtype)
        return left.to(weight.device), right.to(weight.device)

    # ---- W_0, which a resumed run needs again

    @property
    def start_bytes(self) -> int:
        """Memory that W_0 takes: as much as the targeted weights, with source="history" only."""
        weights = [self.parameters[name] for name in self.targets] if self.source == "history" else []
        return sum(p.numel() * p.element_size() for p in weights)

    def begin_run(self, folder: str | Path, resumes: bool = False, writes: bool = True) -> None:
        """With source="history": write W_0 to `folder`, or read it back if the run resumes."""
        if self.source != "history":
            return
        path = Path(folder, START)
        if resumes:
            self.start = self._read_start(path)
            return
        self.start = {name: self.parameters[name].detach().clone().contiguous() for name in self.targets}
        whole = {}
        for name, start in self.start.items():
            start = unsharded(start)  # all ranks take part
            if writes:
                whole[name] = start
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".tmp")
            save_file(whole, unfinished)
            os.replace(unfinished, path)

    def _read_start(self, path: Path) -> dict[str, Tensor]:
        if not path.is_file():
            raise FileNotFoundError(
                f"{str(path)!r} must hold the weights that the run began with, as source='history' takes carriers from"
                " W_t - W_0. Put it back from the folder of that run, or start a new run."
            )
        start = load_file(path)
        for name in self.targets:
            if name not in start or start[name].shape != self.parameters[name].shape:
                raise ValueError(f"{str(path)!r} does not fit this model: `{name}` is missing or of another shape.")
        return {name: like(start[name], self.parameters[name]) for name in self.targets}
