"""What a rule sees of the book: the records, a scalar that keeps the graph alive, and where to write."""

from collections.abc import Iterator
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn

from hf_private.gradients.persample import Dense, PerSample
from hf_private.gradients.ragged import Route

from .attribution import Attribution, Names, UncoveredError
from .once import expanded
from .routed import is_experts
from .tapped import Tapped

FREEZE = "freeze it (`parameter.requires_grad_(False)`)"
REMEDY = (
    f"{FREEZE}, or use micro-batches of one record (`per_device_train_batch_size=1`), where every parameter is exact"
)
SHARDED_REMEDY = f"{FREEZE}, or use DDP and micro-batches of one"


class Book(Protocol):
    """What the rules need of a BookKeeper."""

    graph_root: Tensor
    leading: int
    expanded: set[str]  # paths of embeddings whose positions (1, T) became (N, T)
    copied: set[str]  # parameters that no rule knows: each record has a copy where they are used
    formed: set[str]  # those of them that are multiplied with activations, so that large gradients are formed
    sharded: bool
    rows_per_record: int
    attribution: Attribution

    @property
    def has_batch(self) -> bool: ...
    @property
    def constants(self) -> set[int]: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def drops_inputs(self) -> bool: ...
    def observe(self, name: str, value: PerSample) -> None: ...


class AutogradOnlyError(UncoveredError):
    """A use that no rule covers, but autograd does in a batch of one: its gradient is that of the one record."""


class Tap:
    """Connects one module (its trainable parameters, by attribute name) with the book's entries (by full name)."""

    def __init__(self, book: Book, module: nn.Module, path: str, names: dict[str, str]) -> None:
        self.book = book
        self.module = module
        self.path = path
        self.names = names
        self.layouts = book.attribution.layouts(module)
        self.has_experts = is_experts(type(module))
        self.merges, self.hints = book.attribution.merges(module), book.attribution.hints(module)
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
    def num_rows(self) -> int:
        """Rows of the batch: the records, times the rows that each of them has."""
        return self.book.num_rows

    @property
    def lone(self) -> bool:
        """One record, whose gradient autograd may compute: not under FSDP2, where it would be that of all ranks."""
        return self.batch_size == 1 and not self.book.sharded

    @property
    def leading(self) -> int:
        """Length of the leading axis inside the model: the rows, times the choices of a multiple-choice head."""
        return self.book.leading

    @property
    def remedy(self) -> str:
        """What helps against a refusal here: in a batch of one, not a batch of one."""
        if self.book.sharded:
            return SHARDED_REMEDY
        return FREEZE if self.batch_size == 1 else REMEDY

    def name(self, tensor: Tensor | None) -> str | None:
        """The book's name of a trainable parameter, None for any other tensor.

        Sharded training swaps the parameter objects around each forward, so there it is looked up.
        """
        if isinstance(tensor, Tapped) or is_computed(tensor):
            return tensor.entry  # pyrefly: ignore[missing-attribute]
        for local, (parameters, leaf) in self._places.items():
            if parameters[leaf] is tensor:
                return self.names[local]
        return None

    def place(self, tapped: dict[int, Any]) -> Iterator[tuple[dict, str, Tensor]]:
        """Put `Tapped` parameters in the places of those of this module, one for each of the model's parameters.

        Yields each place with the parameter that was there.
        """
        for local, (parameters, leaf) in self._places.items():
            parameter = parameters[leaf]
            assert parameter is not None, "a tap is for parameters that exist"
            if isinstance(parameter, Tapped):
                continue
            yield parameters, leaf, parameter
            if id(parameter) not in tapped:
                tapped[id(parameter)] = Tapped.of(parameter, self, self.names[local])
            parameters[leaf] = tapped[id(parameter)]

    def parameter(self, local: str) -> Tensor:
        parameters, leaf = self._places[local]
        parameter = parameters[leaf]
        assert parameter is not None, "a tap is for parameters that exist"
        return parameter

    @overload
    def detached(self, tensor: Tensor) -> Tensor: ...
    @overload
    def detached(self, tensor: Tensor | None) -> Tensor | None: ...
    def detached(self, tensor: Tensor | None) -> Tensor | None:
        """`tensor` outside the graph: a parameter of this module, or one that is frozen."""
        if tensor is None:
            return None
        if isinstance(tensor, Tapped) or is_computed(tensor):
            return tensor.plain  # pyrefly: ignore[missing-attribute]
        if tensor.requires_grad and self.name(tensor) is None:
            raise AutogradOnlyError(
                f"`{self.path}` ({type(self.module).__name__}) computes a weight of shape {tuple(tensor.shape)} from "
                f"trainable parameters before it is used. Remedy: {self.remedy}."
            )
        return tensor.detach()

    def observe(self, name: str, value: PerSample) -> None:
        self.book.observe(name, value)

    def copies(self, weight: Tensor | None) -> Tensor | None:
        """The copies (N, *shape) of a weight that is computed of parameters, which autograd leads to; else None."""
        return weight.copies if is_computed(weight) else None  # pyrefly: ignore[missing-attribute]

    def announce(self, names: Names, leading: torch.Size) -> bool:
        """Tell the book, in the forward pass, of a use whose output has the axes `leading`, then features.

        Returns whether it is new.
        """
        return self.book.attribution.announce(self, names, leading)

    def axis(
        self, names: Names, ds: Tensor, rank: int, remember: bool = True, route: Route | None = None
    ) -> int | None:
        """The axis among the first `rank` of an output gradient that holds the records; None: write nothing.

        With a `route`, that is the axis of its rows.
        """
        return self.book.attribution.axis(self, names, ds, rank, remember, route)

    def rows(self, x: Tensor, axis: int = 0) -> Tensor:
        """View `x` (leading axes, features) as (N, T, features), for records on `axis`.

        The axis holds one entry of each record, or several, one record after the other (OPT's tokens, the choices of a
        multiple-choice head, the rows of a person). That it does is measured by `Attribution`.
        """
        batch = self.batch_size
        if axis:
            x = x.movedim(axis, 0)
        if x.dim() == 3 and x.shape[0] == batch:
            return x
        if x.shape[0] % batch == 0 and x.shape[0] > 0:
            return x.reshape(batch, -1, x.shape[-1])
        raise UncoveredError(
            f"`{self.path}` ({type(self.module).__name__}) got an input of shape {tuple(x.shape)} in a batch of "
            f"{batch} records: no axis holds the records. Remedy: {self.remedy}."
        )


def is_computed(weight: Any) -> bool:
    """Whether a weight is a value that all records share (`shared.py`), not a parameter."""
    from .shared import Shared

    return type(weight) is Shared


def plain(parameter: Tensor) -> Tensor:
    """A parameter outside the graph."""
    return parameter.plain if isinstance(parameter, Tapped) else parameter.detach()


class _Copies(torch.autograd.Function):
    """One copy of a parameter per record; the gradient of the copies is the per-sample gradient."""

    @staticmethod
    def forward(ctx, graph_root: Tensor, parameter: Tensor, tap: Tap, name: str) -> Tensor:
        ctx.tap, ctx.parameter = tap, name
        return expanded(parameter, tap.batch_size)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple:
        (g,) = grad_outputs
        # A module that looks at the shape of its parameter shows that only if N is none of the parameter's lengths.
        remember = len(g) not in g.shape[1:]
        if ctx.tap.axis((ctx.parameter,), g, rank=1, remember=remember) is not None:
            ctx.tap.observe(ctx.parameter, Dense(g))
        return None, None, None, None


def copies(tap: Tap, local: str) -> Tensor:
    """`tap`'s parameter, once per row: (rows, *shape). The rows of one record share a copy."""
    copy = copied(tap, plain(tap.parameter(local)), tap.names[local])
    rows = tap.book.rows_per_record
    return copy if rows == 1 else copy.repeat_interleave(rows, 0)


def copied(tap: Tap, parameter: Tensor, name: str) -> Tensor:
    """A parameter of `tap` by its full name, once per record: (N, *shape)."""
    tap.announce((name,), torch.Size([tap.batch_size]))
    return _Copies.apply(tap.graph_root, parameter, tap, name)
