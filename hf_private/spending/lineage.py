"""Finds what the weights have cost before a run. The rules:

1. Weights that were loaded from a folder or Hub repository with a statement (privacy.json) bring its spending along.
2. Parameters that were trained in this process bring their spending along, also into another model.
3. `DPTrainer(continues=...)` names a statement that cannot be found: PEFT does not keep where an adapter came from.
4. `DPConfig(disjoint_data=True)` leaves all of it out, and the card says so. A later run without it is charged.
5. If the Hub cannot be reached, or an adapter is randomly initialised, the card says that this is unchecked.
6. Everything else is refused (`unknown_cost`): a model that is marked as trained (`MARK` in its config) and has no
   statement, a folder that is gone, a statement that cannot be read, a trained adapter that is not named.
"""

import copy
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import logging

from hf_private.gradients.tensors import local
from hf_private.tasks.heads import base_model

from .costs import UNKNOWN, Past, Statement, all_costs, events_of, unknown_cost
from .registry import known, trainings
from .statement import STATEMENT, statement_on_hub

logger = logging.get_logger(__name__)

MARK = "differential_privacy"  # in config.json: the file beside it that holds the statement
FRESH = ((re.compile(r"\.lora_(?:B|embedding_A)\."), 0.0), (re.compile(r"\.ia3_l\."), 1.0))  # values before training
COPIES = re.compile(r"\.(?:modules_to_save|trainable_tokens_delta)\.")  # they start as the base model's weights


def mark(model: nn.Module) -> None:
    """Mark the model as trained, in a copy of its config, because other models may share the object."""
    config = getattr(base_model(model), "config", None)
    if config is not None and not hasattr(config, MARK):
        marked = copy.deepcopy(config)
        setattr(marked, MARK, STATEMENT)
        for module in model.modules():
            if module.__dict__.get("config") is config:
                module.config = marked


def past_of(model: nn.Module, continues: str | Path | None = None, resumed: bool = False) -> Past:
    """The earlier training of a model. The weights of a `resumed` run were looked up when it began."""
    named = () if continues is None else (_named(continues),)
    settled = resumed or bool(named)
    unchecked = () if settled else _check_adapters(model)
    found = [training.statement for training in trainings(model)]
    for config, parameters in _origins(model):
        trained_here = all(known(p).cost for p in parameters)
        if trained_here and not any(known(p).is_copy for p in parameters):
            continue
        origin, unreachable = _statement_of_origin(config, settled or trained_here)
        found += [origin] if origin else []
        has_spending = origin and origin["ledger"]["events"]
        if hasattr(config, MARK) and not any((settled, trained_here, unreachable, has_spending)):
            raise unknown_cost(f"the model is marked as trained, and {config._name_or_path!r} has no {STATEMENT}")
        unchecked = (*unchecked, "base_model_unchecked") if unreachable else unchecked
    return Past((*found, *named), tuple(dict.fromkeys(unchecked)), bool(named))


def _origins(model: nn.Module) -> Iterable[tuple[Any, list[nn.Parameter]]]:
    """The configs that tell where weights were loaded from, with their parameters, adapters not included."""
    groups: dict[Any, tuple[Any, list[nn.Parameter]]] = {}
    adapters = {id(p) for _, p, _ in _adapter_weights(model)}

    def visit(module: nn.Module, config: Any) -> None:
        own = module.__dict__.get("config")
        config = own if own is not None and (config is None or hasattr(own, MARK)) else config
        if config is not None:
            origin = (*_name_and_commit(config), hasattr(config, MARK))
            groups.setdefault(origin, (config, []))[1].extend(
                p for p in module.parameters(recurse=False) if id(p) not in adapters
            )
        for child in module.children():
            visit(child, config)

    visit(base_model(model), None)
    return groups.values()


def _name_and_commit(config: Any) -> tuple[str | None, str | None]:
    return getattr(config, "_name_or_path", None), getattr(config, "_commit_hash", None)


def _statement_of_origin(config: Any, settled: bool) -> tuple[Statement | None, bool]:
    """The statement of where a model was loaded from, and whether that could not be reached."""
    name, commit = _name_and_commit(config)
    if not name or os.path.isdir(name):
        return _read(Path(name, STATEMENT)) if name else None, False
    if commit is None:  # a name that was set by hand, or a folder that is gone
        if not settled and (os.path.isabs(name) or name.startswith((".", "~"))):
            raise unknown_cost(f"{name!r}, where the model was loaded from, does not exist any more")
        return None, False
    try:
        return _read(statement_on_hub(name, commit)), False
    except ConnectionError as error:
        logger.warning(f"Earlier private training of {name!r} cannot be looked up: {error}. The card will say so.")
        return None, True


def _named(continues: str | Path) -> Statement:
    try:
        statement = _read(Path(continues, STATEMENT) if os.path.isdir(continues) else statement_on_hub(str(continues)))
    except ConnectionError as error:
        raise unknown_cost(f"`continues` = {str(continues)!r} cannot be read ({error})") from error
    if statement is None:
        raise unknown_cost(f"`continues` = {str(continues)!r} has no {STATEMENT}")
    return statement


def _read(path: Path | None) -> Statement | None:
    if path is None or not path.is_file():
        return None
    try:
        statement = json.loads(path.read_text())
        for cost in [one for one in all_costs(statement) if one != UNKNOWN]:
            events_of(cost)  # raises an error for what cannot be charged
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unknown_cost(f"{str(path)!r} cannot be read ({error!r})") from error
    return statement


def _adapter_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """The weights of all adapters with their configs. Inactive adapters count: they are saved, too."""
    for adapter, config in (getattr(model, "peft_config", None) or {}).items():
        part = re.compile(rf"\.{re.escape(adapter)}(?:\.|$)")
        yield from ((name, p, config) for name, p in model.named_parameters() if part.search(name))


def _check_adapters(model: nn.Module) -> tuple[str, ...]:
    """Refuse trained adapters of unknown origin. Some kinds start at values that show training, others do not."""
    unchecked: tuple[str, ...] = ()
    for name, p, config in _adapter_weights(model):
        if known(p).cost or COPIES.search(name):
            continue
        starts = {"LORA": getattr(config, "init_lora_weights", 0), "IA3": getattr(config, "init_ia3_weights", 0)}
        fresh = next((value for pattern, value in FRESH if pattern.search(name)), None)
        values = local(p)
        if starts.get(config.peft_type) not in (True, "gaussian"):
            unchecked = ("adapter_unchecked",)
        elif fresh is not None and not values.is_meta and bool((values != fresh).any()):
            raise unknown_cost(f"`{name}` belongs to a trained adapter, and PEFT does not keep where it came from")
    if unchecked:
        logger.warning("Earlier training of a randomly initialised adapter cannot be detected. The card will say so.")
    return unchecked
