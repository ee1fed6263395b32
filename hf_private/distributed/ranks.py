"""Several processes, one mechanism: shared keys, one sum, and errors that reach every rank.

Each rank computes the clipped sum of its share of one Poisson draw. The sums are added over the ranks. Only then noise
is added, once: every rank draws the same noise from the same key. So all ranks get the same update, which equals the
update of a single rank on the whole draw.

All ranks and the network between them are trusted: they exchange keys, and sums without noise.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_private.gradients.tensors import BITS, local
from hf_private.randomness import Key

T = TypeVar("T")

BUCKET = 1 << 24  # elements that travel together: 64 MB of float32
CHECK_EVERY = 100  # steps between two comparisons of the ranks' weights


class RankError(RuntimeError):
    """Another rank failed, or the ranks disagree; the run stops on all of them."""


class Ranks:
    """The processes that train together: torch's process group, or this process alone if there is none.

    Every method is a collective: all ranks call it, in the same order.

    >>> ranks = Ranks()
    >>> ranks.rank, ranks.world_size, ranks.run_on_all(lambda: "done")
    (0, 1, 'done')
    """

    def __init__(self) -> None:
        running = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if running else 0
        self.world_size = dist.get_world_size() if running else 1
        self.reduced_bytes = 0  # sent by this rank for the sums of the last step
        self._until_check = 0

    @classmethod
    def alone(cls) -> "Ranks":
        """This process alone, even if there are others."""
        ranks = cls()
        ranks.rank = 0
        ranks.world_size = 1
        return ranks

    @property
    def device(self) -> torch.device:
        """The device of small messages: the CPU, unless the backend cannot send from it (nccl)."""
        if self.world_size == 1 or "cpu:" in dist.get_backend_config():
            return torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None, "a backend without CPU support has an accelerator"
        return accelerator

    # ---- shared values and errors

    def key(self) -> Key:
        """A secret key that all ranks share; rank 0 draws it from its operating system.

        A rank with another key is an error on all: it would draw records that others draw too, and its own noise.
        """
        key = Key.shared(self._of_first)
        self.assert_equal(key=key.stream("agreement").words(0, 2).tolist())  # these words reveal no other stream
        return key

    def _of_first(self, own: bytes) -> bytes:
        if self.world_size == 1:
            return own
        message = torch.tensor(list(own), dtype=torch.uint8, device=self.device)
        dist.broadcast(message, src=0)
        return bytes(message.tolist())

    def any(self, flag: bool) -> bool:
        """Whether the flag is True on at least one rank."""
        return bool(self.largest(int(flag)))

    def largest(self, number: int) -> int:
        """The largest of the numbers of all ranks."""
        if self.world_size == 1:
            return number
        message = torch.tensor(number, dtype=torch.int64, device=self.device)
        dist.all_reduce(message, dist.ReduceOp.MAX)
        return int(message)

    def run_on_all(self, action: Callable[..., T], *args: Any) -> T:
        """Run an action on every rank. If it fails on one rank, all ranks raise an error and nothing continues."""
        if self.world_size == 1:
            return action(*args)
        result: list[T] = []
        error = None
        try:
            result.append(action(*args))
        except Exception as caught:  # whatever it is, the others wait for this rank's answer
            error = caught
        if self.any(error is not None):
            messages: list[str | None] = [None] * self.world_size
            dist.all_gather_object(messages, None if error is None else f"{type(error).__name__}: {error}")
            if error is not None:
                raise error
            rank, message = next((rank, text) for rank, text in enumerate(messages) if text is not None)
            raise RankError(f"Rank {rank} failed, so this one (rank {self.rank}) stops too. {message}")
        return result[0]

    def run_on_first(self, action: Callable[..., T], *args: Any) -> T:
        """Run an action on rank 0 only, such as reading the ledger, and return its result on all ranks."""
        if self.world_size == 1:
            return action(*args)
        box = [self.run_on_all(action, *args) if self.rank == 0 else self.run_on_all(lambda: None)]
        dist.broadcast_object_list(box, src=0)
        return cast(T, box[0])

    def assert_equal(self, **values: Any) -> None:
        """Refuse values that differ between ranks."""
        if self.world_size == 1:
            return
        found: list[dict[str, Any]] = [{}] * self.world_size
        dist.all_gather_object(found, values)
        for name in values:
            for rank, other in enumerate(found):
                if other[name] != found[0][name]:
                    raise ValueError(
                        f"`{name}` must be the same on all ranks, got {found[0][name]!r} on rank 0 and {other[name]!r}"
                        f" on rank {rank}. Start every rank with the same script, data and settings."
                    )

    # ---- the sum over ranks

    def all_reduce_(self, sums: Mapping[str, Tensor]) -> None:
        """Add the blocks of all ranks, in place; the same blocks in the same order on every rank."""
        if self.world_size == 1:
            return
        self.reduced_bytes += sum(block.numel() * block.element_size() for block in sums.values())
        pending = []
        for bucket in _buckets(sums.values()):
            in_place = len(bucket) == 1 and bucket[0].is_contiguous()
            flat = bucket[0] if in_place else torch.cat([block.flatten() for block in bucket])
            work = dist.all_reduce(flat, async_op=True)
            assert work is not None, "only `async_op=False` returns None"
            pending.append((work, flat, [] if in_place else bucket))
        for work, flat, bucket in pending:
            work.wait()
            parts = flat.split([block.numel() for block in bucket]) if bucket else ()
            for block, part in zip(bucket, parts, strict=True):
                block.copy_(part.view(block.shape))

    # ---- equal weights

    def begin_step(self, parameters: Mapping[str, Tensor]) -> None:
        """Compare the weights of the ranks, at the first step and at every CHECK_EVERY-th."""
        self.reduced_bytes = 0
        if self._until_check == 0:
            self.check_weights(parameters)
        self._until_check = (self._until_check + 1) % CHECK_EVERY

    def check_weights(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise an error if a weight, or a shard of it, differs in any bit between the ranks that hold it."""
        if self.world_size > 1:
            self.run_on_all(self._compare, parameters)

    def _compare(self, parameters: Mapping[str, Tensor]) -> None:
        together: dict[Any, list[str]] = {}  # names by the group of ranks that hold equal values
        for name, p in parameters.items():
            for group in _holders(p):
                together.setdefault(group, []).append(name)
        differing: list[str] = []
        for group, names in together.items():
            own = torch.stack([fingerprint(local(parameters[name])) for name in names]).to(self.device)
            least, most = own.clone(), own.clone()
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            differing += [name for name, odd in zip(names, (least != most).any(1).tolist(), strict=True) if odd]
        if differing:
            raise RankError(
                f"`{differing[0]}` must be the same on all ranks, got different weights ({len(differing)} of"
                f" {len(parameters)} parameters differ). Something else than the private gradient updates them: an"
                " optimizer or a callback that acts on one rank, or devices of different kinds. Resume from the last"
                " checkpoint."
            )


def _holders(p: Tensor) -> list[dist.ProcessGroup | None]:
    """The groups of ranks that hold the same values as this one: all (None), or under FSDP2 the replicated axes."""
    if not isinstance(p, DTensor):
        return [None]
    return [p.device_mesh.get_group(axis) for axis, placement in enumerate(p.placements) if placement.is_replicate()]


def _buckets(blocks: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype and device, up to BUCKET elements; a larger block is alone."""
    bucket: list[Tensor] = []
    for block in blocks:
        if bucket:
            full = sum(other.numel() for other in bucket) + block.numel() > BUCKET
            differs = (block.dtype, block.device) != (bucket[0].dtype, bucket[0].device)
            if full or differs:
                yield bucket
                bucket = []
        bucket.append(block)
    if bucket:
        yield bucket


@torch.no_grad()
def fingerprint(x: Tensor) -> Tensor:
    """Two int64 numbers (2,) that change with nearly any change of `x`: the sums of its bits and of their squares."""
    total = torch.zeros(2, dtype=torch.int64, device=x.device)
    for piece in x.detach().contiguous().view(-1).split(BUCKET):
        bits = piece.view(BITS[piece.element_size()]).to(torch.int64)
        total += torch.stack([bits.sum(), (bits * bits).sum()])
    return total
