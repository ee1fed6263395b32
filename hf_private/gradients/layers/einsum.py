"""`torch.einsum` of an activation and a weight, where that is a linear layer on axes in another order."""

from typing import Any

import torch
from torch import Tensor

from .linear import linear, of_all
from .tap import AutogradOnlyError, Tap
from .tapped import Tapped


def einsum(tap: Tap, equation: Any, *operands: Any) -> Tensor:
    """Rule for `torch.einsum`: "nti,oi->nto" and its like, where the weight's axes are summed, or new in the result.

    The summed ones must lie together in the weight, in the order of the activation's; else each record gets a copy.
    """
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    terms, _, result = str(equation).replace(" ", "").partition("->")
    letters = terms.split(",")
    if len(operands) != 2 or len(letters) != 2 or "." in terms or not result:
        raise AutogradOnlyError(f"`{tap.path}` takes a weight in {equation!r}.")
    (x, w), (of_x, of_w) = operands, letters
    if isinstance(x, Tapped):
        (x, w), (of_x, of_w) = (w, x), (of_w, of_x)
    summed = "".join(c for c in of_w if c in of_x and c not in result)
    made = "".join(c for c in of_w if c not in of_x and c in result)
    kept = "".join(c for c in of_x if c not in summed)
    repeated = any(len(set(term)) < len(term) for term in (of_x, of_w, result))
    if isinstance(x, Tapped) or not isinstance(w, Tapped) or repeated or not summed or not made or not kept:
        raise AutogradOnlyError(f"`{tap.path}` takes a weight in {equation!r}.")
    if of_w not in (made + summed, summed + made) or set(kept + made) != set(result):
        raise AutogradOnlyError(f"`{tap.path}` takes a weight in {equation!r}.")
    sizes, columns = dict(zip(of_w, w.shape, strict=True)), 1
    for c in summed:
        columns *= sizes[c]
    matrix = w.reshape(-1, columns) if of_w == made + summed else w.reshape(columns, -1).t()
    rows = x.permute([of_x.index(c) for c in kept + summed]).flatten(len(kept))
    if type(x) is Tensor and not x.requires_grad and (x.dim() < 3 or tap.num_rows not in x.shape[:-1]):
        # A table of positions, unless it has as many rows as there are records; then another batch shows what it is.
        clear = tap.num_rows not in x.shape and tap.leading not in x.shape
        hints = tap.hints.setdefault((torch.einsum, equation), set())
        hints |= {()} if clear else set()
        if tap.lone or tap.book.sharded or not hints:
            raise AutogradOnlyError(f"`{tap.path}` takes a weight in {equation!r}.")
        y = of_all(tap, rows, matrix)
    else:
        y = linear(tap, rows, matrix)
    y = y.unflatten(-1, [sizes[c] for c in made])
    return y.permute([(kept + made).index(c) for c in result])
