"""RGP and LSG: each targeted weight is trained through two thin matrices, its gradient carriers (lowrank.py).

Carriers and importance come from the weights, which are public because every earlier gradient got noise. The forward
pass is that of the plain model, since W = L R + (W - L R), and the inputs of a layer are dropped inside the backward
pass.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_private.gradients.method import Method
from hf_private.gradients.persample import PerSample, widen
from hf_private.gradients.tensors import accumulation_dtype, like, unsharded
from hf_private.methods.subspace import public_generator

from .lowrank import LowRank, Submatrix, important, kept, power_method

SOURCES = ("weight", "history", "random")
START = "start.safetensors"


@dataclass(frozen=True)
class Target:
    """How one weight is trained: the `rank` of its carriers (None: no carriers, only the kept submatrix), and which
    carriers get gradients: "L", "R" or both."""

    rank: int | None
    sides: tuple[str, ...] = ("L", "R")


class Carriers(Method):
    """RGP, LSG and their baselines on the weights in `targets`; every other trainable parameter at full rank.

    Args:
        targets: Rank and sides by parameter name.
        source: What the carriers are the principal directions of: the "weight" (LSG), its "history" W_t - W_0 after
            `warmup_steps` on the weight (RGP), or nothing, "random" (RGP-random).
        power_iterations: Iterations of Algorithm 2.
        refresh: Steps between two computations of carriers and importance.
        sparsity: Share p of the rows of dL and of the columns of dR that is dropped (LSG), from step `sparsity_start`
            on. Without carriers (rank None), the share of the elements of the weight.
        seed: Public; the start of the power method depends on the seed, the step and the name of the weight.

    Guarantee: names and shapes of the blocks depend only on the step and the settings, carriers and kept neurons also
    on the weights; nothing here reads a record before it is clipped.

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
        self.targets = dict(targets)
        self.source = source
        self.power_iterations = power_iterations
        self.refresh = refresh
        self.warmup_steps = warmup_steps
        self.sparsity = sparsity
        self.sparsity_start = sparsity_start
        self.seed = seed
        self.start: dict[str, Tensor] = {}  # W_0, for source="history"
        self.carriers: dict[str, LowRank | Submatrix] = {}
        self._sparse = False

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().attach(parameters)
        for name in self.targets:
            if name not in self.parameters:
                raise ValueError(f"`{name}` must be trainable to have carriers, got a frozen or absent parameter.")
        self.carriers = {}
        self.blocks = self.blocks_at(0)

    # ---- what is released

    def blocks_at(self, step: int) -> dict[str, torch.Size]:
        """Every block of a step, by name: the carriers of the targets, then the other parameters."""
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

    def gradient(self, name: str, sums: Mapping[str, Tensor]) -> Tensor:
        if name not in self.carriers:
            return sums[name]
        parts = {side: sums[f"{name}:{side}"] for side in "LRS" if f"{name}:{side}" in sums}
        return self.carriers[name].reconstruct(parts).view(self.parameters[name].shape)

    # ---- public quantities: carriers and importance, from the weights

    @torch.no_grad()
    def begin_step(self, step: int) -> None:
        if self.source == "history" and not self.start:
            self.start = {name: self.parameters[name].detach().clone() for name in self.targets}
        sparse = self._sparsity(step) > 0
        if not self.carriers or step % self.refresh == 0 or sparse != self._sparse:
            self._sparse = sparse
            self.blocks = self.blocks_at(step)
            self.carriers = dict(self._compute(step))

    def _compute(self, step: int) -> Iterator[tuple[str, LowRank | Submatrix]]:
        groups: dict[tuple, list[str]] = {}  # weights of one shape share the orthonormalisation
        for name, target in self.targets.items():
            weight = self.parameters[name]
            if target.rank is None:
                rows, columns = important(unsharded(weight), 1 - math.sqrt(1 - self._sparsity(step)))
                yield name, Submatrix(rows, columns, weight.shape)
            else:
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
        """Computes the matrix that the carriers of a weight come from, when needed: it is as large as the weight."""
        if self.source != "history" or step < self.warmup_steps:
            return lambda: self._matrix(name)

        def moved() -> Tensor:
            return self._matrix(name) - widen(unsharded(self.start[name]).flatten(1))

        return moved if moved().any() else lambda: self._matrix(name)

    def _gaussian(self, name: str, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Starts (rows, r) and (r, columns), equal on every rank and in every run with this seed."""
        generator = public_generator(self.seed, step, name)
        weight = self.parameters[name]
        dtype = accumulation_dtype(weight)
        right = torch.randn(rank, weight.shape[1:].numel(), generator=generator, dtype=dtype)
        left = torch.randn(weight.shape[0], rank, generator=generator, dtype=dtype)
        return left.to(weight.device), right.to(weight.device)

    # ---- W_0, which a resumed run reads back

    @property
    def start_bytes(self) -> int:
        """Memory of W_0: as much as the targeted weights with source="history", otherwise none."""
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
                f"`{path}` must exist: source='history' takes carriers from W_t - W_0, and the file holds W_0. Restore"
                " it from the folder of that run, or start a new run."
            )
        start = load_file(path)
        for name in self.targets:
            if name not in start or start[name].shape != self.parameters[name].shape:
                raise ValueError(f"`{path}` must fit the model, got `{name}` missing or with a different shape.")
        return {name: like(start[name], self.parameters[name]) for name in self.targets}
