"""RGP and LSG: each targeted weight is trained through two thin matrices, its gradient carriers (lowrank.py).

Carriers and importance come from what is public: the weights, because every earlier gradient got noise; the noised
gradients themselves; gradients of public records; or a public seed. The forward pass is that of the plain model, since
W = L R + (W - L R), and the inputs of a layer are dropped inside the backward pass.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_private.gradients.method import Method
from hf_private.gradients.persample import PerSample, widen
from hf_private.gradients.tensors import accumulation_dtype, like, sent, unsharded
from hf_private.methods.subspace import Books, public_generator

from .lowrank import Elements, LowRank, Submatrix, important, kept, power_method
from .sources import Momentum, public_gradients, refresh_averages
from .state import START, load_carriers, read_start, save_carriers, write_tensors

MASKS = ("neurons", "elements")
SOURCES = ("weight", "history", "momentum", "public", "random")


@dataclass(frozen=True)
class Target:
    """How one weight is trained.

    `rank` is that of its carriers (None: no carriers, only the kept submatrix), `sides` says which carriers get
    gradients ("L", "R" or both), and `inputs_first` that the weight is stored as (in, out), as Conv1D does.
    """

    rank: int | None
    sides: tuple[str, ...] = ("L", "R")
    inputs_first: bool = False


class Carriers(Method):
    """RGP, LSG and their baselines on the weights in `targets`; every other trainable parameter at full rank.

    Args:
        targets: Rank and sides by parameter name.
        source: What the carriers are the principal directions of: the "weight" (LSG), its "history" W_t - W_0 after
            `warmup_steps` on the weight (RGP), an average of the noised gradients so far ("momentum"), the gradient of
            "public" records, or nothing, "random" (RGP-random).
        power_iterations: Iterations of Algorithm 2.
        refresh: Steps between two computations of carriers and importance.
        sparsity: Share p of the rows of dL and of the columns of dR that is dropped (LSG), from step `sparsity_start`
            on. Without carriers (rank None), the share of the elements of the weight.
        mask: Without carriers: keep rows and columns ("neurons") or single "elements" with large |W|.
        head_scale: Public weight of the full-rank parameters in the joint clip (`Method.scales`).
        books: Public gradients, for source="public". May be set later, before the first step.
        seed: Public; the start of the power method depends on the seed, the step and the name of the weight.

    Guarantee: names and shapes of the blocks depend only on the step and the settings; carriers and kept neurons also
    on released gradients, weights and public records. Nothing here reads a private record before it is clipped.

    >>> import torch
    >>> from torch import nn
    >>> method = Carriers({"weight": Target(rank=2)})
    >>> method.attach(dict(nn.Linear(6, 5, bias=False).named_parameters()))
    >>> method.blocks
    {'weight:L': torch.Size([2, 5]), 'weight:R': torch.Size([2, 6])}
    """

    drops_inputs = True

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
        mask: str = "neurons",
        head_scale: float = 1.0,
        books: Books | None = None,
        seed: int = 0,
    ) -> None:
        self.targets = dict(targets)
        self.source = source
        self.power_iterations = power_iterations
        self.refresh = refresh
        self.warmup_steps = warmup_steps
        self.sparsity = sparsity
        self.sparsity_start = sparsity_start
        self.mask = mask
        self.head_scale = head_scale
        self.books = books
        self.seed = seed
        self.takes_shards = source != "public"
        self.start: dict[str, Tensor] = {}  # W_0, for source="history"
        self.momentum: dict[str, Momentum] = {}  # for source="momentum"
        self.carriers: dict[str, LowRank | Submatrix | Elements] = {}
        self._sparse = False

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().attach(parameters)
        for name in self.targets:
            if name not in self.parameters:
                raise ValueError(f"`{name}` must be trainable to have carriers, got a frozen or absent parameter.")
        self.carriers = {}
        self.momentum = {}
        self.blocks = self.blocks_at(0)
        full = [name for name in self.parameters if name not in self.targets]
        self.scales = dict.fromkeys(full, self.head_scale) if self.head_scale != 1 else {}

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
                elements = torch.Size((kept(shape.numel(), sparsity),))
                blocks[f"{name}:S"] = elements if self.mask == "elements" else torch.Size((rows, columns))
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
        if name not in self.targets:
            return super().gradient(name, sums)
        carriers = self.carriers[name]
        parts = {side: sums[f"{name}:{side}"] for side in "LRS" if f"{name}:{side}" in sums}
        if self.source == "momentum" and isinstance(carriers, LowRank):
            self.momentum.setdefault(name, Momentum()).add(parts)  # noised: this is post-processing
        return carriers.reconstruct(parts).view(self.parameters[name].shape)

    # ---- public quantities: carriers and importance

    @torch.no_grad()
    def begin_step(self, step: int) -> None:
        if self.source == "history" and not self.start:
            self.start = {name: self.parameters[name].detach().clone() for name in self.targets}
        sparse = self._sparsity(step) > 0
        warmed_up = self.source == "history" and step == self.warmup_steps
        if not self.carriers or step % self.refresh == 0 or sparse != self._sparse or warmed_up:
            self._sparse = sparse
            self.blocks = self.blocks_at(step)
            self.carriers = dict(self._compute(step))

    def _compute(self, step: int) -> Iterator[tuple[str, LowRank | Submatrix | Elements]]:
        public = public_gradients(self.books, step, self.targets) if self.source == "public" else {}
        for rank in {target.rank for target in self.targets.values() if target.rank}:
            alike = [name for name, target in self.targets.items() if target.rank == rank and name in self.momentum]
            refresh_averages([(self.momentum[name], self.carriers[name]) for name in alike], rank, self.refresh)
        groups: dict[tuple, list[str]] = {}  # weights of one shape share the orthonormalisation
        for name, target in self.targets.items():
            weight = self.parameters[name]
            average = self.momentum.get(name)
            if target.rank is None:
                yield name, self._masked(unsharded(weight), self._sparsity(step))
            elif average is not None:
                yield name, self._low_rank(name, *average.directions(target.rank))
            else:
                key = (target.rank, *self._shape(name), weight.dtype, weight.device)
                groups.setdefault(key, []).append(name)
        iterations = 0 if self.source == "random" else self.power_iterations
        for (rank, *_), names in groups.items():
            matrices = [self._reader(name, step, public) for name in names]
            starts = [self._gaussian(name, step, rank) for name in names]
            for name, left, right in zip(names, *power_method(matrices, starts, iterations), strict=True):
                if self.targets[name].inputs_first:
                    left, right = right.t(), left.t()
                yield name, self._low_rank(name, left, right)

    def _masked(self, weight: Tensor, sparsity: float) -> Submatrix | Elements:
        """Sparse DP-SGD: the share 1 - p of a weight, as rows and columns or as elements."""
        if self.mask == "elements":
            return Elements.largest(weight, sparsity)
        return Submatrix(*important(weight, 1 - math.sqrt(1 - sparsity)), weight.shape)

    def _low_rank(self, name: str, left: Tensor, right: Tensor) -> LowRank:
        keep = important(unsharded(self.parameters[name]), self.sparsity) if self._sparse else ()
        return LowRank(left, right, self.targets[name].sides, keep)

    def _shape(self, name: str) -> tuple[int, int]:
        """(out, in) of a weight, however it is stored."""
        shape = self.parameters[name].shape
        rows, columns = shape[0], shape[1:].numel()
        return (columns, rows) if self.targets[name].inputs_first else (rows, columns)

    def _reader(self, name: str, step: int, public: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        """Computes the matrix (out, in) that the carriers of a weight come from, when needed: it is that large."""

        def oriented(value: Tensor) -> Tensor:
            matrix = widen(unsharded(value.detach()).flatten(1))
            return matrix.t() if self.targets[name].inputs_first else matrix

        def weight() -> Tensor:
            return oriented(self.parameters[name])

        def moved() -> Tensor:
            difference = weight() - oriented(self.start[name])
            return torch.where(difference.any(), difference, weight())  # the host does not wait for the answer

        if name in public:
            return lambda: oriented(public[name])
        return moved if self.source == "history" and step >= self.warmup_steps else weight

    def _gaussian(self, name: str, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Starts (out, r) and (r, in), equal on every rank, in every run with this seed, and for either layout."""
        generator = public_generator(self.seed, step, name)
        weight = self.parameters[name]
        outputs, inputs = self._shape(name)
        dtype = accumulation_dtype(weight)
        right = torch.randn(rank, inputs, generator=generator, dtype=dtype)
        left = torch.randn(outputs, rank, generator=generator, dtype=dtype)
        return sent(left, weight.device), sent(right, weight.device)

    # ---- what a resumed run reads back

    @property
    def start_bytes(self) -> int:
        """Memory of W_0: as much as the targeted weights with source="history", otherwise none."""
        weights = [self.parameters[name] for name in self.targets] if self.source == "history" else []
        return sum(p.numel() * p.element_size() for p in weights)

    def begin_run(
        self, folder: str | Path, resumes: bool = False, writes: bool = True, state: str | Path | None = None
    ) -> None:
        """Read back the carriers of a checkpoint. With source="history", write W_0 to `folder`, or read it back."""
        if resumes and self._has_state:
            self._load_state(state)
        if self.source != "history":
            return
        path = Path(folder, START)
        if resumes:
            start = read_start(path, {name: self.parameters[name].shape for name in self.targets})
            self.start = {name: like(start[name], self.parameters[name]) for name in self.targets}
            return
        self.start = {name: self.parameters[name].detach().clone().contiguous() for name in self.targets}
        whole = {}
        for name, start in self.start.items():
            start = unsharded(start)  # all ranks take part
            if writes:
                whole[name] = start
        if writes:
            write_tensors(path, whole)

    @property
    def _has_state(self) -> bool:
        return self.refresh > 1 or self.source == "momentum"

    def save_state(self, folder: str | Path, writes: bool = True) -> None:
        """Write carriers that later steps still use, and the average that the next ones come from."""
        if writes and self._has_state and self.carriers:
            save_carriers(folder, self.carriers, self.momentum)

    def _load_state(self, folder: str | Path | None) -> None:
        found = load_carriers(folder, {name: (self.parameters[name], t.sides) for name, t in self.targets.items()})
        if found is None:
            if self.source == "momentum":
                raise FileNotFoundError(
                    f"`{folder}` must hold the carriers of the checkpoint: source='momentum' takes the next ones from"
                    " the noised gradients before it. Resume from a checkpoint that has them, or start a new run."
                )
            return  # an older checkpoint: the next step computes carriers from the weights
        self.carriers, self.momentum = found
        self._sparse = any(part.sparse for part in self.carriers.values())
        self.blocks = self.blocks_at(self.sparsity_start if self._sparse else 0)
