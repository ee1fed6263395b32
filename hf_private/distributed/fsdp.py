"""FSDP2: each rank holds some rows of every weight, and of its clipped sum, noise and gradient.

`fully_shard` gathers a layer's weights for its forward and for its backward pass, so that per-sample gradients are
computed from whole layers and whole records, as on one rank. What differs is told here: every micro-batch is a series
of collectives, which all ranks must run equally often; a clipped sum is added up over the ranks by a reduce-scatter,
layer by layer, that leaves each rank its rows; and these rows get their own slice of the noise.

Blocks that are no parameter (gradient carriers) are small: every rank has them whole.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial

from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.tensors import accumulation_dtype

from .ranks import Ranks

Batch = Mapping[str, Any]
T = TypeVar("T")


class Rows(NamedTuple):
    """The rows `start` to `stop` of a parameter that this rank holds."""

    start: int
    stop: int


class Shards:
    """How the trainable parameters of a model lie on the ranks; without FSDP2 all of it is trivial.

    Args:
        dummy: Makes a public micro-batch, for ranks that have run out of records while others have not.

    >>> shards = Shards(nn.Linear(3, 2), Ranks())
    >>> shards.sharded, list(shards.micro_batches([{"x": 1}]))
    (False, [({'x': 1}, True)])
    """

    def __init__(self, model: nn.Module, ranks: Ranks, dummy: Callable[[], Batch] | None = None) -> None:
        self.ranks, self.dummy = ranks, dummy
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.parameters = trainable(model)
        _refuse_others(model, self.modules)
        self.rows = {name: _rows(name, p) for name, p in self.parameters.items() if isinstance(p, DTensor)}
        for name in self.rows:
            mesh = self.parameters[name].device_mesh
            if mesh.size() != ranks.world_size:  # two halves would add the same noise to different sums
                raise ValueError(
                    f"`{name}` must be spread over all {ranks.world_size} ranks, got a mesh of {mesh.size()}. Let the"
                    " mesh of FSDP2 cover all ranks; with a replicated axis it may shard over some of them."
                )
        if self.sharded and dummy is None:
            raise ValueError(
                "`dummy` must be given for a model under FSDP2, got None: a rank without records needs a public batch"
                " to take part in the others' collectives."
            )

    @property
    def sharded(self) -> bool:
        """Whether running the model is a collective."""
        return bool(self.modules)

    def micro_batches(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
        """This rank's micro-batches, and whether they count: dummies, which do not, until all ranks have run out."""
        if not self.sharded:
            yield from ((batch, True) for batch in batches)
            return
        batches = iter(batches)
        while True:
            batch = next(batches, None)
            if not self.ranks.any(batch is not None):
                return
            yield (self.dummy(), False) if batch is None else (batch, True)

    def scattered(self, sums: Mapping[str, Tensor], blocks: Mapping[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
        """A micro-batch's clipped sums; of sharded parameters this rank's rows, added up over the ranks."""
        for block, shape in blocks.items():
            if block not in self.rows:
                if block in sums:
                    yield block, sums[block]
                continue
            p = self.parameters[block]
            dtype, device = accumulation_dtype(p), p.device_mesh.device_type
            total = sums[block].to(dtype) if block in sums else torch.zeros(shape, dtype=dtype, device=device)
            self.ranks.reduced_bytes += total.numel() * total.element_size()
            parts = DTensor.from_local(total, p.device_mesh, [Partial()] * p.device_mesh.ndim, run_check=False)
            yield block, parts.redistribute(placements=p.placements).to_local()

    def shape(self, block: str, shape: torch.Size) -> torch.Size:
        """The shape of what this rank holds of a block."""
        rows = self.rows.get(block)
        return shape if rows is None else torch.Size((rows.stop - rows.start, *shape[1:]))

    def offsets(self) -> dict[str, int]:
        """Where this rank's rows begin in the whole parameter, counted in elements: noise is a function of it."""
        return {name: rows.start * self.parameters[name].shape[1:].numel() for name, rows in self.rows.items()}

    def gradient(self, name: str, gradient: Tensor, whole: bool) -> Tensor:
        """What becomes `.grad`: of a whole gradient this rank's rows, as the parameter is sharded."""
        p = self.parameters[name]
        if name not in self.rows:
            return gradient.to(p.dtype)
        if whole:
            gradient = gradient[slice(*self.rows[name])].clone()  # not a view, which would keep the rest
        return DTensor.from_local(
            gradient.to(p.dtype), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )


def run_collectively(ranks: Ranks, model: nn.Module, action: Callable[..., T], *args: Any) -> T:
    """Run the model on all ranks; if that fails on one it is an error on all.

    Under FSDP2 every layer is a collective: a rank that fails cannot say so in between. It must end, and with it the
    collective that the others are in.
    """
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return action(*args) if sharded else ranks.run_on_all(action, *args)


def _rows(name: str, p: DTensor) -> Rows:
    """Which rows of a parameter this rank holds; sharding cuts the first axis as `torch.chunk` does."""
    mesh, cut = p.device_mesh, [axis for axis, placement in enumerate(p.placements) if placement.is_shard()]
    if len(cut) > 1 or any(not p.placements[axis].is_shard(0) for axis in cut):
        raise ValueError(
            f"`{name}` must be sharded along its first axis, once, got placements {p.placements}. Tensor parallelism"
            " is not supported: records' gradients would be split over devices. Use FSDP2 with its default placement."
        )
    if p.to_local().device.type != mesh.device_type:
        raise ValueError(
            f"`{name}` must stay on {mesh.device_type!r}, got {p.to_local().device.type!r}. Turn off the CPU offload"
            " of FSDP2: sums and noise are made where the records are."
        )
    if not cut:
        return Rows(0, p.shape[0])
    size = -(-p.shape[0] // mesh.size(cut[0]))
    start = min(mesh.get_local_rank(cut[0]) * size, p.shape[0])
    rows = Rows(start, min(start + size, p.shape[0]))
    if p.to_local().shape[0] != rows.stop - rows.start:
        raise RuntimeError(f"`{name}` must have rows {rows} on this rank, got {p.to_local().shape[0]} of them.")
    return rows


def _refuse_others(model: nn.Module, sharded: list[nn.Module]) -> None:
    """Ways to spread a model over ranks that are not supported."""
    managed = {id(p) for module in sharded for p in module.parameters()}
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and id(p) not in managed:
            raise ValueError(
                f"`{name}` must be whole or sharded by FSDP2 (`fully_shard`), got a DTensor of something else. Tensor"
                " parallelism is not supported: records' gradients would be split over devices."
            )
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                f"`{path}` is wrapped by FSDP1, which flattens parameters, so that layers cannot be told apart. Use"
                " FSDP2 (`fully_shard`, or fsdp_config={'version': 2})."
            )
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"`{path}` is a {type(module).__name__}: it would reduce gradients by itself. Pass the model inside it"
                " (`.module`); the ranks' clipped sums are added up here."
            )
