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
    """One parameter: `status` is covered, frozen or refused; `note` is the rule, or the reason and the remedy."""

    name: str
    size: int
    status: str
    note: str


def coverage(model: nn.Module, loss: Callable[[], Tensor], rows_per_record: int = 1) -> list[Entry]:
    """Run one backward pass under the BookKeeper and report the status of every parameter.

    Each refusal is noted, its parameters are frozen, and the pass runs again, so that all refusals are found. The
    parameters that are still trainable afterwards can be trained.
    """
    parameters = dict(model.named_parameters())
    rules: dict[int, set[str]] = {}
    for site in sites(model.named_modules()):
        for p in site.parameters.values():  # a tied weight has several sites
            rules.setdefault(id(p), set()).add(_rule(site))
    frozen = {name for name, p in parameters.items() if not p.requires_grad}
    refused = _refused_kinds(model)
    reached: set[str] = set()
    while parameters.keys() - frozen - refused.keys():
        for name in refused:
            parameters[name].requires_grad_(False)
        try:
            with BookKeeper(model) as book:
                book.rows_per_record = rows_per_record
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
            return Entry(name, p.numel(), "refused", f"The loss does not depend on it. Remedy: {REMEDY}.")
        return Entry(name, p.numel(), "covered", " + ".join(sorted(rules[id(p)])))

    return [entry(name, p) for name, p in parameters.items()]


def without(model: nn.Module, entries: list[Entry]) -> nn.Module:
    """The model with all refused parameters frozen, so that the others can be trained."""
    _refused_kinds(model)
    refused = {entry.name for entry in entries if entry.status == "refused"}
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and name not in refused)
    return model


def _rule(site: Site) -> str:
    """The name of the rule: a torch class of the module, or the way its per-sample gradients are separated."""
    kinds = [kind.__name__.strip("_") for kind in type(site.module).__mro__ if kind.__module__.startswith("torch.nn")]
    return RULE_NAMES.get(site.kind) or next((kind for kind in kinds if kind != "Module"), type(site.module).__name__)


def _refused_kinds(model: nn.Module) -> dict[str, str]:
    """Parameters of modules that are refused by their kind; puts these modules into eval mode, where they are safe."""
    found = {}
    for path, module in model.named_modules():
        if reason := refusal(module):
            found |= dict.fromkeys((f"{path}.{name}" for name, _ in module.named_parameters()), f"{reason}.")
            module.eval()
    return found


def _blamed(message: str, candidates: list[str]) -> list[str]:
    """The parameters that an error names, directly or by the path of their module; all of them if it names none."""
    named = re.findall(r"`([^`]+)`", message.partition("Remedy")[0])
    blamed = [name for name in candidates if any(f"{name}.".startswith(f"{path}.") for path in named)]
    return blamed or candidates
