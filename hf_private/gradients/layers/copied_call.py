"""A torch function with one copy per record of what all records share.

Which axis of the activation holds the records is a guess. So a call with new shapes must give what it gives without
copies, and its batch is measured by `Attribution`: the gradient of copy n must depend on record n alone. A wrong guess
is an error, never a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .agreement import agreement, restored
from .attribution import UncoveredError
from .once import is_same, once
from .routed import Routed
from .shared import Shared, refusal
from .tapped import Tapped, is_in_place

# The gradients of a weight in them are formed for each record, which counts where they are more than the activations.
PRODUCTS = frozenset(
    "linear matmul mm bmm baddbmm __matmul__ __rmatmul__ einsum conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d lstm gru multi_head_attention_forward addmm tensordot grouped_mm".split()
)
FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)  # of a function that cannot run in parts
SIZED = ("expand", "repeat", "broadcast_to", "tile")  # `cls_token.expand(len(x), -1, -1)`


def with_copies(func: Callable, args: tuple, kwargs: dict, factor: bool = False) -> Any:
    """Call a function with a copy for each record in the place of each parameter.

    `factor` says that the copies are those of a narrow matrix, which need no warning, and are multiplied with rows of
    records, even of a layer below which nothing is trained.
    """
    leaves, spec = tree_flatten((args, kwargs))
    leaves = [Shared.of(x) if isinstance(x, Tapped) else x for x in leaves]
    shared = [x for x in leaves if isinstance(x, Shared)]
    call = CopiedCall(func, spec, leaves, shared, is_in_place(func, kwargs), factor)
    if not factor and getattr(func, "__name__", "") in PRODUCTS:
        largest = max((x.numel() for x in leaves if isinstance(x, Tensor) and not isinstance(x, Shared)), default=0)
        if any(call.records * x.numel() > largest for x in shared):
            call.tap.book.formed |= call.names & call.tap.book.copied
    if func.__class__.__name__ == "method-wrapper" and func.__name__ == "__get__":
        return call.run()
    if any(isinstance(x, Routed) for x in leaves):
        return call.run_routed()
    if getattr(func, "__name__", "") in SIZED and (result := call.run_sized()) is not None:
        return result
    if func is Tensor.__setitem__ and call.set_row(*args):
        return None
    plain = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and not isinstance(x, Shared)]
    if not any(call.axes(i) for i in plain):
        call.hints.add(())
        return call.run()
    if call.hints == {()}:
        return call.run()  # as many rows as there are records, by chance
    return call.merge(plain)


class CopiedCall:
    """A function and its arguments; those in `shared` have a copy for each record."""

    def __init__(
        self, func: Callable, spec: Any, leaves: list[Any], shared: list[Shared], in_place: bool, factor: bool
    ) -> None:
        self.func, self.spec, self.leaves, self.shared = func, spec, leaves, shared
        self.tap, self.names = shared[0].tap, frozenset().union(*(s.entries for s in shared))
        self.new = any(s.fresh for s in shared)
        self.in_place, self.factor = in_place, factor
        if in_place and isinstance(leaves[0], Shared):
            leaves[0].own_memory()
        self.records, self.rows = self.tap.batch_size, self.tap.num_rows
        # The axes that such calls had where lengths left no choice, as in the self-check's batches: tried first.
        kinds = (func, str(spec), *map(_kind, leaves))
        self.hints: set[tuple] = self.tap.hints.setdefault(kinds, set())

    def refuse(self, why: str) -> UncoveredError:
        return refusal(self.names, self.tap, f"{getattr(self.func, '__name__', self.func)}: {why}")

    def axes(self, index: int) -> list[int]:
        """Where a plain tensor may have its records, likeliest first."""
        x = self.leaves[index]
        if x.dim() == 0 or x.numel() == 0:
            return []
        if self.func is F.multi_head_attention_forward and x.dim() == 3:
            return [1]  # (positions, records, width), by its definition
        lengths = (self.rows, self.tap.leading)
        front = x.shape[0] in lengths and x.dim() > 1
        if x.untyped_storage().data_ptr() in self.tap.book.constants:
            return []
        if not x.requires_grad:  # a mask, an index, or a frozen layer's output
            return [0] if front or self.factor and x.shape[0] % self.rows == 0 else []
        exactly = [a for a in range(x.dim()) if x.shape[a] == self.rows]
        scores = x.dim() == 4 and x.shape[2] == x.shape[3]  # (windows of all records, heads, query, key)
        if x.shape[0] % self.records == 0 and (front or scores or exactly[:1] not in ([0], [1])):
            exactly = [0, *exactly]
        elif x.shape[0] % self.records == 0:
            exactly = [*exactly, 0]
        several = [a for a in range(x.dim()) if x.shape[a] % self.rows == 0]  # (groups, tokens of all records, width)
        return list(dict.fromkeys([*exactly, *several]))

    def call(self, leaves: list[Any]) -> Any:
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.func(*args, **kwargs)

    def vmapped(self, inputs: list[Any], axes: list[int | None], loop: bool = False) -> Any:
        """The call for each record, of the tensors that have an axis; results (N, ...)."""
        mapped = [i for i, axis in enumerate(axes) if axis is not None]

        def one(*tensors: Tensor) -> Any:
            leaves = list(inputs)
            for i, x in zip(mapped, tensors, strict=True):
                leaves[i] = x
            return self.call(leaves)

        tensors, dims = [inputs[i] for i in mapped], tuple(axes[i] for i in mapped)
        try:
            if not loop:
                return torch.vmap(one, in_dims=dims, randomness="different")(*tensors)
        except FAILURES as error:
            if isinstance(error, UncoveredError):
                raise
        try:  # what vmap does not know: a loop over the records
            results = [one(*(x.select(d, n) for x, d in zip(tensors, dims, strict=True))) for n in range(self.records)]
            return tree_map(lambda *xs: torch.stack(xs) if isinstance(xs[0], Tensor) else xs[0], *results)
        except FAILURES as error:
            if isinstance(error, UncoveredError):
                raise
            raise self.refuse(str(error).splitlines()[0]) from error

    def run(self) -> Any:
        """A function of what all records share: its result is shared, too."""
        if self.in_place and not isinstance(self.leaves[0], Shared) and not self.take_in():
            raise self.refuse("it changes a tensor without the records in front")
        key = self.key()
        known = None if self.new else self.tap.merges.get(key)
        if known is None:
            known = self.tap.merges[key] = self.choose_for_all()
        return self.shared_result(known[1])

    def take_in(self) -> bool:
        """`matrix[index] = shared`, for a tensor that the model has just made, as OFT does: from now on it has a
        copy for each record, too. Its own values become NaN, so what does not ask for the copies cannot go unseen."""
        target: Any = self.leaves[0]
        own = type(target) is Tensor and target.is_floating_point() and not target.is_meta
        if not own or target.requires_grad or target._is_view():
            return False
        if target.untyped_storage().data_ptr() in self.tap.book.constants:
            return False
        value = self.wrap(target.expand(self.records, *target.shape).clone())
        target.fill_(torch.nan)
        target.__class__ = Shared
        target.__dict__.update(value.__dict__)
        return True

    def choose_for_all(self) -> tuple:
        """How to run the whole call for each record's copy, with the results and gradients of the call without."""
        for loop in (False, True):
            if self.agrees(self.for_all, loop) is not None:
                return "all", loop
        raise self.refuse("its result changes")

    def shared_result(self, loop: bool) -> Any:
        return tree_map(lambda x: self.wrap(x) if isinstance(x, Tensor) else x, self.for_all(self.leaves, loop))

    def for_all(self, leaves: list[Any], loop: bool) -> Any:
        places = [i for i, x in enumerate(leaves) if isinstance(x, Shared)]
        others = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, Shared)]
        copies = [leaves[i].copies for i in places]
        if not (loop or self.in_place or any(x.requires_grad for x in others)) and all(map(is_same, copies)):

            def call(*values: Tensor) -> Any:
                found = list(leaves)
                for i, x in zip(places, values, strict=True):
                    found[i] = x
                return self.call(found)

            return once(call, copies)
        inputs = [x.copies if isinstance(x, Shared) else x for x in leaves]
        return self.vmapped(inputs, [0 if isinstance(x, Shared) else None for x in leaves], loop)

    def key(self) -> tuple:
        return (self.func, self.records, self.rows, str(self.spec), *map(_signature, self.leaves))

    def wrap(self, copies: Tensor) -> Any:
        if not copies.requires_grad and not copies.is_floating_point():
            return copies[0]  # an index, a comparison: the same for all records
        value = Shared(copies, self.tap, self.names, self.new)
        memory = copies.untyped_storage().data_ptr()
        for other in self.shared:
            if is_same(other.copies) and other.copies.untyped_storage().data_ptr() == memory:  # one is a view
                other.aliases.append(value.aliases[0])
                value.aliases = other.aliases
        return value

    def run_sized(self) -> Tensor | None:
        """`expand` and `repeat` to one row per row of the batch."""
        first = self.leaves[0]
        sizes = [i for i, x in enumerate(self.leaves) if isinstance(x, int) and not isinstance(x, bool)]
        target = self.leaves[sizes[0]] if sizes else 0
        if not isinstance(first, Shared) or target not in (self.rows, self.tap.leading):
            return None
        repeats = self.func.__name__ in ("repeat", "tile")
        if not repeats and len(sizes) == first.dim() and first.shape[0] != 1:
            return None
        inputs: list[Any] = [x.copies if isinstance(x, Shared) else x for x in self.leaves]
        inputs[sizes[0]] = target // self.records
        return self.vmapped(inputs, [0 if isinstance(x, Shared) else None for x in self.leaves]).flatten(0, 1)

    def set_row(self, target: Any, index: Any, value: Any) -> bool:
        """`rows[n] = table`: record n's row takes its copy. Returns whether the call is one of these."""
        first = index[0] if isinstance(index, tuple) and index else index
        shared, of_all = isinstance(value, (Shared, Tapped)), isinstance(target, (Shared, Tapped))
        if of_all or not shared or type(first) is not int or len(target) != self.rows:
            return False
        key, attribution = self.key(), self.tap.book.attribution
        if self.new or key not in self.tap.merges:
            self.tap.merges[key] = ("row",)
            attribution.require()
        target[index] = self.shared[-1].copies[first % self.rows * self.records // self.rows]
        return True

    # -- where copies meet activations

    def merge(self, plain: list[int]) -> Any:
        """A function of both: an ordinary result, with the records where the activation has them."""
        key = self.key()
        known = None if self.new else self.tap.merges.get(key)
        if known is None:
            self.tap.book.attribution.require()
            known = self.tap.merges[key] = self.choose(plain)
        if known[0] == "all":
            return self.shared_result(known[1])
        axes, own_rows, loop, placed = known
        result = self.attempt(self.leaves, axes, own_rows, loop)
        if self.in_place:
            return self.leaves[0]
        flat, spec = tree_flatten(result)
        return tree_unflatten([restored(x, axis) for x, axis in zip(flat, placed, strict=True)], spec)

    def choose(self, plain: list[int]) -> tuple:
        """The first way to run the call whose results and gradients are those of the call without copies."""
        choices = self.choices(plain)
        for loop in (False, True):
            for axes, own_rows in choices:
                try:
                    placed = self.agrees(lambda x, loop, a=axes, o=own_rows: self.attempt(x, a, o, loop), loop, axes)
                except UncoveredError:
                    continue
                if placed is not None:
                    return axes, own_rows, loop, placed
        if self.in_place:
            raise self.refuse("its result changes")
        return self.choose_for_all()

    def agrees(self, run: Callable, loop: bool, axes: list[int | None] | None = None) -> list[int | None] | None:
        """Whether `run` gives what the call gives without copies: see `agreement`."""
        return agreement(self, lambda x: run(x, loop), axes is None)

    def choices(self, plain: list[int]) -> list[tuple[list[int | None], bool]]:
        """What to try: the axis of each argument, and whether of a copy with as many rows the record's own count."""
        options: dict[int, list[int | None]] = {i: [*self.axes(i)] or [None] for i in plain}
        attempts = max(len(o) for o in options.values())
        if attempts == 1:
            self.hints.add(tuple((i, o[0]) for i, o in options.items()))
        for i, likeliest in next(iter(self.hints)) if len(self.hints) == 1 else ():
            options[i] = list(dict.fromkeys([likeliest, *options[i]]))
        found = []
        for k in range(attempts):
            axes = [options[i][min(k, len(options[i]) - 1)] if i in options else None for i in range(len(self.leaves))]
            found += [(axes, True), (axes, False)] if self.have_rows(axes) else [(axes, False)]
        return found

    def have_rows(self, axes: list[int | None]) -> list[bool]:
        """Of each argument whether it is shared and yet has a row for each row of the batch; empty if none is."""
        mapped = [(x, axis) for x, axis in zip(self.leaves, axes, strict=True) if axis is not None]
        rank, (first, front) = max(x.dim() for x, _ in mapped), mapped[0]
        length = first.shape[front]
        found = [isinstance(x, Shared) and x.dim() == rank and x.shape[front] == length > 1 for x in self.leaves]
        return found if any(found) else []

    def attempt(self, leaves: list[Any], axes: list[int | None], own_rows: bool, loop: bool) -> Any:
        """The call for each record: results (N, ...) of what the record's rows give."""
        inputs, dims = [], []
        front = next(a for a in axes if a is not None)
        rows = self.have_rows(axes) if own_rows else [False] * len(axes)
        for x, axis, has_rows in zip(leaves, axes, rows, strict=True):
            if isinstance(x, Shared):
                inputs.append(_diagonal(x.copies, front, self.records) if has_rows else x.copies)
                dims.append(0)
            elif axis is not None:
                inputs.append(x.unflatten(axis, (self.records, -1)))
                dims.append(axis)
            else:
                inputs.append(x)
                dims.append(None)
        return self.vmapped(inputs, dims, loop)

    # -- rows in the order of their experts

    def run_routed(self) -> Any:
        """Rows that are not in the order of their records: padded to (N, most rows of one record, ...)."""
        routed = next(x for x in self.leaves if isinstance(x, Routed))
        route, inputs, dims = routed.route, [], []
        for x in self.leaves:
            if isinstance(x, Shared):
                inputs.append(x.copies)
                dims.append(0)
            elif isinstance(x, Tensor) and x.dim() and len(x) == len(routed):
                inputs.append(route.padded(x.as_subclass(Tensor)))
                dims.append(0)
            else:
                inputs.append(x)
                dims.append(None)
        return Routed.of(route.unpadded(self.vmapped(inputs, dims)), route)


def _kind(x: Any) -> Any:
    return (x.dim(), isinstance(x, Shared), x.requires_grad) if isinstance(x, Tensor) else None


def _signature(x: Any) -> Any:
    if isinstance(x, Shared):
        return ("shared", tuple(x.shape))
    if isinstance(x, Tensor):
        return (tuple(x.shape), x.requires_grad, x.dtype)
    return repr(x)


def _diagonal(copies: Tensor, axis: int, records: int) -> Tensor:
    """Of each record's copy (N, ...), the rows of the record itself, on `axis` of the value."""
    x = copies.unflatten(axis + 1, (records, -1))
    return x.diagonal(dim1=0, dim2=axis + 1).movedim(-1, 0)
