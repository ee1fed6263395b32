"""Linear layers: `F.linear` (weight out x in) and the addmm of Hugging Face's Conv1D (weight in x out)."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from hf_private.gradients.persample import Dense, Outer, widen

from .recompute import recompute_fn
from .special import is_special, special
from .tap import AutogradOnlyError, Tap
from .tapped import Tapped


class _Linear(torch.autograd.Function):
    """y = x W^T + b with W and b outside the graph; its backward writes (a, ds) into the book and computes dx only."""

    @staticmethod
    def forward(
        ctx, graph_root, x: Tensor, weight: Tensor, bias: Tensor | None, tap: Tap, names: tuple, in_first: bool
    ):
        ctx.tap, ctx.names, ctx.in_first, ctx.dtype = tap, names, in_first, x.dtype
        ctx.recompute = recompute_fn(x) if tap.book.drops_inputs else None
        kind = x.device.type
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # "meta" has none
        if casts and weight.dtype == torch.float32:
            weight = weight.to(torch.get_autocast_dtype(kind))  # once, as autograd keeps it for both passes
        # A bias alone (BiTFiT) needs no input.
        ctx.save_for_backward(x if names[0] and ctx.recompute is None else None, weight)
        y = F.linear(x, weight.t() if in_first else weight, bias)
        # Autograd refuses a view here if the model changes it in place (Longformer divides its queries).
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple:
        (ds,) = grad_outputs
        x, weight = ctx.saved_tensors
        weight_name, bias_name = ctx.names
        axis = ctx.tap.axis(ctx.names, ds, ds.dim() - 1)
        if bias_name and axis is not None:
            ctx.tap.observe(bias_name, Dense(widen(ctx.tap.rows(ds, axis)).sum(1)))
        if weight_name and axis is not None:
            rows, a = ctx.tap.rows(ds, axis), ctx.tap.rows(ctx.recompute() if ctx.recompute else x, axis)
            left, right = (a, rows) if ctx.in_first else (rows, a)
            ctx.tap.observe(weight_name, Outer(left, right))
        dx = None
        if ctx.needs_input_grad[1]:
            weight = weight.to(ds.dtype)
            dx = ds.matmul(weight.t() if ctx.in_first else weight).to(ctx.dtype)
        return None, dx, None, None, None, None, None


def linear(tap: Tap, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rule for `F.linear`: input (..., in), weight (out, in)."""
    if is_special(tap, input) and (rule := special(tap, input)):
        return rule(lambda x: linear(tap, x, weight, bias))
    names = (tap.name(weight), tap.name(bias))
    tap.announce(names, input.shape[:-1])
    return _Linear.apply(tap.graph_root, input, tap.detached(weight), tap.detached(bias), tap, names, False)


def conv1d(tap: Tap, module: Conv1D, input: Tensor) -> Tensor:
    """Rule for Hugging Face's Conv1D itself, which flattens its input (..., in) around `torch.addmm`."""
    if is_special(tap, input) and (rule := special(tap, input)):
        return rule(lambda x: conv1d(tap, module, x))
    weight, bias = module.weight, module.bias
    names = (tap.name(weight), tap.name(bias))
    tap.announce(names, input.shape[:-1])
    return _Linear.apply(tap.graph_root, input, tap.detached(weight), tap.detached(bias), tap, names, True)


def addmm(tap: Tap, input: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    """Rule for `torch.addmm(bias, x, weight)`: x (B*T, in), weight (in, out)."""
    names = (tap.name(mat2), tap.name(input))
    tap.announce(names, mat1.shape[:-1])
    return _Linear.apply(tap.graph_root, mat1, tap.detached(mat2), tap.detached(input), tap, names, True)


def matmul(tap: Tap, input: Tensor, other: Tensor) -> Tensor:
    """Rule for `x @ weight`, x (..., in), weight (in, out), and for `weight @ x`, weight (out, in), x (..., in, T)."""
    if isinstance(input, Tapped):
        if isinstance(other, Tapped) or input.dim() != 2 or other.dim() < 3:
            raise AutogradOnlyError(f"`{tap.path}` multiplies a weight of shape {tuple(input.shape)}.")
        return linear(tap, other.mT, input).mT
    if is_special(tap, input) and (rule := special(tap, input)):
        return rule(lambda x: matmul(tap, x, other))
    if input.dim() < 2 or other.dim() != 2:
        raise AutogradOnlyError(f"`{tap.path}` multiplies by a weight of shape {tuple(other.shape)}.")
    names = (tap.name(other), None)
    tap.announce(names, input.shape[:-1])
    return _Linear.apply(tap.graph_root, input, tap.detached(other), None, tap, names, True)


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
