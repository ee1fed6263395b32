"""FSDP2: each rank holds some rows of every weight, and of its clipped sum, noise and gradient.

`fully_shard` gathers the weights of a layer for its forward and backward pass, so per-sample gradients are computed
from whole layers and whole records, as on one rank. Three things differ. Every micro-batch is a series of collectives,
which all ranks must run equally often. The weighted sum of a per-sample gradient is reduced and scattered over the
ranks, layer by layer, so that each rank keeps its rows. And these rows get their own slice of the noise.

Blocks that are not parameters (gradient carriers) are small: every rank holds them whole.
"""

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial

from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.persample import Grams, PerSample
from hf_private.gradients.tensors import accumulation_dtype

from .ranks import Ranks

Batch = Any  # whatever the mechanism takes for a micro-batch
T = TypeVar("T")


class Rows(NamedTuple):
    """The rows `start` to `stop` of a parameter that this rank holds."""

    start: int
    stop: int


class Scattered(PerSample):
    """Per-sample gradients of a sharded parameter: a weighted sum covers all ranks, and each keeps its rows of it.

    Norms are those of `value`, the gradients of this rank's `num_records` records. `value` is None if they do not
    reach the parameter: this rank then contributes zeros, because the sum is a collective.
    """

    def __init__(self, value: PerSample | None, parameter: DTensor, num_records: int, ranks: Ranks) -> None:
        self.value = value
        self.parameter = parameter
        self.num_records = num_records
        self.ranks = ranks

    def _zeros(self, *shape: int) -> Tensor:
        p = self.parameter
        return torch.zeros(shape, dtype=accumulation_dtype(p), device=p.device_mesh.device_type)

    def sq_norm(self, grams: Grams | None = None) -> Tensor:
        return self._zeros(self.num_records) if self.value is None else self.value.sq_norm(grams)

    def weighted_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        p = self.parameter
        total = self._zeros(*p.shape) if self.value is None else self.value.weighted_sum(c).to(accumulation_dtype(p))
        self.ranks.reduced_bytes += total.numel() * total.element_size()
        parts = DTensor.from_local(total, p.device_mesh, [Partial()] * p.device_mesh.ndim, run_check=False)
        rows = parts.redistribute(placements=p.placements).to_local()
        return rows if into is None else into.add_(rows)

    def dense(self) -> Tensor:
        return self._zeros(self.num_records, *self.parameter.shape) if self.value is None else self.value.dense()

    def masked(self, keep: Tensor) -> "Scattered":
        value = None if self.value is None else self.value.masked(keep)
        return Scattered(value, self.parameter, self.num_records, self.ranks)


class Shards:
    """How the trainable parameters of a model are sharded over the ranks. Without FSDP2 they are all whole.

    Args:
        dummy: Makes a public micro-batch, for ranks that have run out of records while others have not.

    >>> shards = Shards(nn.Linear(3, 2), Ranks())
    >>> shards.sharded, list(shards.micro_batches([{"x": 1}]))
    (False, [({'x': 1}, True)])
    """

    def __init__(self, model: nn.Module, ranks: Ranks, dummy: Callable[[], Batch] | None = None) -> None:
        self.ranks = ranks
        self.dummy = dummy
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.parameters = trainable(model)
        _refuse_others(model, self.modules)
        self.rows: dict[str, Rows] = {}
        for name, p in self.parameters.items():
            if not isinstance(p, DTensor):
                continue
            self.rows[name] = _rows(name, p)
            if p.device_mesh.size() != ranks.world_size:  # two halves would add the same noise to different sums
                raise ValueError(
                    f"`{name}` must be spread over all {ranks.world_size} ranks, got a mesh of {p.device_mesh.size()}."
                    " Let the mesh of FSDP2 cover all ranks; with a replicated axis it may shard over some of them."
                )
        if self.sharded and dummy is None:
            raise ValueError(
                "`dummy` must be given for a model under FSDP2, got None: a rank without records needs a public batch"
                " to take part in the collectives of the others."
            )

    @property
    def sharded(self) -> bool:
        """Whether running the model is a collective."""
        return bool(self.modules)

    def micro_batches(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
        """This rank's micro-batches, and whether they count. Dummies, which do not count, follow until every rank has
        run out of records."""
        if not self.sharded:
            yield from ((batch, True) for batch in batches)
            return
        assert self.dummy is not None
        own = batches if isinstance(batches, Sized) else list(batches)
        count = self.ranks.largest(len(own))  # once: with nccl, the host waits for the answer
        yield from ((batch, True) for batch in own)
        yield from ((self.dummy(), False) for _ in range(count - len(own)))

    def scattered(
        self, entries: dict[str, PerSample], blocks: Iterable[str], num_records: int
    ) -> dict[str, PerSample]:
        """The entries of a micro-batch with those of sharded parameters as `Scattered`, in the same order on every
        rank, and complete: an entry that is missing here may exist on another rank."""
        if not self.sharded:
            return entries
        result: dict[str, PerSample] = {}
        for block in blocks:
            if block in self.rows:
                result[block] = Scattered(entries.pop(block, None), self._shard(block), num_records, self.ranks)
            elif block in entries:
                result[block] = entries.pop(block)
        return result

    def _shard(self, name: str) -> DTensor:
        p = self.parameters[name]
        assert isinstance(p, DTensor)
        return p

    def shape(self, block: str, shape: torch.Size) -> torch.Size:
        """The shape of this rank's part of a block."""
        rows = self.rows.get(block)
        return shape if rows is None else torch.Size((rows.stop - rows.start, *shape[1:]))

    def offsets(self) -> dict[str, int]:
        """The index of the first element of this rank's rows in the whole parameter; the noise depends on it."""
        return {name: rows.start * self.parameters[name].shape[1:].numel() for name, rows in self.rows.items()}

    def gradient(self, name: str, gradient: Tensor, whole: bool) -> Tensor:
        """The tensor for `.grad`: of a whole gradient this rank's rows, sharded like the parameter."""
        if name not in self.rows:
            return gradient.to(self.parameters[name].dtype)
        p = self._shard(name)
        if whole:
            gradient = gradient[slice(*self.rows[name])].clone()  # a view would keep the other rows in memory
        return DTensor.from_local(
            gradient.to(p.dtype), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )


def run_collectively(ranks: Ranks, model: nn.Module, action: Callable[..., T], *args: Any) -> T:
    """Run the model on all ranks; a failure on one rank is an error on all of them.

    Under FSDP2 every layer is a collective, so a rank that fails cannot tell the others in between. Its process must
    end, which ends the collective that the others wait in.
    """
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return action(*args) if sharded else ranks.run_on_all(action, *args)


def _rows(name: str, p: DTensor) -> Rows:
    """The rows of a parameter that this rank holds; sharding cuts the first axis as `torch.chunk` does."""
    mesh = p.device_mesh
    cut = [axis for axis, placement in enumerate(p.placements) if placement.is_shard()]
    if len(cut) > 1 or any(not p.placements[axis].is_shard(0) for axis in cut):
        raise ValueError(
            f"`{name}` must be sharded once, along its first axis, got placements {p.placements}. Tensor parallelism"
            " is not supported, because it splits the gradients of records over devices. Use FSDP2 with its default"
            " placement."
        )
    local = p.to_local()
    if local.device.type != mesh.device_type:
        raise ValueError(
            f"`{name}` must stay on {mesh.device_type!r}, got {local.device.type!r}. Turn off the CPU offload of"
            " FSDP2: sums and noise are computed on the device of the records."
        )
    if not cut:
        return Rows(0, p.shape[0])
    size = -(-p.shape[0] // mesh.size(cut[0]))
    start = min(mesh.get_local_rank(cut[0]) * size, p.shape[0])
    rows = Rows(start, min(start + size, p.shape[0]))
    if local.shape[0] != rows.stop - rows.start:
        raise RuntimeError(f"`{name}` must have rows {rows} on this rank, got {local.shape[0]} of them.")
    return rows


def _refuse_others(model: nn.Module, sharded: Iterable[nn.Module]) -> None:
    """Refuse unsupported ways to spread a model over ranks."""
    managed = {id(p) for module in sharded for p in module.parameters()}
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and id(p) not in managed:
            raise ValueError(
                f"`{name}` must be whole or sharded by FSDP2 (`fully_shard`), got another DTensor. Tensor parallelism"
                " is not supported, because it splits the gradients of records over devices."
            )
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                f"`{path}` must not be wrapped by FSDP1, which flattens parameters and so hides the layers. Use FSDP2"
                " (`fully_shard`, or fsdp_config={'version': 2})."
            )
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"`{path}` must not be a {type(module).__name__}, which reduces gradients itself. Pass the model"
                " inside it (`.module`); hf_private adds up the clipped sums of the ranks."
            )
