"""Values that all records share: a parameter that no rule knows, and what is computed of parameters alone.

Each record gets its own copy, (N, *shape), behind a tensor that looks to the model like the value itself, of `shape`.
A function of such values runs once (`once.py`), so a table of relative positions, the norm that is applied to it and
the projection of both stay values that all records share. Where one meets an activation, record n's copy meets the
rows of record n, and an ordinary tensor leaves: the gradient of the copies is the per-sample gradient. A weight that
is computed meets them by the rule of a linear layer or a convolution, which forms that gradient.

`dispatch.py` sends calls to rules, parts or copies, `copied_call.py` runs a call with copies, and `agreement.py`
compares it with the call without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .attribution import PART, UncoveredError
from .once import is_same
from .tap import Tap, copied
from .tapped import Tapped, plainly


class Shared(Tensor):
    """A value that all records share, with a copy for each record."""

    copies: Tensor  # (N, *shape)
    tap: Tap  # of the parameter that it was made from
    entries: frozenset[str]  # names of all of them
    fresh: bool  # whether a use of one of them is new, so that results are checked
    aliases: list[ref]  # of the values that are views of the same memory, itself included

    @staticmethod
    def __new__(cls, copies: Tensor, tap: Tap, names: frozenset[str], fresh: bool) -> Shared:
        shared = wrapper(cls, copies, copies.shape[1:], tap, names, fresh)
        shared.copies = copies
        return shared

    @classmethod
    def of(cls, tapped: Tapped) -> Shared:
        """A parameter, once per record."""
        new = tapped.tap.announce((tapped.entry,), torch.Size([tapped.tap.batch_size]))
        tapped.tap.book.copied.add(tapped.entry)
        copies = copied(tapped.tap, tapped.plain, tapped.entry)
        return cls(copies, tapped.tap, frozenset([tapped.entry]), new)

    @property
    def entry(self) -> str:
        """What a rule calls it that takes it for a weight."""
        return "=" + "+".join(sorted(self.entries))

    @property
    def plain(self) -> Tensor:
        """The value outside the graph, if all copies are the same."""
        return self.copies[0].detach()

    def own_memory(self) -> None:
        """Give the copies memory of their own, before a function changes them in place."""
        if not is_same(self.copies):
            return
        if sum(alias() is not None for alias in self.aliases) > 1:
            raise refusal(self.entries, self.tap, "a function changes it in place, and it has views")
        self.copies = self.copies.clone()

    def with_copies(self, copies: Tensor) -> Shared:
        return Shared(copies, self.tap, self.entries, self.fresh)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        from .dispatch import dispatch

        return dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:  # pyrefly: ignore[bad-override]
        found = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Shared))
        raise refusal(found.entries, found.tap, f"`{func}` takes it as it is")


def wrapper(
    cls: type[Shared], like: Tensor, shape: Sequence[int], tap: Tap, names: frozenset[str], fresh: bool
) -> Any:
    """A tensor without values of its own, of the type and place of `like`."""
    shared: Any = torch.Tensor._make_wrapper_subclass(
        cls, shape, dtype=like.dtype, device=like.device, requires_grad=like.is_floating_point()
    )
    shared.tap, shared.entries, shared.fresh, shared.aliases = tap, names, fresh, []
    shared.aliases.append(ref(shared))
    if like.is_floating_point():  # what does not ask here first must not lose the gradient
        plainly(Tensor.register_hook, (shared, _Leaked(names, tap)), {})
    return shared


class _Leaked:
    """A hook that refuses a gradient which did not come through the copies."""

    def __init__(self, names: frozenset[str], tap: Tap) -> None:
        self.names, self.tap = names, tap

    def __call__(self, grad: Tensor) -> None:
        raise refusal(self.names, self.tap, "a function of its own takes it")


def refusal(names: frozenset[str], tap: Tap, why: str) -> UncoveredError:
    shown = " and ".join(f"`{name.partition(PART)[0]}`" for name in sorted(names))
    return UncoveredError(
        f"{shown}: used in a way that no rule covers, and not with one copy per record ({why}). Remedy: {tap.remedy}."
    )


def own_losses(losses: Tensor) -> Tensor:
    """The losses (N,): if all records share them, the n-th of record n's copy."""
    if isinstance(losses, Shared) and losses.dim() == 1 and len(losses) == len(losses.copies):
        return losses.copies.diagonal()
    return losses
