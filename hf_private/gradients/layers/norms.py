"""Normalisation layers: per-sample gradients of scale and shift are sums over positions, formed at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_private.gradients.persample import Dense, widen

from .once import expanded, is_same
from .special import is_special, special
from .tap import AutogradOnlyError, Tap, copied


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, graph_root, x: Tensor, shape: list[int], weight, bias, eps: float, tap: Tap, names: tuple, once: bool
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x[0] if once else x, shape, weight, bias, eps)
        if once:
            y, mean, rstd = (expanded(part, len(x)) for part in (y, mean, rstd))
        ctx.tap, ctx.names, ctx.shape, ctx.eps = tap, names, shape, eps
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return y

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple:
        (dy,) = grad_outputs
        x, mean, rstd, weight, bias = ctx.saved_tensors
        weight_name, bias_name = ctx.names
        features = len(ctx.shape)
        axis = ctx.tap.axis(ctx.names, dy, dy.dim() - features)
        rows = None if axis is None else ctx.tap.rows(widen(dy).flatten(-features), axis)
        if weight_name and rows is not None:
            wide = widen(x)
            one, zero = wide.new_ones(ctx.shape), wide.new_zeros(ctx.shape)  # without them it takes twice as long
            x_hat = torch.native_layer_norm(wide, ctx.shape, one, zero, ctx.eps)[0]
            g = ctx.tap.rows(x_hat.flatten(-features), axis).mul_(rows).sum(1)
            ctx.tap.observe(weight_name, Dense(g.view(-1, *ctx.shape)))
        if bias_name and rows is not None:
            ctx.tap.observe(bias_name, Dense(rows.sum(1).view(-1, *ctx.shape)))
        dx = None
        if ctx.needs_input_grad[1]:
            x, mean, rstd = (part.contiguous() for part in (x, mean, rstd))  # of what records share, they are views
            dx = torch.ops.aten.native_layer_norm_backward(
                dy.to(x.dtype).contiguous(), x, ctx.shape, mean, rstd, weight, bias, [True, False, False]
            )[0]
        return None, dx, *[None] * 7


def layer_norm(
    tap: Tap,
    input: Tensor,
    normalized_shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Rule for `F.layer_norm`: input (..., *normalized_shape)."""
    return _layer_norm(tap, input, normalized_shape, weight, bias, eps)


def _layer_norm(
    tap: Tap, input: Tensor, shape, weight: Tensor | None, bias: Tensor | None, eps: float, once: bool = False
) -> Tensor:
    if not once and is_special(tap, input) and (rule := special(tap, input)):
        return rule(lambda x: _layer_norm(tap, x, shape, weight, bias, eps, is_same(x)))
    names = (tap.name(weight), tap.name(bias))
    tap.announce(names, input.shape[: input.dim() - len(shape)])
    weight, bias = tap.detached(weight), tap.detached(bias)
    if weight is not None and weight.dtype != input.dtype:  # autocast: half-precision input, float32 weights
        input = input.to(weight.dtype)
    return _LayerNorm.apply(tap.graph_root, input, list(shape), weight, bias, eps, tap, names, once)


def _affine(tap: Tap, y: Tensor, parameter: Tensor | None, first_axis: int, add: bool) -> Tensor:
    """Scale or shift `y` by one copy of `parameter` per record, aligned to `y`'s axes from `first_axis` on."""
    if parameter is None:
        return y
    name = tap.name(parameter)
    copy = tap.detached(parameter)
    batch = tap.batch_size if name else 1
    if name:
        copy = copied(tap, copy, name)
        if y.shape[0] % batch or first_axis == 0:
            raise AutogradOnlyError(
                f"`{tap.path}` ({type(tap.module).__name__}) got an input of shape {tuple(y.shape)} in a batch of"
                f" {batch} records, which are not in front. Remedy: {tap.remedy}."
            )
        y = y.reshape(batch, -1, *y.shape[1:])  # flattened records (N * T, ...) get their own axis back
    else:
        y, copy = y.unsqueeze(0), copy.unsqueeze(0)
    axes = [batch] + [1] * (y.dim() - 1)
    axes[first_axis + 1 : first_axis + 1 + parameter.dim()] = parameter.shape
    y = y + copy.view(axes) if add else y * copy.view(axes)
    return y.flatten(0, 1) if name else y.squeeze(0)


def rms_norm(
    tap: Tap, input: Tensor, normalized_shape, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Rule for `F.rms_norm`: input (..., *normalized_shape)."""
    y = F.rms_norm(input, normalized_shape, None, eps)
    return _affine(tap, y, weight, y.dim() - len(normalized_shape), add=False)


def group_norm(
    tap: Tap,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Rule for `F.group_norm`: input (B, channels, ...)."""
    y = F.group_norm(input, num_groups, None, None, eps)
    return _affine(tap, _affine(tap, y, weight, 1, add=False), bias, 1, add=True)
