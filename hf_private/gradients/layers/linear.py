"""Linear layers: `F.linear` (weight out x in) and the addmm of Hugging Face's Conv1D (weight in x out)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_private.gradients.persample import Dense, Outer, widen

from .recompute import recompute_fn
from .tap import Tap


class _Linear(torch.autograd.Function):
    """y = x W^T + b with W and b outside the graph; its backward writes (a, ds) into the book and computes dx only."""

    @staticmethod
    def forward(
        ctx, graph_root, x: Tensor, weight: Tensor, bias: Tensor | None, tap: Tap, names: tuple, in_first: bool
    ):
        ctx.tap, ctx.names, ctx.in_first, ctx.dtype = tap, names, in_first, x.dtype
        ctx.recompute = recompute_fn(x) if tap.book.drops_inputs else None
        # A bias alone (BiTFiT) needs no input.
        ctx.save_for_backward(x if names[0] and ctx.recompute is None else None, weight)
        return F.linear(x, weight.t() if in_first else weight, bias)

    @staticmethod
    def backward(ctx, ds: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        weight_name, bias_name = ctx.names
        rows = ctx.tap.rows(ds)
        if bias_name:
            ctx.tap.observe(bias_name, Dense(widen(rows).sum(1)))
        if weight_name:
            a = ctx.tap.rows(ctx.recompute() if ctx.recompute else x)
            left, right = (a, rows) if ctx.in_first else (rows, a)
            ctx.tap.observe(weight_name, Outer(left, right))
        dx = None
        if ctx.needs_input_grad[1]:
            weight = weight.to(ds.dtype)
            dx = ds.matmul(weight.t() if ctx.in_first else weight).to(ctx.dtype)
        return None, dx, None, None, None, None, None


def linear(tap: Tap, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rule for `F.linear`: input (..., in), weight (out, in)."""
    names = (tap.name(weight), tap.name(bias))
    return _Linear.apply(tap.graph_root, input, tap.detached(weight), tap.detached(bias), tap, names, False)


def addmm(tap: Tap, input: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    """Rule for `torch.addmm(bias, x, weight)`: x (B*T, in), weight (in, out)."""
    names = (tap.name(mat2), tap.name(input))
    return _Linear.apply(tap.graph_root, mat1, tap.detached(mat2), tap.detached(input), tap, names, True)
