"""Which trainable parameters the engine covers, by which rule, and why the others are refused."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from .bookkeeper import BookKeeper
from .layers import REMEDY, Site, UncoveredError, refusal, sites

RULE_NAMES = {
    "copies": "one copy per record",
    "each record": "each record by itself",
    "relative bias": "relative bias",
}


@dataclass
class Entry:
    """One parameter: `status` is covered, frozen or refused; `note` is the rule, or the reason with its remedy."""

    name: str
    size: int
    status: str
    note: str


def coverage(model: nn.Module, loss: Callable[[], Tensor]) -> list[Entry]:
    """Run one backward pass under the BookKeeper and say what became of every parameter.

    Each refusal is noted, its parameters are frozen, and the pass is tried again, so that all refusals are found. What
    remains trainable afterwards is what could be trained.
    """
    parameters = dict(model.named_parameters())
    rules: dict[int, set[str]] = {}
    for site in sites(model.named_modules()):
        for p in site.parameters.values():  # a tied weight has several sites
            rules.setdefault(id(p), set()).add(_rule(site))
    frozen = {name for name, p in parameters.items() if not p.requires_grad}
    refused = _refused_kinds(model)
    reached: set[str] = set()
    while not parameters.keys() <= frozen | refused.keys():
        for name in refused:
            parameters[name].requires_grad_(False)
        try:
            with BookKeeper(model) as book:
                book.backward(loss())
                reached = set(book.entries())
            break
        except UncoveredError as error:
            open_names = [name for name in parameters if name not in refused and name not in frozen]
            refused |= dict.fromkeys(_blamed(str(error), open_names), str(error))

    def entry(name: str, p: nn.Parameter) -> Entry:
        if name in frozen:
            return Entry(name, p.numel(), "frozen", "")
        if name in refused:
            return Entry(name, p.numel(), "refused", refused[name])
        if name not in reached:
            return Entry(name, p.numel(), "refused", f"Takes no part in the loss. Remedy: {REMEDY}.")
        return Entry(name, p.numel(), "covered", " + ".join(sorted(rules[id(p)])))

    return [entry(name, p) for name, p in parameters.items()]


def without(model: nn.Module, entries: list[Entry]) -> nn.Module:
    """The model with everything frozen that `entries` call refused, so that the rest can be trained."""
    _refused_kinds(model)
    refused = {entry.name for entry in entries if entry.status == "refused"}
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and name not in refused)
    return model


def _rule(site: Site) -> str:
    """The nearest torch class of a module, or how its parameters are told apart otherwise."""
    kinds = [kind.__name__.strip("_") for kind in type(site.module).__mro__ if kind.__module__.startswith("torch.nn")]
    return RULE_NAMES.get(site.kind) or next((kind for kind in kinds if kind != "Module"), type(site.module).__name__)


def _refused_kinds(model: nn.Module) -> dict[str, str]:
    """Parameters of modules that are refused by their kind; the modules go to eval mode, where they harm nobody."""
    found = {}
    for path, module in model.named_modules():
        if reason := refusal(module):
            found |= dict.fromkeys((f"{path}.{name}" for name, _ in module.named_parameters()), f"{reason}.")
            module.eval()
    return found


def _blamed(message: str, candidates: list[str]) -> list[str]:
    """The parameters that an error names, itself or by their module's path; all of them if it names none."""
    named = re.findall(r"`([^`]+)`", message.partition("Remedy")[0])
    return [c for c in candidates if any(c == n or c.startswith(f"{n}.") for n in named)] or candidates
