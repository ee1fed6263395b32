"""Two evaluations of the same records that ought to give the same losses and the same gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .bookkeeper import BookKeeper, rows_per_record
from .persample import PerSample, sq_norms
from .sketch import distances, sketch
from .undisturbed import nudged, seed_all

Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]

SAME_LOSS = 1e-5  # relative difference of two losses that ought to be the same number
SAME_GRADIENT = 1e-5  # relative distance of two gradients that ought to be the same
FLOOR = 1e-6  # and the distance of tiny ones, of the clip norm after clipping
ROUNDED = 1e-4  # what both may be where the measured rounding explains it
ROUNDING = 10  # times what the last bits of the weights change
COARSE = 1000  # times as much in half precision, which is left under FSDP2 only


class SelfCheckError(RuntimeError):
    """The model's per-sample gradients are not exact, or its records are not independent."""


@dataclass(frozen=True)
class Run:
    """What one backward pass of the engine gives: losses (N,), and by parameter squared norms (N,) and sketches.

    `batch`, `seed` and `kept` (rows) say how to repeat it.
    """

    losses: Tensor
    squares: dict[str, Tensor]
    sketches: dict[str, Tensor]
    batch: Batch
    seed: int = 0
    kept: slice = field(default_factory=lambda: slice(None))

    @classmethod
    def of(cls, losses: Tensor, entries: Mapping[str, PerSample], batch: Batch, seed: int = 0) -> "Run":
        sketches = {name: sketch(value) for name, value in entries.items()}
        return cls(losses.detach(), sq_norms(entries), sketches, batch, seed)

    def rows(self, rows: slice) -> "Run":
        """Some of the records of a run of all rows of its batch."""
        squares, sketches = ({name: x[rows] for name, x in part.items()} for part in (self.squares, self.sketches))
        return Run(self.losses[rows], squares, sketches, self.batch, self.seed, rows)

    def norms(self, names: list[str]) -> Tensor:
        """Norms (N,) of the gradients of these parameters."""
        return torch.stack([self.squares[name].double() for name in names if name in self.squares]).sum(0).sqrt()

    def distances(self, other: "Run", names: list[str]) -> Tensor:
        """Distances (N,) to the gradients of the same records in another run."""
        names = [name for name in names if name in self.sketches or name in other.sketches]
        one, two = ({name: run.sketches.get(name, torch.zeros(1, 1)) for name in names} for run in (self, other))
        return distances(one, two)


@dataclass(frozen=True)
class Comparison:
    """Compares runs of a model. What is clipped together is compared together."""

    model: nn.Module
    loss: Loss
    dtype: torch.dtype  # that the model computes in
    floor: float  # norm up to which clipping leaves gradients as they are, or scales them all alike (AUTO-S)
    groups: Mapping[str, list[str]]  # names of the trainable parameters that are clipped together

    @property
    def coarse(self) -> float:
        return 1 if self.dtype in (torch.float32, torch.float64) else COARSE

    def run(self, batch: Batch, seed: int = 0) -> Run:
        seed_all(seed)
        with BookKeeper(self.model, rows_per_record=rows_per_record(self.loss)) as book:
            losses = self.loss(self.model, batch)
            book.backward(losses)
            return Run.of(losses, book.entries(), batch, seed)

    def losses(self, batch: Batch, seed: int) -> Tensor:
        seed_all(seed)
        with torch.no_grad():
            return self.loss(self.model, batch)

    def same(self, where: str, run: Run, other: Run) -> None:
        """Demand that two runs give the same records the same losses and gradients."""
        self.same_losses(where, run.losses, other.losses)
        nudge: Run | None = None
        for names in self.groups.values():
            reached = [name for name in names if name in run.squares or name in other.squares]
            if not reached:
                continue
            difference = run.distances(other, reached)
            norms = torch.maximum(run.norms(reached), other.norms(reached))
            if bool((difference <= self.coarse * (SAME_GRADIENT * norms + FLOOR * self.floor)).all()):
                continue
            excused = ROUNDED * self.coarse * (norms + self.floor)
            if not any(isinstance(p, DTensor) for p in self.model.parameters()):  # there, it is not measured
                nudge = nudge or self._nudged(other)
                excused = excused.minimum(ROUNDING * other.distances(nudge, reached))
            if not bool((difference <= excused).all()):
                worst = (difference / norms.clamp_min(1e-30)).max().item()
                raise SelfCheckError(
                    f"Records are not independent: gradients change by {100 * worst:.2g} % of their norm when a"
                    f" record is computed {where}. Something in the model or the loss (a batch statistic, padding,"
                    " routing) couples records. Remedy: `per_device_train_batch_size=1`, pad all records to one"
                    " length, or another model."
                )

    def _nudged(self, run: Run) -> Run:
        with nudged(self.model):
            return self.run(run.batch, run.seed).rows(run.kept)

    def same_losses(self, where: str, losses: Tensor, others: Tensor) -> None:
        """Demand the same losses. Where shapes are the same they round alike, so this is sharper than gradients."""
        one, two = losses.double(), others.double()
        difference = ((one - two).abs() / (one.abs() + two.abs()).clamp_min(1e-12)).max().item()
        if not difference <= SAME_LOSS * self.coarse:
            raise SelfCheckError(
                f"Records are not independent: losses change by {100 * difference:.2g} % when a record is computed"
                f" {where}. Something in the model or the loss (a mean over the batch, weights that are divided by"
                " their sum, padding) couples records. Remedy: a loss of each record by itself, or, if the"
                " task permits it, `per_device_train_batch_size=1`."
            )
