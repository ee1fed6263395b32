"""What the weights have cost before this run: a fine-tune continues the spending of what it starts from.

It is looked for where weights come from: this process, if another trainer has trained the model; the folder or the
repository that the model was loaded from; and what the user names, for PEFT does not keep where an adapter was loaded
from. A trained model's config says so (`MARK`), so that a folder that was moved, or a model that was saved without its
record, is an error. A copy of a trained model in memory, an adapter that was merged into its base model, or weights
that were loaded by hand cannot be recognised.
"""

import copy
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from torch import nn
from transformers.utils import logging

from hf_private.tasks.heads import base_model

from .adapters import trained_adapter, unreadable_adapter
from .inheritance import UNKNOWN, charges, debts
from .ledger import LedgerError
from .memory import remembered, settled
from .statement import RECORD

logger = logging.get_logger(__name__)

MARK = "differential_privacy"  # in config.json: the file beside it that has the record
STATE_IT = "or set `disjoint_data=True` if they never saw your records"


class Past(NamedTuple):
    """Records of earlier private training, with `ledger` and `private` at least, and what may be missing.

    `unchecked` are names of `record.ADMISSIONS`, for what could not be looked up.
    """

    records: tuple[dict[str, Any], ...] = ()
    unchecked: tuple[str, ...] = ()


def mark(model: nn.Module) -> None:
    """Let the model's config say, wherever it is saved, that a record belongs to its weights.

    On a copy: another model may be built from the same object.
    """
    base = base_model(model)
    config = getattr(base, "config", None)
    if config is None or hasattr(config, MARK):
        return
    marked = copy.deepcopy(config)
    setattr(marked, MARK, RECORD)
    for module in model.modules():
        if module.__dict__.get("config") is config:
            module.config = marked


def past_of(model: nn.Module, continues: str | Path | None = None, known: bool = False) -> Past:
    """What a model has cost so far.

    Args:
        continues: Folder or Hub repository with a privacy.json to be continued, beside what is found.
        known: The weights are a checkpoint's: the run that is resumed has settled what they began with.
    """
    named = () if continues is None else (_named(continues),)
    unchecked = _check_adapters(model) if not known and not named else ()
    found = [*remembered(model)]
    for config in _configs(base_model(model), parts_only=bool(found)):  # the whole is known then
        origin, unreachable = _origin(config, known or bool(found))
        found += [origin] if origin else []
        recorded = any(record["ledger"]["events"] for record in found)  # none if it was saved where it was not trained
        if hasattr(config, MARK) and not (known or named or recorded or unreachable):
            raise LedgerError(
                f"The model's config says that its weights have a record, and there is no {RECORD} of it where it was"
                f" loaded from ({config._name_or_path!r}). Name the folder or repository that has it with"
                f" DPTrainer(continues=...), {STATE_IT}."
            )
        if unreachable and "base_model_unchecked" not in unchecked:
            unchecked = ("base_model_unchecked", *unchecked)
    return Past((*found, *named), unchecked)


def _configs(model: nn.Module, parts_only: bool) -> list[Any]:
    """The model's own config, and those of trained models that are parts of it, as an encoder loaded by itself."""
    own, inside = getattr(model, "config", None), (module.__dict__.get("config") for module in model.modules())
    configs = {} if own is None else {_came_from(own): own}
    for config in inside:
        if hasattr(config, MARK):
            configs.setdefault(_came_from(config), config)
    return list(configs.values())[int(parts_only and own is not None) :]


def _came_from(config: Any) -> tuple[str | None, str | None]:
    """Folder or repository that a model was loaded from, and its revision."""
    return getattr(config, "_name_or_path", None), getattr(config, "_commit_hash", None)


def _check_adapters(model: nn.Module) -> tuple[str, ...]:
    """Refuse adapters that were trained nobody knows where; what the card has to admit of others."""
    if weight := trained_adapter(model, settled):
        raise LedgerError(
            f"`{weight}` is not as a fresh adapter has it: it was trained before, and PEFT does not keep where it was"
            " loaded from. Name the folder or repository with DPTrainer(continues=...), so that its spending is"
            " continued; the output folder, too, if it was trained there: nothing is charged twice. Or set"
            " `disjoint_data=True` if it never saw your records."
        )
    if weight := unreadable_adapter(model, settled):
        logger.warning(
            f"`{weight}` does not show whether its adapter was trained before. If it was, on records of yours, name"
            " its folder or repository with DPTrainer(continues=...): its spending is missing here. The card will say"
            " so."
        )
        return ("adapter_unchecked",)
    return ()


def _origin(config: Any, known: bool) -> tuple[dict[str, Any] | None, bool]:
    """The privacy.json of where a model was loaded from, and whether that could not be looked up."""
    name, commit = _came_from(config)
    if not name:
        return None, False
    if os.path.isdir(name):
        return _read(Path(name, RECORD)), False
    if commit is None:  # named by hand, or a folder that is gone
        if not known and (os.path.isabs(name) or name.startswith((".", "~"))):
            raise LedgerError(
                f"{name!r}, where the model was loaded from, is not there any more, so it is not known what its"
                f" weights have cost. Put it back, name a copy with DPTrainer(continues=...), {STATE_IT}."
            )
        return None, False
    try:
        return _read(_on_hub(name, commit)), False
    except ConnectionError as error:
        logger.warning(
            f"It cannot be looked up whether {name!r} was trained privately: {error}. If it was, on records of yours,"
            " its spending is missing here. The card will say so."
        )
        return None, True


def _on_hub(repo: str, revision: str | None = None) -> Path | None:
    """privacy.json of a repository; None if it has none, ConnectionError if nobody knows."""
    path = try_to_load_from_cache(repo, RECORD, revision=revision)
    if path is _CACHED_NO_EXIST:
        return None
    try:
        return Path(path or hf_hub_download(repo, RECORD, revision=revision))
    except LocalEntryNotFoundError as error:  # offline
        raise ConnectionError("the Hub cannot be reached") from error
    except EntryNotFoundError:
        return None
    except Exception as error:  # whatever the network and the server may do
        raise ConnectionError(str(error).splitlines()[0]) from error


def _named(continues: str | Path) -> dict[str, Any]:
    try:
        path = Path(continues, RECORD) if os.path.isdir(continues) else _on_hub(str(continues))
    except ConnectionError as error:
        raise LedgerError(f"`continues` = {str(continues)!r} cannot be read: {error}. Give a local folder.") from error
    if (record := _read(path)) is None:
        raise LedgerError(f"`continues` must be a folder or a repository with a {RECORD}, got {str(continues)!r}.")
    return record


def _read(path: Path | None) -> dict[str, Any] | None:
    if path is None or not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        for debt in debts(record):
            if debt != UNKNOWN:
                charges(debt, 1)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(
            f"{str(path)!r} cannot be read ({error!r}), so it is not known what the base model has cost. Repair the"
            " file, or set `disjoint_data=True` if the base model never saw your records."
        ) from error
    return record
