"""A model whose losses and gradients are looked at, and that is left as it was."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .bookkeeper import trainable
from .tensors import full_precision, is_quantised

HALF = (torch.bfloat16, torch.float16)


def tolerance(dtype: torch.dtype) -> float:
    """Relative difference that rounding explains."""
    return {torch.float64: 1e-7, torch.float32: 2e-3}.get(dtype, 0.1)


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(seed)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put modes, buffers and random state back, whatever happens."""
    modes = {module: module.training for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in model.modules()}
    values = {id(x): x.clone() for owned in buffers.values() for x in owned.values() if x is not None}
    generators = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for module, owned in buffers.items():
                module._buffers.clear()
                module._buffers.update(owned)
                for x in owned.values():
                    if x is not None:
                        x.copy_(values[id(x)])


@contextmanager
def wide(model: nn.Module) -> Iterator[torch.dtype]:
    """Let the model compute in float32 or better, without autocast; yields the coarsest type that is left.

    Half precision would hide a coupling in its rounding. FSDP2 casts weights itself, which stays as it is.
    """
    weights = [x for x in (*model.parameters(), *model.buffers()) if not isinstance(x, DTensor)]
    half = [(x, x.data) for x in weights if x.dtype in HALF]
    wrapped = model.__dict__.get("forward")
    some = next(iter(model.parameters()), torch.zeros(()))
    with ExitStack() as undo:
        if "_original_forward" in model.__dict__:  # Accelerate's autocast around the model
            undo.callback(model.__dict__.__setitem__, "forward", wrapped)
            model.__dict__["forward"] = model.__dict__["_original_forward"]
        for x, data in half:
            undo.callback(setattr, x, "data", data)
            x.data = data.float()
        for module in model.modules():
            if getattr(module, "compute_dtype", None) in HALF:  # bitsandbytes' layers of 4 bits
                undo.callback(setattr, module, "compute_dtype", module.compute_dtype)
                module.compute_dtype = torch.float32  # pyrefly: ignore[bad-argument-type]
        undo.enter_context(full_precision(some.device))
        convolutions = torch.backends.cudnn.conv  # pyrefly: ignore[missing-attribute]  (torch sets it at run time)
        undo.callback(setattr, convolutions, "fp32_precision", convolutions.fp32_precision)
        convolutions.fp32_precision = "ieee"
        yield computes_in(model)


def computes_in(model: nn.Module) -> torch.dtype:
    """The coarsest type among trainable weights, and of FSDP2's mixed precision."""
    dtypes = {p.dtype for p in trainable(model).values()}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            dtypes.add(module._get_fsdp_state()._mp_policy.param_dtype or torch.float64)
    return max(dtypes, key=tolerance, default=torch.float32)


@contextmanager
def nudged(model: nn.Module) -> Iterator[None]:
    """Change the last bit of each weight: what this does to a result shows how much of it is rounding.

    Weights are put back by changing the bits again, so no copy is needed. Shards of FSDP2 and quantised weights stay
    as they are.

    >>> layer = nn.Linear(2, 2)
    >>> before = layer.weight.clone()
    >>> with nudged(layer):
    ...     moved = (layer.weight - before).abs().max()
    >>> bool(0 < moved < 1e-6), torch.equal(layer.weight, before)
    (True, True)
    """
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = [p.data for p in model.parameters() if not isinstance(p, DTensor) and not is_quantised(p)]
    weights = [x for x in plain if x.is_floating_point()]
    bits: list[Tensor] = [x.view(integers[x.element_size()]) for x in weights if x.element_size() in integers]
    for x in bits:
        x.bitwise_xor_(1)
    try:
        yield
    finally:
        for x in bits:
            x.bitwise_xor_(1)
