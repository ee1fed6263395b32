"""Dispatch of torch functions that take a parameter, or a value computed from parameters alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .attention import attention
from .copied_call import with_copies
from .low_rank import low_rank
from .recurrent import CELLS, is_recurrent
from .routed import Routed
from .shared import Shared
from .tap import AutogradOnlyError, is_computed
from .tapped import Tapped, is_in_place, leaves, part_of, plainly

# What asks for the shape or the kind of a tensor.
ATTRIBUTES = (
    "shape dtype device layout ndim itemsize nbytes requires_grad grad grad_fn is_leaf is_cpu is_cuda is_meta is_mps "
    "is_xpu is_sparse is_quantized is_nested is_mkldnn is_mtia is_ipu is_hpu is_vulkan is_maia is_xla is_sparse_csr "
    "_version names output_nr retains_grad _backward_hooks _post_accumulate_grad_hooks"
).split()
METADATA: set[Any] = {getattr(Tensor, name).__get__ for name in ATTRIBUTES if hasattr(Tensor, name)} | {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.is_contiguous, Tensor.get_device,
    Tensor.storage_offset, Tensor.is_signed, Tensor.__hash__, Tensor.register_hook, Tensor.is_pinned,
    Tensor.untyped_storage, Tensor.data_ptr, Tensor.requires_grad_, torch.is_floating_point, torch.is_complex,
    torch.numel, torch.is_tensor,
}  # fmt: skip
DETACHES: set[Any] = {getattr(Tensor, "data").__get__, Tensor.detach, torch.detach}  # noqa: B009


def dispatch(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Call a torch function that takes a parameter, or a value computed from parameters alone."""
    if func in METADATA:
        return plainly(func, args, kwargs)
    found = [x for x in leaves((args, kwargs)) if isinstance(x, (Tapped, Shared))]
    tap = found[0].tap
    if not tap.book.has_batch:
        return plainly(func, args, kwargs)
    rule = _rule(func, args, kwargs)
    if rule is not None:
        try:
            return rule(tap, *args, **kwargs)
        except AutogradOnlyError:
            pass
    if tap.lone or (isinstance(args[0] if args else None, Tapped) and is_in_place(func, kwargs)):
        return plainly(func, args, kwargs)
    if func in DETACHES:
        return args[0].plain if isinstance(args[0], Tapped) else args[0].copies[0].detach()
    if not torch.is_grad_enabled() and not any(isinstance(x, Shared) for x in found):
        return plainly(
            func, args, kwargs
        )  # inside a function with a gradient of its own (LoHa's), or of no use to one
    parts = part_of(func, args, kwargs)
    if parts is not None:
        return parts
    result = low_rank(func, args, kwargs)
    return with_copies(func, args, kwargs) if result is NotImplemented else result


def _rule(func: Callable, args: tuple, kwargs: dict) -> Callable | None:
    """The rule of a function, if the parameters of the call are where it wants them."""
    from . import COMPUTED, EITHER, INPUTS, RULES, TAKE_SHARED

    rule = RULES.get(func)
    if rule is None:
        return None
    if rule is attention:  # it takes parameters in any place, and leaves none for the call that it makes itself
        return rule if any(isinstance(x, Tapped) for x in (*args, *kwargs.values())) else None
    if func in CELLS:
        return rule if len(args) > 2 and is_recurrent(args[2]) else None
    place, sharing = INPUTS.get(func, 0), TAKE_SHARED.get(func)
    for index, x in enumerate((*args, *kwargs.values())):
        if isinstance(x, Shared) and index != sharing and not (index == 1 and func in COMPUTED and type(x) is Shared):
            return None
        if isinstance(x, Tapped) and index == place != sharing and func not in EITHER:
            return None
    if is_computed(args[1] if len(args) > 1 else None):
        return rule if func in COMPUTED and type(args[0]) in (Tensor, Routed) else None
    if func in EITHER:
        return rule if any(isinstance(x, Tapped) for x in leaves(args)) else None
    parameters = [x for i, x in enumerate((*args, *kwargs.values())) if i != place and isinstance(x, Tapped)]
    return rule if parameters else None
