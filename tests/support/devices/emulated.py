"""An accelerator emulated in Python: a tensor on "emu" holds a CPU tensor and behaves as on another device.

It shows what a run on the CPU cannot: an operation that mixes tensors of two devices is an error, as on CUDA, and
host synchronisations and copies between devices are counted by file and line. Numbers are those of the CPU, to the
last bit. A process that calls `register` must end with `leave`, because torch aborts otherwise.

    library = register()
    model.to("emu")
    with counted() as counts:
        ...
    counts.syncs, counts.copied_to_host, counts.copied_to_device, counts.mixed    # Counters by "file:line"
"""

import functools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

ROOT = Path(__file__).parents[3]
COPIES = {"aten::copy_", "aten::_to_copy", "aten::_copy_from"}
# Operations whose result the host must know before it goes on: a number, or a shape that depends on the data.
SYNCHRONISING = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::_linalg_eigh",
    "aten::_linalg_svd",
    "aten::masked_select",
    "aten::nonzero",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
}


# What autocast computes in its dtype.
PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv2d", "scaled_dot_product_attention")


@dataclass
class Counts:
    """What happened, by "file:line"; copies also by elements, as the largest of each line.

    The host waits for a copy to the device, unless it is asynchronous.
    """

    syncs: Counter[str] = field(default_factory=Counter)
    copied_to_host: Counter[str] = field(default_factory=Counter)
    copied_to_device: Counter[str] = field(default_factory=Counter)
    copied_async: Counter[str] = field(default_factory=Counter)
    mixed: Counter[str] = field(default_factory=Counter)
    largest: dict[str, int] = field(default_factory=dict)

    def copied(self, kind: str, elements: int) -> None:
        place = caller()
        getattr(self, kind)[place] += 1
        self.largest[place] = max(elements, self.largest.get(place, 0))


_open: list[Counts] = []


@contextmanager
def counted(counts: Counts | None = None) -> Iterator[Counts]:
    """Count in this block, from zero or on."""
    counts = Counts() if counts is None else counts
    _open.append(counts)
    try:
        yield counts
    finally:
        _open.remove(counts)


def caller() -> str:
    """The innermost line of this project that is no part of the emulation; "elsewhere" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        ours = frame.f_code.co_name != "sent"  # a helper, called where a copy is wanted
        if ours and path != __file__ and path.startswith(str(ROOT)) and "site-packages" not in path:
            return f"{Path(path).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class _Module(_DummyBackendModule):
    """What torch asks of `torch.emu`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Nothing: random numbers come from the generator of the CPU."""
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Nothing, as well."""


class Emulated(torch.Tensor):
    """A tensor on "emu"; `raw` is where its numbers are."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "Emulated":
        self = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, dtype=raw.dtype, strides=raw.stride(), storage_offset=raw.storage_offset(), device="emu:0"
        )
        self.raw = raw
        return self

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of the numbers: its address and size tell tied weights apart, as safetensors does."""
        return self.raw.untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In files: a tensor of the CPU, whose reader moves it to a device."""
        return self.raw.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, *args, **(kwargs or {}))


def _raw(x: Any) -> Any:
    return x.raw if isinstance(x, Emulated) else x


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    name = func.name().split(".")[0]
    device = kwargs.get("device")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    on_device = any(isinstance(x, Emulated) for x in tensors)
    on_host = [x for x in tensors if not isinstance(x, Emulated) and x.dim()]
    copies = name in COPIES
    if on_device and on_host and not copies:
        for counts in _open:
            counts.mixed[caller()] += 1
        raise RuntimeError(f"{name}: expected all tensors on one device, got emu and cpu")
    to_host = device is not None and torch.device(device).type == "cpu"
    if copies:
        # `x.copy_(y)` of an x on the host and a y on the device also reads from the device.
        reads = to_host or (on_device and bool(tensors) and not isinstance(tensors[0], Emulated))
        for counts in _open:
            if reads:
                counts.copied("copied_to_host", tensors[-1].numel())
            elif on_host:
                asynchronous = kwargs.get("non_blocking") or True in args[2:]  # of `copy_`
                kind = "copied_async" if asynchronous else "copied_to_device"
                counts.copied(kind, on_host[0].numel())
    if on_device and name in SYNCHRONISING:
        for counts in _open:
            counts.syncs[caller()] += 1
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    result = func(*tree_map(_raw, args), **tree_map(_raw, kwargs))
    if to_host or result is None:  # in place on a list of tensors
        return result
    if name.startswith("c10d::"):  # collectives write into their tensors, and return them with a handle
        return (args[0], result[-1]) if isinstance(result, tuple) else result
    if name.endswith("_") and not name.endswith("__"):  # in place: the tensor that was given
        return args[0]
    return tree_map(lambda x: Emulated(x) if isinstance(x, torch.Tensor) else x, result)


def _constructor(make: Any) -> Any:
    """A function that makes a tensor from Python numbers: torch cannot dispatch its copy to the device."""

    @functools.wraps(make)
    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "emu":
            return make(*args, device=device, **kwargs)
        return make(*args, **kwargs).to(device)

    return made


def _subclassing(make: Any) -> Any:
    """`Tensor._make_subclass`, also of a tensor that is an object of Python already: a class of both kinds."""

    def made(cls: type, data: torch.Tensor, requires_grad: bool = False) -> torch.Tensor:
        if not isinstance(data, Emulated):
            return make(cls, data, requires_grad)
        both = _both(cls)
        self = torch.Tensor._make_wrapper_subclass(
            both,
            data.shape,
            dtype=data.dtype,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            device="emu:0",
            requires_grad=requires_grad,
        )
        self.raw = data.raw
        return self

    return staticmethod(made)


@functools.cache
def _both(cls: type) -> type:
    return type(cls.__name__, (cls, Emulated), {})


def _moving(to: Any) -> Any:
    """`model.to`, which on other devices keeps its Parameter objects, and so what is tied."""

    @functools.wraps(to)
    def moved(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is None or device.type != "emu":
            return to(module, *args, **kwargs)
        if all(isinstance(p, Emulated) for p in module.parameters()):
            return module
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return to(module, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return moved


def _lowered(func: Any) -> Any:
    """The rule of autocast for an operation on products: operands in its dtype."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            dtype = torch.get_autocast_dtype("emu")
            lower = lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
            return func(*tree_map(lower, args), **tree_map(lower, kwargs))

    return run


def _register_autocast() -> list[torch.library.Library]:
    rest, products = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in PRODUCTS:
        products.impl(name, _lowered(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    return [rest, products]


def register() -> list[torch.library.Library]:
    """Make torch.device("emu") usable in this process, once. Its rules live as long as what is returned."""
    nn.Module.to = _moving(nn.Module.to)
    torch.Tensor._make_subclass = _subclassing(torch.Tensor._make_subclass)
    torch.tensor = _constructor(torch.tensor)
    torch.as_tensor = _constructor(torch.as_tensor)
    _setup_privateuseone_for_python_backend("emu", backend_module=_Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run, "PrivateUse1")
    return [library, *_register_autocast()]


def leave(code: int = 0) -> None:
    """End the process at once: torch aborts when the interpreter ends with a backend in Python."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
