"""Linear layers: `F.linear` (weight out x in) and the addmm of Hugging Face's Conv1D (weight in x out)."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from hf_private.gradients.persample import Dense, Outer, PerSample, widen
from hf_private.gradients.ragged import Ragged, Route, summed

from .once import expanded, is_same
from .recompute import recompute_fn
from .routed import Routed
from .special import is_special, special
from .tap import AutogradOnlyError, Tap
from .tapped import Tapped


class _Linear(torch.autograd.Function):
    """y = x W^T + b with W and b outside the graph; its backward writes (a, ds) into the book and computes dx only."""

    @staticmethod
    def forward(
        ctx, graph_root, x: Tensor, weight: Tensor, bias: Tensor | None, copies: Tensor | None, tap: Tap, names: tuple,
        in_first: bool, route: Route | None = None, once: bool = False,
    ):  # fmt: skip
        ctx.tap, ctx.names, ctx.in_first, ctx.dtype = tap, names, in_first, x.dtype
        ctx.route, ctx.once, ctx.computed, records = route, once, copies is not None, len(x)
        x = x[0] if once else x
        ctx.recompute = recompute_fn(x) if tap.book.drops_inputs else None
        kind = x.device.type
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # "meta" has none
        if casts and weight.dtype == torch.float32:
            weight = weight.to(torch.get_autocast_dtype(kind))  # once, as autograd keeps it for both passes
        # A bias alone (BiTFiT) needs no input.
        ctx.save_for_backward(x if names[0] and ctx.recompute is None else None, weight)
        y = F.linear(x, weight.t() if in_first else weight, bias)
        if once:
            return expanded(y, records)
        # Autograd refuses a view here if the model changes it in place (Longformer divides its queries).
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple:
        (ds,) = grad_outputs
        x, weight = ctx.saved_tensors
        weight_name, bias_name = ctx.names
        axis = ctx.tap.axis(ctx.names, ds, ds.dim() - 1, route=ctx.route)
        reached, shape = reached_rows(ds) if ctx.once else None, ds.shape
        if reached is not None:
            ds = ds.index_select(-2, reached)
        if bias_name and axis is not None:
            sums = summed(ds, ctx.route) if ctx.route else widen(ctx.tap.rows(ds, axis)).sum(1)
            ctx.tap.observe(bias_name, Dense(sums))
        g = None
        if weight_name and (axis is not None or ctx.computed):
            x = ctx.recompute() if ctx.recompute else x
            if ctx.once:
                x = expanded(x if reached is None else x.index_select(-2, reached), len(ds))
            if ctx.computed:
                g = _value(ctx, ds, x, in_front(ctx.tap, axis)).dense()
            else:
                ctx.tap.observe(weight_name, _value(ctx, ds, x, axis))
        dx = None
        if ctx.needs_input_grad[1]:
            weight = weight.to(ds.dtype)
            dx = ds.matmul(weight.t() if ctx.in_first else weight).to(ctx.dtype)
            if reached is not None:
                dx = dx.new_zeros(*shape[:-1], dx.shape[-1]).index_copy_(-2, reached, dx)
        return None, dx, None, None, g, *[None] * 5


def _value(ctx, ds: Tensor, x: Tensor, axis: int) -> PerSample:
    """The per-sample gradients of a weight from its output's gradient and its input."""
    rows, a = (ds, x) if ctx.route else (ctx.tap.rows(ds, axis), ctx.tap.rows(x, axis))
    left, right = (a, rows) if ctx.in_first else (rows, a)
    return Ragged(left, right, ctx.route) if ctx.route else Outer(left, right)


def in_front(tap: Tap, axis: int | None) -> int:
    """The axis of the records for a computed weight, whose gradient the pass of weighted losses forms, too."""
    if axis:
        raise AutogradOnlyError(f"`{tap.path}` multiplies records that are not in front by a computed weight.")
    return 0


def reached_rows(ds: Tensor) -> Tensor | None:
    """The rows of what all records share that the gradient of some record reaches, if they are less than half of it.

    Of a table of distances, short records need few. Only a CPU looks: another device would keep the host waiting.
    """
    if ds.device.type != "cpu" or ds.dim() < 3:
        return None
    reached = ds.flatten(0, -3).ne(0).any(-1).any(0).nonzero().squeeze(1)
    return reached if 0 < 2 * len(reached) < ds.shape[-2] else None


def _routed(tap: Tap, x: Routed, weight: Tensor, bias: Tensor | None, in_first: bool) -> Tensor:
    """A linear layer on rows (R, in) that know their records."""
    names = (tap.name(weight), tap.name(bias))
    tap.announce(names, torch.Size([tap.batch_size]))
    copies, weight, bias = tap.copies(weight), tap.detached(weight), tap.detached(bias)
    y = _Linear.apply(tap.graph_root, x.as_subclass(Tensor), weight, bias, copies, tap, names, in_first, x.route)
    return Routed.of(y, x.route)


def linear(tap: Tap, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rule for `F.linear`: input (..., in), weight (out, in)."""
    return _linear(tap, input, weight, bias, in_first=False)


def _linear(
    tap: Tap, input: Tensor, weight: Tensor, bias: Tensor | None, in_first: bool, once: bool = False
) -> Tensor:
    if isinstance(input, Routed) and input.dim() == 2:
        return _routed(tap, input, weight, bias, in_first)
    copies = tap.copies(weight)
    if copies is not None and (type(input) is not Tensor or len(input) not in (tap.num_rows, tap.leading)):
        raise AutogradOnlyError(f"`{tap.path}` multiplies by a computed weight of shape {tuple(weight.shape)}.")
    if not once and is_special(tap, input) and (rule := special(tap, input)):
        return rule(lambda x: _linear(tap, x, weight, bias, in_first, is_same(x)))
    names = (tap.name(weight), tap.name(bias))
    tap.announce(names, input.shape[:-1])
    weight, bias = tap.detached(weight), tap.detached(bias)
    return _Linear.apply(tap.graph_root, input, weight, bias, copies, tap, names, in_first, None, once)


def of_all(tap: Tap, x: Tensor, weight: Tensor) -> Tensor:
    """A linear layer on what all records share, without a gradient."""
    from .shared import Shared

    y = _linear(tap, expanded(x, tap.batch_size), weight, None, in_first=False, once=True)
    return Shared(y, tap, frozenset([str(tap.name(weight))]), tap.book.attribution.is_due)


def conv1d(tap: Tap, module: Conv1D, input: Tensor) -> Tensor:
    """Rule for Hugging Face's Conv1D itself, which flattens its input (..., in) around `torch.addmm`."""
    return _linear(tap, input, module.weight, module.bias, in_first=True)


def addmm(tap: Tap, input: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    """Rule for `torch.addmm(bias, x, weight)`: x (B*T, in), weight (in, out)."""
    return _linear(tap, mat1, mat2, input, in_first=True)


def matmul(tap: Tap, input: Tensor, other: Tensor) -> Tensor:
    """Rule for `x @ weight`, x (..., in), weight (in, out), and for `weight @ x`, weight (out, in), x (..., in, T)."""
    if isinstance(input, Tapped):
        if isinstance(other, Tapped) or input.dim() != 2 or other.dim() < 3:
            raise AutogradOnlyError(f"`{tap.path}` multiplies a weight of shape {tuple(input.shape)}.")
        return linear(tap, other.mT, input).mT
    if input.dim() < 2 or other.dim() != 2:
        raise AutogradOnlyError(f"`{tap.path}` multiplies by a weight of shape {tuple(other.shape)}.")
    return _linear(tap, input, other, None, in_first=True)


def bmm(tap: Tap, input: Tensor, mat2: Tensor) -> Tensor:
    """Rule for `torch.bmm(x, weight)`: x (experts, rows, in), weight (experts, in, out)."""
    if not isinstance(mat2, Tapped):
        raise AutogradOnlyError(f"`{tap.path}` multiplies by a computed weight of shape {tuple(mat2.shape)}.")
    return torch.stack([matmul(tap, x, mat2[e]) for e, x in enumerate(input)])


def baddbmm(tap: Tap, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Rule for `torch.baddbmm(bias, x, weight)`, shapes as in `bmm`."""
    if beta != 1 or alpha != 1:
        raise AutogradOnlyError(f"`{tap.path}` scales a product with a weight of shape {tuple(batch2.shape)}.")
    return input + bmm(tap, batch1, batch2)
