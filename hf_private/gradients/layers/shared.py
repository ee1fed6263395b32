"""Values that all records share: a parameter that no rule knows, and what is computed of parameters alone.

Each record gets its own copy, (N, *shape), behind a tensor that looks to the model like the value itself, of `shape`.
A function of such values runs for each record (torch.vmap), so a table of relative positions, the norm that is applied
to it and the projection of both stay values that all records share. Where one meets an activation, record n's copy
meets the rows of record n, and an ordinary tensor leaves: the gradient of the copies is the per-sample gradient.

Which axis of the activation holds the records is a guess. So a call with new shapes must give what it gives without
copies, and its batch is measured by `Attribution`: the gradient of copy n must depend on record n alone. A wrong guess
is an error, never a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from .attention import attention
from .attribution import PART, UncoveredError
from .routed import Routed
from .tap import AutogradOnlyError, Tap, copied
from .tapped import Tapped, part_of, plainly

# What asks for the shape or the kind of a tensor.
ATTRIBUTES = (
    "shape dtype device layout ndim itemsize nbytes requires_grad grad grad_fn is_leaf is_cpu is_cuda is_meta is_mps "
    "is_xpu is_sparse is_quantized is_nested is_mkldnn is_mtia is_ipu is_hpu is_vulkan is_maia is_xla is_sparse_csr "
    "_version names output_nr retains_grad _backward_hooks _post_accumulate_grad_hooks"
).split()
METADATA: set[Any] = {getattr(Tensor, name).__get__ for name in ATTRIBUTES if hasattr(Tensor, name)} | {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.is_contiguous, Tensor.get_device,
    Tensor.storage_offset, Tensor.is_signed, Tensor.__hash__, Tensor.register_hook, Tensor.is_pinned,
    Tensor.untyped_storage, Tensor.data_ptr, Tensor.requires_grad_, torch.is_floating_point, torch.is_complex,
    torch.numel, torch.is_tensor,
}  # fmt: skip
# With a copy of a weight per record they take the memory of formed gradients.
PRODUCTS = frozenset(
    "linear matmul mm bmm baddbmm __matmul__ __rmatmul__ einsum conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d lstm gru multi_head_attention_forward addmm tensordot grouped_mm".split()
)
RANDOM = frozenset("dropout dropout1d dropout2d dropout3d alpha_dropout bernoulli rand_like randn_like".split())
DETACHES: set[Any] = {getattr(Tensor, "data").__get__, Tensor.detach, torch.detach}  # noqa: B009
SIZED = ("expand", "repeat", "broadcast_to", "tile")  # `cls_token.expand(len(x), -1, -1)`


class Shared(Tensor):
    """A value that all records share, of which each has its own copy."""

    copies: Tensor  # (N, *shape)
    tap: Tap  # of the parameter that it was made from
    entries: frozenset[str]  # names of all of them
    fresh: bool  # whether a use of one of them is new, so that results are checked

    @staticmethod
    def __new__(cls, copies: Tensor, tap: Tap, names: frozenset[str], fresh: bool) -> Shared:
        shared: Any = torch.Tensor._make_wrapper_subclass(
            cls, copies.shape[1:], dtype=copies.dtype, device=copies.device, requires_grad=copies.is_floating_point()
        )
        shared.copies, shared.tap, shared.entries, shared.fresh = copies, tap, names, fresh
        if copies.is_floating_point():  # what does not ask here first must not lose the gradient
            plainly(Tensor.register_hook, (shared, _Leaked(names, tap)), {})
        return shared

    @classmethod
    def of(cls, tapped: Tapped) -> Shared:
        """A parameter, once per record."""
        new = tapped.tap.announce((tapped.entry,), torch.Size([tapped.tap.batch_size]))
        copies = copied(tapped.tap, tapped.plain, tapped.entry)
        return cls(copies, tapped.tap, frozenset([tapped.entry]), new)

    def with_copies(self, copies: Tensor) -> Shared:
        return Shared(copies, self.tap, self.entries, self.fresh)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:  # pyrefly: ignore[bad-override]
        found = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Shared))
        raise _refusal(found.entries, found.tap, f"`{func}` takes it as it is")


class _Leaked:
    """A hook that refuses a gradient which did not come through the copies."""

    def __init__(self, names: frozenset[str], tap: Tap) -> None:
        self.names, self.tap = names, tap

    def __call__(self, grad: Tensor) -> None:
        raise _refusal(self.names, self.tap, "a function of its own takes it")


def _refusal(names: frozenset[str], tap: Tap, why: str) -> UncoveredError:
    shown = " and ".join(f"`{name.partition(PART)[0]}`" for name in sorted(names))
    return UncoveredError(
        f"{shown}: used in a way that no rule covers, and not with one copy per record ({why}). Remedy: {tap.remedy}."
    )


def dispatch(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Call a torch function of which an argument is a parameter, or made from parameters alone."""
    if func in METADATA:
        return plainly(func, args, kwargs)
    found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, (Tapped, Shared))]
    tap = found[0].tap
    if not tap.book.has_batch:
        return plainly(func, args, kwargs)
    rule = _rule(func, args, kwargs)
    if rule is not None:
        try:
            return rule(tap, *args, **kwargs)
        except AutogradOnlyError:
            pass
    if tap.lone or (isinstance(args[0] if args else None, Tapped) and _is_in_place(func)):
        return plainly(func, args, kwargs)
    if func in DETACHES:
        return args[0].plain if isinstance(args[0], Tapped) else args[0].copies[0].detach()
    parts = part_of(func, args, kwargs)
    if parts is not None:
        return parts
    return _with_copies(func, args, kwargs)


def _rule(func: Callable, args: tuple, kwargs: dict) -> Callable | None:
    """The rule of a function, if the parameters of the call are where it wants them."""
    from . import EITHER, INPUTS, RULES, TAKE_SHARED

    rule = RULES.get(func)
    if rule is None or rule is attention:  # attention takes parameters in any place
        return rule
    place, takes_shared = INPUTS.get(func, 0), func in TAKE_SHARED
    for index, x in enumerate((*args, *kwargs.values())):
        if isinstance(x, Shared) and not (index == place and takes_shared):
            return None
        if index == place and isinstance(x, Tapped) and not takes_shared and func not in EITHER:
            return None
    if func in EITHER:
        return rule if any(isinstance(x, Tapped) for x in args) else None
    parameters = [x for i, x in enumerate((*args, *kwargs.values())) if i != place and isinstance(x, Tapped)]
    return rule if parameters else None


def _is_in_place(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


# -- one copy per record


def _with_copies(func: Callable, args: tuple, kwargs: dict) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    leaves = [Shared.of(x) if isinstance(x, Tapped) else x for x in leaves]
    shared = [x for x in leaves if isinstance(x, Shared)]
    call = _Call(func, spec, leaves, shared)
    if getattr(func, "__name__", "") in PRODUCTS:
        call.tap.book.copied |= call.names
    if func.__class__.__name__ == "method-wrapper" and func.__name__ == "__get__":
        return call.run()
    if any(isinstance(x, Routed) for x in leaves):
        return call.run_routed()
    if getattr(func, "__name__", "") in SIZED and (result := call.run_sized()) is not None:
        return result
    plain = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and not isinstance(x, Shared)]
    if not any(call.axes(i) for i in plain):
        return call.run()
    return call.merge(plain)


class _Call:
    def __init__(self, func: Callable, spec: Any, leaves: list[Any], shared: list[Shared]) -> None:
        self.func, self.spec, self.leaves, self.shared = func, spec, leaves, shared
        self.tap, self.names = shared[0].tap, frozenset().union(*(s.entries for s in shared))
        self.new = any(s.fresh for s in shared)
        self.records, self.rows = self.tap.batch_size, self.tap.num_rows

    def refuse(self, why: str) -> UncoveredError:
        return _refusal(self.names, self.tap, f"{getattr(self.func, '__name__', self.func)}: {why}")

    def axes(self, index: int) -> list[int]:
        """Where a plain tensor may have its records, likeliest first."""
        x = self.leaves[index]
        if x.dim() == 0 or x.numel() == 0:
            return []
        lengths = (self.rows, self.tap.leading)
        front = x.shape[0] in lengths and x.dim() > 1
        if x.untyped_storage().data_ptr() in self.tap.book.constants:
            return []
        if not x.requires_grad:  # a mask, an index, or a frozen layer's output
            return [0] if front else []
        exactly = [a for a in range(x.dim()) if x.shape[a] == self.rows]
        scores = x.dim() == 4 and x.shape[2] == x.shape[3]  # (windows of all records, heads, query, key)
        if x.shape[0] % self.records == 0 and (front or scores or exactly[:1] not in ([0], [1])):
            exactly = [0, *exactly]
        elif x.shape[0] % self.records == 0:
            exactly = [*exactly, 0]
        return list(dict.fromkeys(exactly))

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
        except (RuntimeError, ValueError) as error:
            if isinstance(error, UncoveredError):
                raise
        try:  # what vmap does not know: a loop over the records
            results = [one(*(x.select(d, n) for x, d in zip(tensors, dims, strict=True))) for n in range(self.records)]
            return tree_map(lambda *xs: torch.stack(xs) if isinstance(xs[0], Tensor) else xs[0], *results)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, UncoveredError):
                raise
            raise self.refuse(str(error).splitlines()[0]) from error

    def run(self) -> Any:
        """A function of what all records share: its result is shared, too."""
        if _is_in_place(self.func) and not isinstance(self.leaves[0], Shared):
            raise self.refuse("it changes a tensor without the records in front")
        key = self.key()
        known = None if self.new else self.tap.merges.get(key)
        if known is None:
            known = next((("all", loop) for loop in (False, True) if self.agrees(self.for_all, loop)), None)
            if known is None:
                raise self.refuse("its result changes")
            self.tap.merges[key] = known
        flat = self.for_all(self.leaves, known[1])
        return tree_map(lambda x: self.wrap(x) if isinstance(x, Tensor) else x, flat)

    def for_all(self, leaves: list[Any], loop: bool) -> Any:
        inputs = [x.copies if isinstance(x, Shared) else x for x in leaves]
        return self.vmapped(inputs, [0 if isinstance(x, Shared) else None for x in leaves], loop)

    def key(self) -> tuple:
        return (self.func, self.records, self.rows, str(self.spec), *map(_signature, self.leaves))

    def wrap(self, copies: Tensor) -> Any:
        if not copies.requires_grad and not copies.is_floating_point():
            return copies[0]  # an index, a comparison: the same for all records
        return Shared(copies, self.tap, self.names, self.new)

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

    # -- where copies meet activations

    def merge(self, plain: list[int]) -> Any:
        """A function of both: an ordinary result, with the records where the activation has them."""
        key = self.key()
        known = None if self.new else self.tap.merges.get(key)
        if known is None:
            self.tap.book.attribution.require()
            known = self.tap.merges[key] = self.choose(plain)
        if known[0] == "all":
            return self.run()
        axes, own_rows, loop, placed = known
        result = self.attempt(self.leaves, axes, own_rows, loop)
        if _is_in_place(self.func):
            return self.leaves[0]
        flat, spec = tree_flatten(result)
        return tree_unflatten([_restored(x, axis) for x, axis in zip(flat, placed, strict=True)], spec)

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
        if _is_in_place(self.func):
            raise self.refuse("its result changes")
        return ("all", False)

    def agrees(self, run: Callable, loop: bool, axes: list[int | None] | None = None) -> list[int | None] | None:
        """Whether `run` gives the results and gradients of the call without copies: the records' axis in each result.

        Without `axes`, each record's result must be that of the call.
        """
        if any(isinstance(x, Tensor) and x.is_meta for x in self.leaves):
            with torch.random.fork_rng():
                return _placed(run(self.leaves, loop), self.call(_one(self.leaves)), self.records, axes is None)
        in_place = _is_in_place(self.func)
        several, single = ([_leaf(x, one) for x in self.leaves] for one in (False, True))
        # Gradient checkpointing counts what is saved: this is not for it.
        keep = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.enable_grad(), keep, torch.random.fork_rng():
            copied, plain = (_changeable(leaves) if in_place else leaves for leaves in (several, single))
            wanted = self.call(plain)
            try:
                found = run(copied, loop)
            except UncoveredError:
                return None
            if in_place:
                found, wanted = copied[0], plain[0]
                placed: list[int | None] | None = [None]
                same = found.shape == wanted.shape
                if isinstance(found, Shared):
                    found = found.copies  # each of them, changed in place
                same = same and _close(found, wanted)
                pairs = [(found, wanted)]
            else:
                placed = _placed(found, wanted, self.records, axes is None)
                if placed is None:
                    return None
                restored = [_restored(x, a) for x, a in zip(tree_leaves(found), placed, strict=True)]
                pairs = [(x, y) for x, y in zip(restored, tree_leaves(wanted), strict=True) if isinstance(x, Tensor)]
                same = all(_close(x, y) for x, y in pairs)
            if getattr(self.func, "__name__", "") in RANDOM:
                return placed
            return placed if same and _same_gradients(pairs, several, single) else None

    def choices(self, plain: list[int]) -> list[tuple[list[int | None], bool]]:
        """What to try: the axis of each argument, and whether of a copy with as many rows the record's own count."""
        options = {i: self.axes(i) or [None] for i in plain}
        attempts = max(len(o) for o in options.values())
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


def _placed(result: Any, wanted: Any, records: int, for_all: bool) -> list[int | None] | None:
    """The axis of the records in each of the results, None for what all share; None if the results are not those."""
    axes: list[int | None] = []
    for x, y in zip(tree_leaves(result), tree_leaves(wanted), strict=True):
        if not isinstance(x, Tensor) or for_all:
            axes.append(None)
            if isinstance(x, Tensor) and x.shape[1:] != y.shape:
                return None
            continue
        fits = [
            a
            for a in range(y.dim())
            if x.dim() == y.dim() + 1
            and x.shape[a + 1] * records == y.shape[a]
            and all(x.shape[b + 1] == y.shape[b] for b in range(y.dim()) if b != a)
        ]
        close = [a for a in fits if _close(_restored(x, a), y)]
        if not close:
            return None
        axes.append(close[0])
    return axes


def _restored(x: Any, axis: int | None) -> Any:
    """Results (N, ...) with the records where the call has them."""
    return x.movedim(0, axis).flatten(axis, axis + 1) if isinstance(x, Tensor) and axis is not None else x


def _one(leaves: list[Any]) -> list[Any]:
    """The arguments if all records share one copy."""
    return [x.copies[0].detach() if isinstance(x, Shared) else x for x in leaves]


def _leaf(x: Any, one: bool) -> Any:
    """An argument by itself, outside the model's graph; of what is shared one copy, or all of them."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return _one([x])[0] if one else x
    if not isinstance(x, Shared):
        return x.detach().clone().requires_grad_(x.requires_grad)
    if one:
        return x.copies[0].detach().clone().requires_grad_()
    same = x.copies[:1].detach().expand_as(x.copies)  # dropout in training has made them differ
    return x.with_copies(same.clone().requires_grad_())


def _changeable(leaves: list[Any]) -> list[Any]:
    """For a call that changes its first argument: a copy of that."""
    first = leaves[0]
    return [first.with_copies(first.copies.clone()) if isinstance(first, Shared) else first.clone(), *leaves[1:]]


def _same_gradients(pairs: list[tuple[Tensor, Tensor]], several: list[Any], single: list[Any]) -> bool:
    """Whether gradients with copies, added up over the records, are those without."""
    pairs = [(x, y) for x, y in pairs if y.requires_grad and x.requires_grad]
    inputs = [
        (x.copies if isinstance(x, Shared) else x, y)
        for x, y in zip(several, single, strict=True)
        if isinstance(x, Tensor) and x.is_floating_point() and y.requires_grad
    ]
    if not pairs or not inputs:
        return True
    weights = [torch.randn_like(y) for _, y in pairs]
    copied = [w.expand_as(x) for w, (x, _) in zip(weights, pairs, strict=True)]
    found = torch.autograd.grad([x for x, _ in pairs], [x for x, _ in inputs], copied, allow_unused=True)
    wanted = torch.autograd.grad([y for _, y in pairs], [y for _, y in inputs], weights, allow_unused=True)
    for g, expected in zip(found, wanted, strict=True):
        if g is None or expected is None:
            if g is not None or expected is not None:
                return False
            continue
        each = pairs[0][0].dim() > pairs[0][1].dim()  # one result for each record, all with the same weights
        times = len(pairs[0][0]) if each else 1
        total = g.sum(0) if g.dim() > expected.dim() else g
        if not _close(total, times * expected):
            return False
    return True


def _close(x: Tensor, y: Tensor) -> bool:
    if x.is_meta or not x.is_floating_point():
        return True
    limit = torch.finfo(x.dtype).eps ** 0.5
    x, y = x.detach(), y.detach()
    sizes = y.abs()[torch.isfinite(y)]
    largest = float(sizes.max()) if sizes.numel() else 0.0
    return torch.allclose(x, y, rtol=limit, atol=limit * largest, equal_nan=True)


def own_losses(losses: Tensor) -> Tensor:
    """The losses (N,): if all records share them, the n-th of record n's copy."""
    if isinstance(losses, Shared) and losses.dim() == 1 and len(losses) == len(losses.copies):
        return losses.copies.diagonal()
    return losses
