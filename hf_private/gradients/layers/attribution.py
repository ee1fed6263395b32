"""Which record each entry of a layer's output gradient belongs to: measured, not guessed from lengths.

A rule may write `ds` (the gradient of a layer's output) into the book only if it knows which axis holds the records.
Lengths do not tell: with 4 records and 8 tokens, an axis of 8 may hold tokens, or 2 entries of each record. So the
engine measures. Before the backward pass of the summed losses it runs one of the losses times weights w_n,

    ds    =     sum_m dL_m / ds          ds^w = sum_m w_m dL_m / ds,

and entry p belongs to record n exactly if ds^w_p = w_n ds_p: a sum over several records fails this for weights that
have nothing to do with them. The weights are powers of two with signs, so that both sides round alike, in any
precision. What passes is exact for this batch, whatever the layout; what passes for no axis is an error.

The first pass computes input gradients only. It runs when a layer is called in a way that was not measured before: in
the first batch of a model, and when the number of entries per row in a flattened axis is new. (A record is one row of
the model's input, unless it is a unit of several rows, of which the model does not know.) It needs no forward pass, so
it leaves random state, buffers and caches alone. Two alternatives were considered. A forward pass at other batch sizes
needs to know which axes of which inputs hold records, and shows how lengths scale, but not what a module does with a
copy of its parameter. Propagation of axes through aten operations needs a table of all of them.

A batch of one record needs no measurement: everything belongs to it.

What is remembered is taken for a property of the model. A model that orders whole records by their data, and back,
would be found in the first batch only if it changes their order there. The start-up self-check uses records of mixed
lengths for this reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.linalg import vector_norm

from hf_private.gradients.persample import widen

if TYPE_CHECKING:
    from hf_private.gradients.ragged import Route

    from .tap import Tap

PART = "@"  # between a parameter's name and the part of it: `experts.down_proj@3`, `lm_head.weight@T`
EXPERT = re.compile(rf"({PART}I)\d+")  # which of the experts a part is: see parts.py
Names = tuple[str | None, ...]  # of the parameters in one call
SMALLEST = 1e-30  # output gradients below this are no evidence


class UncoveredError(RuntimeError):
    """A trainable parameter is used in a way whose per-sample gradient is not covered exactly."""


@dataclass
class Layout:
    """Where a layer has its records, and for which numbers of entries per row that was measured."""

    axis: int | None  # None: not always on the same, so that every batch must be measured
    calls: dict[int, int] = field(default_factory=dict)  # by entries per row

    def covers(self, leading: torch.Size, records: int, rows: int) -> bool:
        """Whether this was measured. The order inside a flattened axis may depend on data (routing to experts), so it
        is measured again at the calls 1, 2, 4, 8, ..."""
        if self.axis is None:
            return False
        entries = entries_per_row(leading[self.axis], records, rows)
        if entries not in self.calls:
            return False
        if entries > 1:
            self.calls[entries] = calls = self.calls[entries] + 1
            return calls & (calls - 1) != 0
        return True


def entries_per_row(length: int, records: int, rows: int) -> int:
    """Entries of each row, or of each record if there is one of each; 0 if neither divides an axis of this length.

    >>> entries_per_row(8, 2, 4), entries_per_row(2, 2, 4), entries_per_row(6, 2, 4)
    (2, 1, 0)
    """
    if length == records:
        return 1
    entries, rest = divmod(length, rows)
    return 0 if rest else entries


MODELS: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, dict[tuple, Layout]]] = WeakKeyDictionary()
MERGES: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, dict[tuple, tuple]]] = WeakKeyDictionary()
HINTS: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, dict[tuple, set]]] = WeakKeyDictionary()


class Attribution:
    """Finds the record axis of every use of a trainable parameter, for one book.

    Rules `announce` a use in the forward pass and ask for its `axis` in the backward pass. The book calls `begin` when
    the model is called, and `measure` before the backward pass of the summed losses.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layouts = MODELS.setdefault(model, WeakKeyDictionary())
        self._merges = MERGES.setdefault(model, WeakKeyDictionary())
        self._hints = HINTS.setdefault(model, WeakKeyDictionary())
        self._inputs: frozenset[tuple] = frozenset()
        self._new = False  # a use was announced that was not measured before
        self._recording = False
        self._weights: Tensor | None = None
        self._weighted: dict[tuple[Tap, Names], list[Tensor]] = {}

    def layouts(self, module: nn.Module) -> dict[tuple, Layout]:
        """What is known of a module: layouts by the inputs of the model, names of parameters, and rank."""
        return self._layouts.setdefault(module, {})

    def merges(self, module: nn.Module) -> dict[tuple, tuple]:
        """Where activations had their records when they met copies of a module's parameters, by call."""
        return self._merges.setdefault(module, {})

    def hints(self, module: nn.Module) -> dict[tuple, set]:
        """Where activations had their records when lengths left no choice, by kind of call."""
        return self._hints.setdefault(module, {})

    def begin(self, args: tuple, kwargs: dict) -> None:
        """Note the inputs of the model: other names or ranks may mean other layouts."""
        named = (*enumerate(args), *kwargs.items())
        self._inputs = frozenset((key, x.dim()) for key, x in named if isinstance(x, Tensor))

    def announce(self, tap: Tap, names: Names, leading: torch.Size) -> bool:
        """Note a use of parameters whose output has the axes `leading`, features aside.

        Returns whether it must be measured.
        """
        records = tap.batch_size
        if records == 1:
            return False
        layout = tap.layouts.get(self._key(tap, names, len(leading)))
        if layout is None or not layout.covers(leading, records, tap.num_rows):
            self._new = True
            return True
        return False

    def _key(self, tap: Tap, names: Names, rank: int) -> tuple:
        """What a layout is remembered by. A module of experts uses each of them in the same way, and a batch may bring
        some of them rows of one record only, which show nothing."""
        kinds = tuple(name and EXPERT.sub(r"\1", name) for name in names) if tap.has_experts else names
        return self._inputs, kinds, rank

    def require(self) -> None:
        """Have this batch measured: copies of a parameter meet activations of new shapes."""
        self._new = True

    @property
    def is_due(self) -> bool:
        """Whether something in this batch was not measured before."""
        return self._new

    def measure(self, losses: Tensor, sharded: bool) -> bool:
        """Run the backward pass of weighted losses if one of the announced uses is new. Returns whether it ran."""
        self._weighted, self._weights = {}, None
        needed = self._needed_on_any_rank(losses.device) if sharded else self._new
        self._new = False
        if not needed or losses.is_meta:
            return False
        self._weights = weights(len(losses), losses)
        self._recording = True
        try:
            losses.backward(self._weights, retain_graph=True)
        finally:
            self._recording = False
        return True

    def _needed_on_any_rank(self, device: torch.device) -> bool:
        """Under FSDP2 all ranks run the same passes, so they ask each other before each backward pass."""
        needed = torch.tensor(int(self._new), device=device)
        dist.all_reduce(needed, dist.ReduceOp.MAX)
        return bool(needed)

    def axis(
        self, tap: Tap, names: Names, ds: Tensor, rank: int, remember: bool = True, route: Route | None = None
    ) -> int | None:
        """The axis among the first `rank` of `ds` that holds the records, None in the pass of weighted losses.

        With a `route`, `ds` (rows, features) has its records on the first axis, in any order.
        """
        if self._recording:
            self._weighted.setdefault((tap, names), []).append(ds)
            return None
        if tap.batch_size == 1:
            return 0
        key = self._key(tap, names, rank)
        layout = tap.layouts.get(key)
        if ds.is_meta:
            return 0
        if self._weights is None and layout is not None and layout.axis is not None:
            return layout.axis
        queue = self._weighted.get((tap, names))
        found = self._find(tap, ds, queue.pop(0), rank, layout, route) if queue else None
        if found is None:
            shown = " and ".join(f"`{name.partition(PART)[0]}`" for name in names if name)
            raise UncoveredError(
                f"{shown} ({type(tap.module).__name__}): the gradient of its output, of shape"
                f" {tuple(ds.shape)}, cannot be divided among the {tap.batch_size} records of the batch. Either they"
                " share what the parameter is applied to (a table of positions, one value for all), or they are not"
                f" independent (a loss or a statistic over the batch). Remedy: {tap.remedy}."
            )
        axis, evidence = found
        if evidence and remember:
            if layout is None:
                layout = tap.layouts[key] = Layout(axis)
            elif layout.axis != axis:
                layout.axis = None
            length = tap.batch_size if route else ds.shape[axis]
            if entries := entries_per_row(length, tap.batch_size, tap.num_rows):
                layout.calls.setdefault(entries, 1)
        return axis

    def _find(
        self, tap: Tap, ds: Tensor, weighted: Tensor, rank: int, layout: Layout | None, route: Route | None
    ) -> tuple[int, bool] | None:
        """An axis along which `weighted` is `ds` times the records' weights, and whether that can be relied on later:
        it is the only one, and two records or more say so. None if there is no such axis."""
        if ds.shape != weighted.shape:
            return None
        assert self._weights is not None, "`weighted` is of a pass with weights"
        records, w = tap.batch_size, self._weights.to(widen(ds))
        limit = torch.finfo(ds.dtype).eps ** 0.5
        if route is not None:
            fits, reached = _scales(widen(ds), widen(weighted), w[route.records], limit)
            return (0, len(route.records[reached].unique()) > 1) if fits else None
        fitting, shown = [], 0
        for axis in sorted(range(rank), key=lambda axis: layout is not None and axis != layout.axis):
            if ds.shape[axis] % records:
                continue
            plain, scaled = (widen(x).movedim(axis, 0).reshape(records, -1) for x in (ds, weighted))
            fits, reached = _scales(plain, scaled, w, limit)
            if fits:
                fitting.append(axis)
                shown = int(reached.sum())
        return (fitting[0], len(fitting) == 1 and shown > 1) if fitting else None


def _scales(plain: Tensor, scaled: Tensor, w: Tensor, limit: float) -> tuple[bool, Tensor]:
    """Whether each row of `scaled` is that of `plain` times its weight, and which rows are evidence of it."""
    length, error = vector_norm(plain, dim=1), vector_norm(scaled - w.unsqueeze(1) * plain, dim=1)
    finite = torch.isfinite(length)  # a record that is not finite is removed later, and shows nothing
    fits = bool(((error <= limit * length * w.abs() + SMALLEST) | ~finite).all())
    return fits, (length > SMALLEST) & finite


def weights(records: int, like: Tensor) -> Tensor:
    """Weights (N,) of +-2^-k in a random order: distinct for 16 records, and without order for more."""
    generator = torch.Generator().manual_seed(records)
    values = torch.tensor([sign * 2.0**-k for k in range(8) for sign in (1, -1)])
    rounds = [torch.randperm(16, generator=generator) for _ in range(records // 16 + 1)]
    return values[torch.cat(rounds)[:records]].to(like)
