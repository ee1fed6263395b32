"""What all records share is computed once: its copies (N, *shape) are one value, N times without memory of their own.

A function of such values gives one more of them. Only gradients differ by record, so the backward pass runs for a
batch of them (`torch.vmap` of the derivative).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten


def is_same(copies: Tensor) -> bool:
    """Whether the copies (N, *shape) of a value are one and the same.

    >>> is_same(torch.ones(1, 3).expand(2, 3)), is_same(torch.ones(2, 3))
    (True, False)
    """
    return len(copies) > 1 and copies.stride(0) == 0


def expanded(value: Tensor, records: int) -> Tensor:
    """A value as its copies (N, *shape)."""
    return value.unsqueeze(0).expand(records, *value.shape)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Callable, spec: list, *copies: Tensor) -> tuple:
        ctx.inputs = [x[0].detach().requires_grad_(x.is_floating_point()) for x in copies]
        # Gradient checkpointing counts what is saved, and would compute it again for each record.
        with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
            flat, structure = tree_flatten(call(*ctx.inputs))
        ctx.results = [x for x in flat if isinstance(x, Tensor)]
        spec += [structure, flat]
        outputs = [expanded(x.detach(), len(copies[0])) for x in ctx.results]
        ctx.mark_non_differentiable(*(y for x, y in zip(ctx.results, outputs, strict=True) if not x.requires_grad))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor | None) -> tuple:
        pairs = [(y, g) for y, g in zip(ctx.results, grad_outputs, strict=True) if g is not None and y.requires_grad]
        inputs = [x for x in ctx.inputs if x.requires_grad]
        if not pairs or not inputs:
            return None, None, *[None] * len(ctx.inputs)
        results, grads = [y for y, _ in pairs], [g for _, g in pairs]
        found = iter(_gradients(results, inputs, grads))
        return None, None, *(next(found) if x.requires_grad else None for x in ctx.inputs)


def _gradients(results: list[Tensor], inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
    """Gradients (N, *shape) of each input, for gradients (N, ...) of each result."""
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    try:
        return list(torch.autograd.grad(results, inputs, grads, is_grads_batched=True, **options))
    except RuntimeError:  # a derivative that vmap does not know: a loop over the records
        each = [torch.autograd.grad(results, inputs, [g[n] for g in grads], **options) for n in range(len(grads[0]))]
        return [None if some[0] is None else torch.stack(some) for some in zip(*each, strict=True)]


def once(call: Callable, copies: list[Tensor]) -> Any:
    """`call` of values that all records share: its results as copies (N, ...)."""
    spec: list = []
    outputs = iter(_Once.apply(call, spec, *copies))
    structure, flat = spec
    return tree_unflatten([next(outputs) if isinstance(x, Tensor) else x for x in flat], structure)
