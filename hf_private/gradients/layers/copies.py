"""Parameters that a module uses by itself: norm scales, class tokens, learned positions, relative biases, IA3 vectors.

They are small, so each record gets its own copy, and autograd's gradient of the copies is the per-sample gradient.
The module runs as it is: the copies broadcast where the parameter did (`run_with_copies`), or, where a module
reshapes its parameter, each record runs as a batch of one under vmap (`run_each`).

In a batch of one record nothing is copied: autograd's own gradient is that record's.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import get_device_states, set_device_states

from .attribution import UncoveredError
from .tap import Tap, copies

UNFIT: WeakSet[nn.Module] = WeakSet()  # modules that do not run with copies of their parameters


@contextmanager
def swapped(tap: Tap, replacements: Mapping[str, Tensor]) -> Iterator[None]:
    """Let `tap.module` see other tensors in place of its parameters, for the length of one call."""
    owners: dict[str, tuple[dict[str, Any], str]] = {}
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
    names = ", ".join(f"`{name}`" for name in tap.names.values())
    return UncoveredError(
        f"{names}: {type(tap.module).__name__} cannot run with one copy per record "
        f"({str(error).splitlines()[0]}). Remedy: {tap.remedy}."
    )


def run_with_copies(tap: Tap, forward: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a module with its parameters expanded to (N, 1, ..., 1, *shape), so that they broadcast as before.

    If that does not work, they are copied where they are used instead (`copied_call.py`): slower, and more general.
    """
    if tap.lone or tap.module in UNFIT:
        return forward(*args, **kwargs)
    try:
        return _run_with_copies(tap, forward, args, kwargs)
    except UncoveredError:
        if tap.book.sharded:
            raise
    UNFIT.add(tap.module)
    return forward(*args, **kwargs)


def _run_with_copies(tap: Tap, forward: Callable, args: tuple, kwargs: dict) -> Any:
    x = _first_tensor(args, kwargs)
    axes = 1 if x is None else x.dim()
    records = tap.num_rows
    flattened = False
    if x is not None and x.shape[0] != records:
        flattened = True
        if len(args) != 1 or kwargs or x.shape[0] % records:
            raise _refuse(tap, ValueError(f"its input of shape {tuple(x.shape)} does not have the records in front"))
        args, axes = (x.unflatten(0, (records, -1)),), axes + 1

    def aligned(local: str) -> Tensor:
        copy = copies(tap, local)
        if copy.shape[1:2] == (1,) and (copy.dim() > 3 or copy.dim() == axes + 1):
            return copy.squeeze(1)  # a class token or learned positions: (1, ...) stood for the batch
        return copy.view(records, *[1] * (axes - copy.dim()), *copy.shape[1:])

    known = [not tap.announce((name,), torch.Size([tap.batch_size])) for name in tap.names.values()]
    replacements = {local: aligned(local) for local in tap.names}
    states = None if all(known) else _random_states(x)
    try:
        with swapped(tap, replacements):
            y = forward(*args, **kwargs)
        if states is not None:
            _check_output(tap, forward, args, kwargs, y, states)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise error if isinstance(error, UncoveredError) else _refuse(tap, error) from error
    return y.flatten(0, 1) if flattened else y


def _random_states(x: Tensor | None) -> tuple:
    return torch.get_rng_state(), *get_device_states(x)


def _check_output(tap: Tap, forward: Callable, args: tuple, kwargs: dict, y: Any, states: tuple) -> None:
    """Run a module again without copies, the first time that it is seen: what it computes must not change.

    It would if the module looks at the shape of its parameter. `Attribution` cannot see that: each record's gradient
    is then a function of this record, but not its gradient.
    """
    if tap.book.sharded and any(tap.module.children()):
        return  # gathers weights, which all ranks must do together
    cpu, devices, device_states = states
    with torch.no_grad(), torch.random.fork_rng(devices):
        torch.set_rng_state(cpu)
        set_device_states(devices, device_states)
        plain = forward(*args, **kwargs)
    for copied, expected in zip(tree_leaves(y), tree_leaves(plain), strict=True):
        if isinstance(copied, Tensor) and copied.is_floating_point() and not copied.is_meta:
            limit = torch.finfo(copied.dtype).eps ** 0.5
            if copied.shape != expected.shape or not torch.allclose(
                copied, expected, rtol=limit, atol=limit * float(expected.abs().max()), equal_nan=True
            ):
                raise RuntimeError("its output changes")


def run_each(tap: Tap, forward: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a module under vmap, each record as a batch of one with its own copy of the parameters.

    Where vmap cannot (a function with a gradient of its own, as LoHa's), one record after the other.
    """
    records = tap.num_rows
    if tap.lone or tap.module in UNFIT:
        return forward(*args, **kwargs)
    mapped = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.dim() and x.shape[0] == records]

    def one(copy: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        full = list(args)
        for i, x in zip(mapped, inputs, strict=True):
            full[i] = x.unsqueeze(0)
        with swapped(tap, copy):
            return forward(*full, **kwargs).squeeze(0)

    replacements = {local: copies(tap, local) for local in tap.names}
    inputs = [args[i] for i in mapped]
    try:
        return torch.vmap(one, randomness="different")(replacements, *inputs)
    except (RuntimeError, AttributeError) as error:
        if tap.book.sharded:
            raise error if isinstance(error, UncoveredError) else _refuse(tap, error) from error
    trained_inside = any(p.requires_grad for child in tap.module.children() for p in _others(child))
    if mapped and not trained_inside:
        each = [one({k: c[n] for k, c in replacements.items()}, *(x[n] for x in inputs)) for n in range(records)]
        return torch.stack(each)
    UNFIT.add(tap.module)
    return forward(*args, **kwargs)


def _others(child: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of a child that its owner does not use by itself."""
    if not isinstance(child, (nn.ParameterDict, nn.ParameterList)):
        yield from child.parameters()


def relative_bias(tap: Tap, compute_bias: Callable, args: tuple, kwargs: dict) -> Tensor:
    """T5's bias has no batch axis at all: give each record its own, (N, heads, query, key) instead of (1, ...)."""
    if tap.lone:
        return compute_bias(*args, **kwargs)

    def one(copy: dict[str, Tensor]) -> Tensor:
        with swapped(tap, copy):
            return compute_bias(*args, **kwargs).squeeze(0)

    return torch.vmap(one)({local: copies(tap, local) for local in tap.names})


def relative_table(module: nn.Module) -> nn.Embedding | None:
    """T5 and its relatives: an embedding of distances, looked up by `compute_bias(query_length, key_length)`."""
    table = module._modules.get("relative_attention_bias")
    known = isinstance(table, nn.Embedding) and callable(getattr(module, "compute_bias", None))
    return table if known else None
