"""Embeddings: rows that are picked by index, also where one row of position ids serves the whole batch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_private.gradients.persample import Rows

from .once import expanded
from .shared import Shared
from .tap import Tap, UncoveredError


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, graph_root, index: Tensor, weight: Tensor, padding_idx: int | None, tap: Tap, name: str, once=False
    ) -> Tensor:
        ctx.tap, ctx.parameter, ctx.padding_idx, ctx.shape = tap, name, padding_idx, weight.shape
        ctx.save_for_backward(index)
        return expanded(F.embedding(index[0], weight), len(index)) if once else F.embedding(index, weight)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple:
        (ds,) = grad_outputs
        (index,) = ctx.saved_tensors
        axis = ctx.tap.axis((ctx.parameter,), ds, index.dim())
        if axis is None:
            return (*[None] * 7,)
        index, ds = ctx.tap.rows(index.unsqueeze(-1), axis).squeeze(-1), ctx.tap.rows(ds, axis)
        if ctx.padding_idx is not None:
            ds = ds.masked_fill((index == ctx.padding_idx % ctx.shape[0]).unsqueeze(-1), 0)
        ctx.tap.observe(ctx.parameter, Rows(index, ds, ctx.shape))
        return (*[None] * 7,)


def embedding(
    tap: Tap,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rule for `F.embedding`: input (B, ...), or positions (1, T) or (T,) for all records, weight (vocabulary, d)."""
    if max_norm is not None or scale_grad_by_freq:
        option = "max_norm" if max_norm is not None else "scale_grad_by_freq"
        raise UncoveredError(
            f"`{tap.path}` has `{option}`, which lets records meet. Remedy: build it without, or freeze it."
        )
    name = tap.name(weight)
    # Ids without records, as of positions: autograd would sum over the batch before the rule sees the gradient.
    if tap.batch_size > 1 and not tap.book.sharded and (is_prompt(tap.path) or _is_shared(tap, input)):
        ids = expanded(input, tap.batch_size)
        new = tap.announce((name,), ids.shape)
        rows = _Embedding.apply(tap.graph_root, ids, tap.detached(weight), padding_idx, tap, name, True)
        return Shared(rows, tap, frozenset([str(name)]), new)
    if input.dim() > 1 and input.shape[0] == 1 and tap.leading > 1:
        input = input.expand(tap.leading, *input.shape[1:])
        tap.book.expanded.add(tap.path)
    tap.announce((name,), input.shape)
    return _Embedding.apply(tap.graph_root, input, tap.detached(weight), padding_idx, tap, name)


def is_prompt(path: str) -> bool:
    """Whether a module is a prompt of PEFT, which is looked up once and then repeated for each row of the batch."""
    return "prompt_encoder" in path.split(".")


def _is_shared(tap: Tap, index: Tensor) -> bool:
    """Whether all records share these ids: positions (T,), which are consecutive, or distances (T, T).

    It is right in any case that each record gets its own rows of the table for all of them, and picks what it needs.
    """
    if index.is_meta or index.numel() == 0:
        return False
    if index.dim() == 1:
        return len(index) % tap.num_rows != 0 or (len(index) > 1 and bool((index.diff() == 1).all()))
    length, width = index.shape[:2]
    if length in (tap.num_rows, tap.leading):  # unless as many records as tokens make distances look like records
        distances = length == width > 1 and torch.equal(index[1:, 1:], index[:-1, :-1])
        return distances and not bool((index == index[0, 0]).all())  # token types are all alike
    if width == tap.num_rows and length > 1:  # XLNet's tokens (T, N)
        return torch.equal(index[1:, 1:], index[:-1, :-1])
    return length > 1
