"""Activations that are computed again: a layer's input need not be kept where autograd keeps what it was made from.

The widest input of a transformer's block is its activation's output, and autograd holds the activation's own input (of
a gated one, both factors) for its derivative. One elementwise pass in the backward pass then saves a quarter of what a
block keeps. It is worth that only where the input is dropped again at once, as carriers do.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

MADE_BY: dict[str, Callable] = {  # a node of autograd's graph -> its output, from what it saved
    "GeluBackward0": lambda node: F.gelu(node._saved_self, approximate=node._saved_approximate),
    "SiluBackward0": lambda node: F.silu(node._saved_self),
    "MulBackward0": lambda node: node._saved_self * node._saved_other,  # gates, and GELU by its formula
}
VIEWS = ("ViewBackward0", "UnsafeViewBackward0")


def recompute_fn(x: Tensor) -> Callable[[], Tensor] | None:
    """A function that makes `x` again inside the backward pass, from what autograd holds anyway; None if it cannot.

    >>> import torch
    >>> x = torch.randn(2, 3, requires_grad=True)
    >>> remake = recompute_fn(F.gelu(x))
    >>> torch.equal(remake(), F.gelu(x)), recompute_fn(x.exp())
    (True, None)
    """
    node = x.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() not in MADE_BY:
        return None
    saved = [getattr(node, name) for name in ("_raw_saved_self", "_raw_saved_other") if hasattr(node, name)]
    # Gradient checkpointing and offloading hook in here, and may be asked once only. A product with a constant, as
    # dropout's mask, saves one of its factors.
    if any(part.unpack_hook is not None or part.data is None for part in saved):
        return None
    make, shape = MADE_BY[node.name()], x.shape
    return lambda: make(node).view(shape)
