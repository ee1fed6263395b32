"""What the weights have cost before this run: a fine-tune continues the spending of what it starts from.

It is looked for where weights come from: this process, if another trainer has trained the model; the folder or the
repository that the model was loaded from; and what the user names, for PEFT does not keep where an adapter was loaded
from. A trained model's config says so (`MARK`), so that a folder that was moved, or a model that was saved without its
record, is an error. A copy of a trained model in memory, or weights that were loaded by hand, cannot be recognised.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from .accounting import Event
from .heads import base_model
from .ledger import LedgerError
from .record import RECORD, not_private

logger = logging.get_logger(__name__)

# What a fresh LoRA layer has of zeros: the second factor, and the first one of an embedding's.
ZERO_AT_FIRST = re.compile(r"\.lora_(?:B|embedding_A)\.(\w+)")
MARK = "differential_privacy"  # in config.json: the file beside it that has the record
STATE_IT = "or set `disjoint_data=True` if they never saw your records"

_trained: "WeakKeyDictionary[nn.Module, dict[str, Any]]" = WeakKeyDictionary()


class Past(NamedTuple):
    """Records of earlier private training, with `ledger` and `private` at least; `unchecked` if one may be missing."""

    records: tuple[dict[str, Any], ...] = ()
    unchecked: bool = False


def remember(model: nn.Module, record: dict[str, Any]) -> None:
    """Keep in mind, as long as the model lives, what its training has cost (`Spending.record`)."""
    events = [Event.from_dict(event) for event in record["ledger"]["events"]]
    if events:  # a run that was refused has not changed the weights, and must be refused again
        _trained[base_model(model)] = {**record, "private": not not_private(events, record["runs"])}


def mark(model: nn.Module) -> None:
    """Let the model's config say, wherever it is saved, that a record belongs to its weights."""
    if (config := getattr(base_model(model), "config", None)) is not None:
        setattr(config, MARK, RECORD)


def past_of(model: nn.Module, continues: str | Path | None = None, known: bool = False) -> Past:
    """What a model has cost so far.

    Args:
        continues: Folder or Hub repository with a privacy.json to be continued, beside what is found.
        known: The run's own ledger has a history, in which the origin of the weights was settled.
    """
    base = base_model(model)
    named = () if continues is None else (_named(continues),)
    if base in _trained:
        return Past((_trained[base], *named))
    if not known and not named and (weight := _trained_adapter(model)):
        raise LedgerError(
            f"`{weight}` is not zero: the adapter was trained before, and PEFT does not keep where it was loaded from."
            " Name the folder or repository with DPTrainer(continues=...), so that its spending is continued,"
            f" {STATE_IT}."
        )
    origin, unchecked = _origin(base, known)
    marked = hasattr(getattr(base, "config", None), MARK)
    if marked and not (known or named or origin or unchecked):
        raise LedgerError(
            f"The model's config says that its weights have a record, and there is no {RECORD} where it was loaded"
            f" from ({base.config._name_or_path!r}). Name the folder or repository that has it with"
            f" DPTrainer(continues=...), {STATE_IT}."
        )
    counted = [source for record in named for source in record["ledger"].get("continues") or ()]
    if origin and any(source["head"] == origin["ledger"]["head"] for source in counted):
        return Past(named)  # the adapter's training has taken it over
    return Past((origin, *named) if origin else named, unchecked)


def _origin(model: nn.Module, known: bool) -> tuple[dict[str, Any] | None, bool]:
    """The privacy.json of where a model was loaded from, and whether that could not be looked up."""
    config = getattr(model, "config", None)
    name, commit = getattr(config, "_name_or_path", None), getattr(config, "_commit_hash", None)
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
        [Event.from_dict(event) for event in record["ledger"]["events"]]
        record["ledger"]["head"], record["ledger"]["length"]
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"{str(path)!r} cannot be read ({error!r}), so it is not known what the base model has cost. Repair the"
            " file, or set `disjoint_data=True` if the base model never saw your records."
        ) from error
    return record


def _trained_adapter(model: nn.Module) -> str | None:
    """A LoRA weight that a fresh adapter would have at zero; None if there is none, or if that proves nothing."""
    for name, adapter, weight in _zero_at_first(model):
        init = getattr((getattr(model, "peft_config", None) or {}).get(adapter), "init_lora_weights", None)
        values = weight.to_local() if isinstance(weight, DTensor) else weight
        if init in (True, "gaussian") and not values.is_meta and bool(values.any()):
            return name
    return None


def _zero_at_first(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        if found := ZERO_AT_FIRST.search(name):
            yield name, found[1], parameter
