"""Parameters that a module uses by itself: norm scales, class tokens, learned positions, relative biases, IA3 vectors.

They are small, so each record gets its own copy, and autograd's gradient of the copies is the per-sample gradient.
The module runs as it is: the copies broadcast where the parameter did (`run_with_copies`), or, where a module
reshapes its parameter, each record runs as a batch of one under vmap (`run_each`).

In a batch of one record nothing is copied: autograd's own gradient is that record's.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .tap import REMEDY, Tap, UncoveredError, copies


@contextmanager
def swapped(tap: Tap, replacements: Mapping[str, Tensor]) -> Iterator[None]:
    """Let `tap.module` see other tensors in place of its parameters, for the length of one call."""
    owners = {}
    for local in replacements:
        owner, _, leaf = local.rpartition(".")
        owners[local] = (tap.module.get_submodule(owner)._parameters, leaf)
    originals = {local: parameters[leaf] for local, (parameters, leaf) in owners.items()}
    try:
        for local, (parameters, leaf) in owners.items():
            parameters[leaf] = replacements[local]
        yield
    finally:
        for local, (parameters, leaf) in owners.items():
            parameters[leaf] = originals[local]


def _first_tensor(args: tuple, kwargs: dict) -> Tensor | None:
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)


def _refuse(tap: Tap, error: Exception) -> UncoveredError:
    return UncoveredError(
        f"`{tap.path}` ({type(tap.module).__name__}) cannot run with one copy of {', '.join(tap.names)} per record "
        f"({str(error).splitlines()[0]}). Remedy: {REMEDY}."
    )


def run_with_copies(tap: Tap, forward: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a module with its parameters expanded to (N, 1, ..., 1, *shape), so that they broadcast as before."""
    if tap.lone:
        return forward(*args, **kwargs)
    x = _first_tensor(args, kwargs)
    axes = 1 if x is None else x.dim()
    records = tap.batch_size
    flattened = x is not None and x.shape[0] != records
    if flattened:
        if len(args) != 1 or kwargs or x.shape[0] % records:
            raise _refuse(tap, ValueError(f"its input of shape {tuple(x.shape)} does not have the records in front"))
        args, axes = (x.unflatten(0, (records, -1)),), axes + 1

    def aligned(local: str) -> Tensor:
        copy = copies(tap, local)
        if copy.shape[1:2] == (1,) and (copy.dim() > 3 or copy.dim() == axes + 1):
            return copy.squeeze(1)  # a class token or learned positions: (1, ...) stood for the batch
        return copy.view(records, *[1] * (axes - copy.dim()), *copy.shape[1:])

    replacements = {local: aligned(local) for local in tap.names}
    try:
        with swapped(tap, replacements):
            y = forward(*args, **kwargs)
    except (RuntimeError, IndexError) as error:
        raise _refuse(tap, error) from error
    return y.flatten(0, 1) if flattened else y


def run_each(tap: Tap, forward: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a module under vmap, each record as a batch of one with its own copy of the parameters."""
    records = tap.batch_size
    if tap.lone:
        return forward(*args, **kwargs)
    mapped = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.dim() and x.shape[0] == records]

    def one(copy: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        full = list(args)
        for i, x in zip(mapped, inputs, strict=True):
            full[i] = x.unsqueeze(0)
        with swapped(tap, copy):
            return forward(*full, **kwargs).squeeze(0)

    try:
        replacements = {local: copies(tap, local) for local in tap.names}
        return torch.vmap(one, randomness="different")(replacements, *(args[i] for i in mapped))
    except (RuntimeError, AttributeError) as error:
        raise _refuse(tap, error) from error


def relative_bias(tap: Tap, compute_bias: Callable, args: tuple, kwargs: dict) -> Tensor:
    """T5's bias has no batch axis at all: give each record its own, (N, heads, query, key) instead of (1, ...)."""
    if tap.lone:
        return compute_bias(*args, **kwargs)

    def one(copy: dict[str, Tensor]) -> Tensor:
        with swapped(tap, copy):
            return compute_bias(*args, **kwargs).squeeze(0)

    return torch.vmap(one)({local: copies(tap, local) for local in tap.names})


def has_relative_bias(module: nn.Module) -> bool:
    """T5 and its relatives: an embedding of distances, looked up by `compute_bias(query_length, key_length)`."""
    table = module._modules.get("relative_attention_bias")
    return isinstance(table, nn.Embedding) and callable(getattr(module, "compute_bias", None))
