"""What a rule sees of the book: the records' number, a scalar that keeps the graph alive, and where to write."""

from typing import Protocol

import torch
from torch import Tensor, nn

from hf_private.gradients.persample import Dense, PerSample


class Book(Protocol):
    """What the rules need of a BookKeeper."""

    graph_root: Tensor
    leading: int
    expanded: set[str]
    sharded: bool

    @property
    def batch_size(self) -> int: ...
    @property
    def drops_inputs(self) -> bool: ...
    def observe(self, name: str, value: PerSample) -> None: ...


class UncoveredError(RuntimeError):
    """A trainable parameter is used in a way whose per-sample gradient is not covered exactly."""


REMEDY = (
    "freeze it (`parameter.requires_grad_(False)`), or use micro-batches of one record "
    "(`per_device_train_batch_size=1`), where every parameter is exact"
)


class Tap:
    """Connects one module (its trainable parameters, by attribute name) with the book's entries (by full name)."""

    def __init__(self, book: Book, module: nn.Module, path: str, names: dict[str, str]) -> None:
        self.book, self.module, self.path, self.names = book, module, path, names
        places = [(local, *local.rpartition(".")[::2]) for local in names]
        self._places = {local: (module.get_submodule(owner)._parameters, leaf) for local, owner, leaf in places}

    @property
    def graph_root(self) -> Tensor:
        """A scalar that requires a gradient: with all parameters detached nothing else keeps the graph alive."""
        return self.book.graph_root

    @property
    def batch_size(self) -> int:
        return self.book.batch_size

    @property
    def lone(self) -> bool:
        """One record, whose gradient autograd may compute: not under FSDP2, where it would be that of all ranks."""
        return self.batch_size == 1 and not self.book.sharded

    @property
    def leading(self) -> int:
        """Length of the leading axis inside the model: the records, times the choices of a multiple-choice head."""
        return self.book.leading

    def name(self, tensor: Tensor | None) -> str | None:
        """The book's name of a trainable parameter of this module, None for any other tensor.

        Looked up at the time of the call: sharded training swaps the parameter objects around each forward.
        """
        for local, (parameters, leaf) in self._places.items():
            if parameters[leaf] is tensor:
                return self.names[local]
        return None

    def parameter(self, local: str) -> Tensor:
        parameters, leaf = self._places[local]
        return parameters[leaf]

    def detached(self, tensor: Tensor | None) -> Tensor | None:
        """`tensor` outside the graph: a parameter of this module, or one that is frozen."""
        if tensor is None:
            return None
        if tensor.requires_grad and self.name(tensor) is None:
            raise UncoveredError(
                f"`{self.path}` ({type(self.module).__name__}) computes a weight of shape {tuple(tensor.shape)} from "
                f"trainable parameters before it is used. Remedy: {REMEDY}."
            )
        return tensor.detach()

    def observe(self, name: str, value: PerSample) -> None:
        self.book.observe(name, value)

    def rows(self, x: Tensor) -> Tensor:
        """View `x` (leading axes, features) as (N, T, features), records first.

        The leading axis is the batch, or the batch flattened with what follows it (OPT's tokens, the choices of a
        multiple-choice head); anything else has lost the records and is refused.
        """
        batch = self.batch_size
        if x.dim() == 3 and x.shape[0] == batch:
            return x
        if x.dim() >= 2 and x.shape[0] % batch == 0 and x.shape[0] > 0:
            return x.reshape(batch, -1, x.shape[-1])
        raise UncoveredError(
            f"`{self.path}` ({type(self.module).__name__}) got an input of shape {tuple(x.shape)} in a batch of "
            f"{batch} records: its first axis does not hold the records. Remedy: {REMEDY}."
        )


class _Copies(torch.autograd.Function):
    """One copy of a parameter per record; the gradient of the copies is the per-sample gradient."""

    @staticmethod
    def forward(ctx, graph_root: Tensor, parameter: Tensor, tap: Tap, name: str) -> Tensor:
        ctx.tap, ctx.parameter = tap, name
        return parameter.unsqueeze(0).repeat(tap.batch_size, *[1] * parameter.dim())

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple:
        ctx.tap.observe(ctx.parameter, Dense(g))
        return None, None, None, None


def copies(tap: Tap, local: str) -> Tensor:
    """`tap`'s parameter, once per record: (N, *shape)."""
    return _Copies.apply(tap.graph_root, tap.parameter(local).detach(), tap, tap.names[local])
