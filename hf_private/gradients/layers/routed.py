"""Mixtures of experts: rows in the order of their experts, and whose record each of them is.

An experts module gets the tokens of all records, (N * T, d), and picks rows for each expert. Which record a picked row
belongs to follows from the index it was picked with. `Routed` rows carry that along, through functions of which row i
of the result depends on row i alone. `Attribution` measures that the gradient of a row is that of its record. Linear
layers take the rows as they are (`ragged.py`), other rules pad them to (N, most rows of one record, d).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hf_private.gradients.ragged import Route

from .tapped import Tapped, leaves

if TYPE_CHECKING:
    from .tap import Tap

# Functions whose result has in row i what row i of their arguments gives, by name.
ROWWISE = frozenset(
    "linear matmul mm __matmul__ add sub mul div __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ neg "
    "exp relu gelu silu sigmoid tanh softplus softmax relu6 hardswish mish pow __pow__ clamp clamp_ clamp_min "
    "clamp_max square sqrt rsqrt abs minimum maximum where to float double half bfloat16 type type_as contiguous "
    "clone detach dropout layer_norm rms_norm mean glu leaky_relu".split()
)


# What transformers' experts call the argument that tells for each row which experts it goes to.
CHOICES = ("top_k_index", "router_indices", "selected_experts", "router_mask")


class Routed(Tensor):
    """Rows (R, ...) whose records are in `route`."""

    route: Route

    @classmethod
    def of(cls, x: Tensor, route: Route) -> Routed:
        routed = x.as_subclass(cls)
        routed.route = route
        return routed

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        from .dispatch import dispatch
        from .shared import Shared

        kwargs = kwargs or {}
        found = list(leaves((args, kwargs)))
        if any(isinstance(x, (Tapped, Shared)) for x in found):
            return dispatch(func, args, kwargs)
        first = next(x for x in found if isinstance(x, Routed))
        args, kwargs = _each(args, _plain), {key: _each(x, _plain) for key, x in kwargs.items()}
        result = func(*args, **kwargs)
        route = _route(func, first.route, args, kwargs)
        if route is None:
            return result
        rows = len(route.records)
        return _each(result, lambda x: Routed.of(x, route) if isinstance(x, Tensor) and _rows(x, rows) else x)


def _plain(x: Any) -> Any:
    return x.as_subclass(Tensor) if isinstance(x, Routed) else x


def _each(x: Any, change: Callable) -> Any:
    """`change` of a value, or of all those in a list or a tuple: torch's trees take longer than the functions here."""
    if type(x) in (list, tuple):
        return type(x)(_each(y, change) for y in x)
    return tree_map(change, x) if isinstance(x, (list, tuple, dict)) else change(x)


def _rows(x: Tensor, rows: int) -> bool:
    """Whether a tensor has that many rows, perhaps behind an axis of length 1."""
    return x.dim() > 0 and (len(x) == rows or x.dim() > 2 and x.shape[:2] == (1, rows))


def _route(func: Callable, route: Route, args: tuple, kwargs: dict) -> Route | None:
    name = getattr(func, "__name__", "")
    if name in ROWWISE or name in ("view", "reshape", "flatten"):
        return route
    if name == "__getitem__":
        index = args[1]
        if isinstance(index, tuple) and len(index) == 2 and index[0] is None:
            index = index[1]
        if isinstance(index, Tensor) and index.dim() == 1:
            return route.picked(index)
        if isinstance(index, tuple) and index and (index[0] is Ellipsis or index[0] == slice(None)):
            return route
    if name == "index_select" and args[1] == 0:
        return route.picked(args[2])
    last = args[-1] if len(args) > 2 else kwargs.get("dim", 0)
    if name in ("chunk", "split", "unsqueeze", "squeeze") and last in (-1, 1):
        return route
    return None


def is_adapted(path: str) -> bool:
    """Whether PEFT has put an adapter around a module."""
    return path.rpartition(".")[2] == "base_layer"


@cache
def is_experts(kind: type[nn.Module]) -> bool:
    """Whether the caller of such modules tells them which rows go to which expert, as in transformers' interface."""
    return any(name in CHOICES for name in inspect.signature(kind.forward).parameters)


def run_routed(tap: Tap, forward: Callable, args: tuple, kwargs: dict) -> Any:
    """Run an experts module with rows that know their records: by its loop, whatever kernel is configured."""
    forward = getattr(forward, "__wrapped__", forward)
    if not inspect.ismethod(forward):
        forward = forward.__get__(tap.module)
    name = None if args else next(iter(kwargs))
    x = args[0] if args else kwargs[name]
    records = tap.batch_size
    if tap.lone or not isinstance(x, Tensor) or type(x) is not Tensor or x.dim() < 2 or len(x) % records:
        return forward(*args, **kwargs)
    rows = x[..., 0].numel()  # tokens (N * T, d), or (N, T, d)
    route = Route(torch.arange(rows, device=x.device) // (rows // records), records)
    routed = Routed.of(x, route)
    if name is None:
        args = (routed, *args[1:])
    else:
        kwargs = kwargs | {name: routed}
    y = forward(*args, **kwargs)
    return tree_map(lambda t: t.as_subclass(Tensor) if isinstance(t, Routed) else t, y)
