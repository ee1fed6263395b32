"""Rules: how each layer kind enters the graph, and what it writes into the book.

A rule stands for one torch function (`F.linear`, `F.embedding`, ...). While a module that owns trainable parameters
runs, calls of that function with one of its parameters go to the rule instead. So a subclass that scales, offsets
or permutes around the call (Gemma's and BART's embeddings, channel-first norms) needs no rule of its own, and a
use that no rule knows leaves the parameter in autograd's hands, which the BookKeeper reports as an error.

To add a layer kind: write `rule(tap, *arguments of the function)` in one file here and add it to `RULES`. A rule calls
`tap.announce` in the forward pass. In the backward pass it asks `tap.axis` where the records are, and passes the
per-sample gradients to `tap.observe`, unless the answer is None.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from .attention import attention
from .attribution import PART, Attribution, UncoveredError
from .conv import conv
from .copies import relative_bias, relative_table, run_each, run_with_copies
from .einsum import einsum
from .embedding import embedding
from .linear import addmm, baddbmm, bmm, conv1d, linear, matmul
from .norms import group_norm, layer_norm, rms_norm
from .recurrent import CELLS, recurrent
from .routed import is_adapted, is_experts, run_routed
from .shared import own_losses
from .tap import REMEDY, SHARDED_REMEDY, AutogradOnlyError, Tap
from .tapped import Tapped

RULES: dict[Callable, Callable] = {
    F.linear: linear,
    torch.addmm: addmm,  # Hugging Face's Conv1D
    F.embedding: embedding,
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.group_norm: group_norm,
    torch.conv1d: conv,
    torch.conv2d: conv,
    torch.conv3d: conv,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), matmul),
    **dict.fromkeys((torch.bmm, Tensor.bmm), bmm),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), baddbmm),
    torch.einsum: einsum,
    F.multi_head_attention_forward: attention,
    **{func: recurrent(func) for func in CELLS},
}

# The parameter may be in any place.
EITHER = {func for func, rule in RULES.items() if rule in (matmul, einsum)}
# Which argument of them is the input, where it is not the first.
INPUTS: dict[Callable, int] = {torch.addmm: 1, torch.baddbmm: 1, Tensor.baddbmm: 1}
# Rules of which one argument, here its place, may also be what all records share.
TAKE_SHARED: dict[Callable, int] = {F.linear: 0, F.layer_norm: 0, torch.baddbmm: 0, Tensor.baddbmm: 0}

# Rules that take a weight, as second argument, that is computed of parameters.
COMPUTED: set[Callable] = {func for func, rule in RULES.items() if rule in (linear, conv)}

# Modules that hand their parameters to one of these functions; other modules' small parameters are copied instead.
FUNCTIONAL = (nn.Linear, Conv1D, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _ConvNd, ParametrizationList)
CONTAINERS = (nn.ParameterDict, nn.ParameterList)

# What these very classes do, not their subclasses: there is nothing around the call that could go unseen.
DIRECT: dict[type[nn.Module], Callable] = {
    nn.Linear: lambda tap, m, input: linear(tap, input, m.weight, m.bias),
    nn.LayerNorm: lambda tap, m, input: layer_norm(tap, input, m.normalized_shape, m.weight, m.bias, m.eps),
    Conv1D: conv1d,
}

__all__ = [
    "PART", "REMEDY", "RULES", "SHARDED_REMEDY", "Attribution", "Site", "Tap", "Tapped", "UncoveredError",
    "own_losses", "refusal", "sites",
]  # fmt: skip


class _Redirect(TorchFunctionMode):
    """Send calls with a tapped parameter to their rule; everything else runs as it is."""

    def __init__(self, tap: Tap) -> None:
        super().__init__()
        self.tap = tap

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is not None and any(self.tap.name(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)):
            try:
                return rule(self.tap, *args, **kwargs)
            except AutogradOnlyError:
                if not self.tap.lone:  # else autograd's gradient is that of the one record
                    raise
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Site:
    """A module with trainable parameters of its own: which of its methods is replaced while the book is open."""

    path: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]  # by the name within the module
    kind: str  # "function", "copies", "each record", "relative bias", "experts"

    @property
    def attribute(self) -> str:
        return "compute_bias" if self.kind == "relative bias" else "forward"

    def wrap(self, tap: Tap) -> Callable | None:
        """The replacement of `module.<attribute>`, if there is one: most parameters are caught where they are used."""
        original, direct = getattr(self.module, self.attribute), DIRECT.get(type(self.module))
        computed = any(name in self.module.__dict__ for name in ("weight", "bias"))  # torch's older weight_norm
        if direct and self.kind == "function" and self.attribute not in self.module.__dict__ and not computed:
            return partial(direct, tap, self.module)
        # Around other modules' calls a copy may meet the wrong axis, so there they are made at the use itself.
        if not tap.book.sharded and (self.kind == "function" or self.kind == "copies" and any(self.module.children())):
            return None
        if self.kind == "function":

            def redirected(*args: Any, **kwargs: Any) -> Any:
                with _Redirect(tap):
                    return original(*args, **kwargs)

            return redirected
        run = {
            "copies": run_with_copies,
            "each record": run_each,
            "relative bias": relative_bias,
            "experts": run_routed,
        }[self.kind]

        def call(*args: Any, **kwargs: Any) -> Any:
            return run(tap, original, args, kwargs)

        return call


def sites(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[Site]:
    """Every one of a model's `named_modules()` that owns trainable parameters, with the way they are covered."""
    taken: set[nn.Module] = set()
    for path, module in modules:
        if module in taken:
            continue
        table = relative_table(module)
        if table is not None:
            taken.add(table)
            trained = {f"relative_attention_bias.{name}": p for name, p in table.named_parameters() if p.requires_grad}
            if trained:
                yield Site(path, module, trained, "relative bias")
        inside = {}
        for name, child in module._modules.items():  # `named_children` and its like cost more than the look itself
            if isinstance(child, CONTAINERS):  # never called: their owner uses them
                taken.add(child)
                inside |= {f"{name}.{key}": p for key, p in child.named_parameters() if p.requires_grad}
        if inside:
            yield Site(path, module, inside, "each record")
        own = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
        if not own:
            if is_experts(type(module)) and (is_adapted(path) or any(p.requires_grad for p in module.parameters())):
                yield Site(path, module, {}, "experts")
            continue
        if isinstance(module, FUNCTIONAL):
            small = {}
        elif all(p.dim() < 2 for p in own.values()):
            small = own
        else:
            small = {name: p for name, p in own.items() if p.dim() > 1 and p.shape[0] == 1}
        large = {name: p for name, p in own.items() if name not in small}
        if is_experts(type(module)):
            yield Site(path, module, own, "experts")
            continue
        if small:
            yield Site(path, module, small, "copies")
        if large:
            yield Site(path, module, large, "function")


def refusal(module: nn.Module) -> str | None:
    """Why no model with this module can be trained privately, or None."""
    kind = type(module).__name__
    if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
        return f"{kind} mixes the records of a batch. Remedy: replace it by GroupNorm, or keep it frozen in eval mode"
    if isinstance(module, _InstanceNorm) and module.track_running_stats and module.training:
        return f"{kind} keeps running statistics of private data. Remedy: build it with track_running_stats=False"
    return None
