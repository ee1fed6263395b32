"""Convolutions in 1 to 3 dimensions: a linear layer on patches, with stride, padding, dilation and groups."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_private.gradients.persample import Dense, Outer, forming_is_smaller, widen

from .tap import AutogradOnlyError, Tap

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}  # those of torch that know autocast


def patches(x: Tensor, kernel: tuple[int, ...], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """Patches that each output position sees: (B, positions, channels, kernel positions)."""
    x = F.pad(x, [side for amount in reversed(padding) for side in (amount, amount)])
    spatial = len(kernel)
    for axis, (size, step, spread) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, (size - 1) * spread + 1, step)[..., ::spread]
    # (B, C, *positions, *kernel) -> (B, positions, C, kernel)
    x = x.flatten(2 + spatial).flatten(2, 1 + spatial)
    return x.permute(0, 2, 1, 3)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, graph_root, x: Tensor, weight: Tensor, bias, copies, geometry: tuple, groups: int, tap: Tap, names
    ):
        stride, padding, dilation = geometry
        ctx.tap, ctx.names, ctx.geometry, ctx.computed = tap, names, geometry, copies is not None
        ctx.groups, ctx.dtype = groups, x.dtype
        ctx.save_for_backward(x, weight)
        return CONVOLUTIONS[len(stride)](x, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple:
        (dy,) = grad_outputs
        x, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.geometry
        weight_name, bias_name = ctx.names
        records, flat = ctx.tap.batch_size, dy.flatten(2)  # (B, out, positions)
        axis = ctx.tap.axis(ctx.names, dy, 1)
        g = None
        if bias_name and axis is not None:
            ctx.tap.observe(bias_name, Dense(widen(flat).sum(2).view(records, -1, flat.shape[1]).sum(1)))
        if weight_name and (axis is not None or ctx.computed):
            positions, rows = flat.shape[2] * len(x) // records, len(x) // records
            if forms(x.device, ctx.groups, positions, weight.shape):
                pairs = zip(widen(dy).split(rows), widen(x).split(rows), strict=True)
                each = [conv_backward(*pair, widen(weight), ctx.geometry, ctx.groups, of="weight") for pair in pairs]
                value = Dense(torch.stack(each))
            else:
                a = patches(x, weight.shape[2:], stride, padding, dilation)
                value = Outer(ctx.tap.rows(flat.transpose(1, 2)), ctx.tap.rows(a.flatten(2)), weight.shape)
            if ctx.computed:
                g = value.dense()
            else:
                ctx.tap.observe(weight_name, value)
        dx = None
        if ctx.needs_input_grad[1]:
            dx = conv_backward(dy, x, weight, ctx.geometry, ctx.groups, of="input").to(ctx.dtype)
        return None, dx, None, None, g, *[None] * 4


def forms(device: torch.device, groups: int, positions: int, shape: torch.Size) -> bool:
    """Whether to form the gradients, record by record: always with groups, which see their own channels only, and on a
    CPU wherever they are smaller than the patches."""
    fast = device.type in ("cpu", "meta")  # others would start too many kernels
    return groups > 1 or fast and forming_is_smaller(positions, shape[0], shape[1:].numel())


def conv_backward(dy: Tensor, x: Tensor, weight: Tensor, geometry: tuple, groups: int, of: str) -> Tensor:
    """The gradient of the input, or of the weight, summed over the rows of `x`."""
    stride, padding, dilation = geometry
    x, weight = x.to(dy.dtype), weight.to(dy.dtype)
    found = torch.ops.aten.convolution_backward(
        dy, x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups,
        [of == "input", of == "weight", False],
    )  # fmt: skip
    return found[0] if of == "input" else found[1]


def conv(
    tap: Tap,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride=1,
    padding=0,
    dilation=1,
    groups: int = 1,
) -> Tensor:
    """Rule for `F.conv1d`, `F.conv2d`, `F.conv3d`: input (B, in, ...), weight (out, in / groups, ...)."""
    spatial = weight.dim() - 2
    if input.dim() != spatial + 2 or input.shape[0] % tap.batch_size:
        raise AutogradOnlyError(
            f"`{tap.path}` got an input of shape {tuple(input.shape)} without the records in front."
            f" Remedy: {tap.remedy}."
        )
    stride, dilation = ([s] * spatial if isinstance(s, int) else list(s) for s in (stride, dilation))
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        input = F.pad(input, [side for t in reversed(total) for side in (t // 2, t - t // 2)])
    if isinstance(padding, str):
        padding = 0
    padding = [padding] * spatial if isinstance(padding, int) else list(padding)
    names = (tap.name(weight), tap.name(bias))
    tap.announce(names, input.shape[:1])
    geometry = stride, padding, dilation
    copies, weight, bias = tap.copies(weight), tap.detached(weight), tap.detached(bias)
    return _Conv.apply(tap.graph_root, input, weight, bias, copies, geometry, groups, tap, names)
