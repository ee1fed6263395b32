"""The release guard: which files of a folder may be published, and an upload of exactly those.

Trainer uploads all that lies in the output folder. Some of it would give away what the mechanism protects: states of
generators, un-noised metrics, pickled arguments, the ledger's timing, copies of the data. None of it is needed to use
or to check the model.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi

from hf_private import __version__
from hf_private.spending.statement import RECORD

from .curve import CURVE_FILE

LOCAL = {  # pattern of a file's or a folder's name -> why it stays here
    "_*": "local: the ledger and work files",
    ".*": "local: hidden",
    "checkpoint-*": "local: a checkpoint, with its optimizer and its ledger",
    "ledger*.jsonl": "the ledger's detail: when each step ran",
    "rng_state*": "a generator's state, which replays dropout and augmentation",
    "random_states*": "a generator's state, which replays dropout and augmentation",
    "training_args.bin": "pickled arguments: paths and seed, and secrets of whoever wrote them",
    "trainer_state.json": "the log of training",
    "runs": "logs of training",
    "wandb": "logs of training",
    "mlruns": "logs of training",
    "events.out.tfevents*": "logs of training",
    "*.log": "logs of training",
    "*.bin": "a pickle, which runs code when it is loaded",
    "*.pt": "a pickle, which runs code when it is loaded",
    "*.pth": "a pickle, which runs code when it is loaded",
    "*.ckpt": "a pickle, which runs code when it is loaded",
    "*.pkl": "a pickle, which runs code when it is loaded",
    "*.pickle": "a pickle, which runs code when it is loaded",
    "*.arrow": "a copy of data",
    "*.parquet": "a copy of data",
    "*.csv": "a copy of data",
    "*.jsonl": "a copy of data",
}
KEPT = (".gitattributes",)
MODEL_FILES = ("*config.json", "*vocab*.json", "*token*.json", "*.index.json", "chat_template.json", RECORD)
PUBLISHED = (  # what a model, its card and its use consist of; a copy of the data can have any other name
    *MODEL_FILES,
    *("*.safetensors", "*.md", "*.py", "*.jinja", CURVE_FILE, "LICENSE*", "NOTICE*", ".gitattributes"),
    *("vocab.txt", "merges.txt", "*.model", "*.tiktoken", "normalizer.json", "all_results.json", "eval_results.json"),
)
UNNOISED = re.compile(r'"(nonprivate_\w+|train_loss|loss|grad_norm|num_input_tokens_seen)"\s*:')
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")
TEXT = (".json", ".md", ".txt", ".yaml", ".yml", ".py", ".jinja")


class ReleaseError(RuntimeError):
    """A folder that must not be published as it is: nothing was uploaded."""


@dataclass(frozen=True)
class Release:
    """What may be published of a folder, what is left out of it, and what forbids publishing at all."""

    files: tuple[str, ...]
    left_out: dict[str, str]
    refused: dict[str, str]


def reason_to_stay(name: str) -> str | None:
    """Why a file of this name is not published; None if it may be.

    >>> reason_to_stay("model.safetensors")
    >>> reason_to_stay("runs/Nov01/events.out.tfevents.1")
    'logs of training'
    """
    for part in PurePosixPath(name).parts:
        for pattern, reason in LOCAL.items():
            if fnmatch(part, pattern) and part not in KEPT:
                return reason
    return None


def scan(folder: str | Path) -> Release:
    """Decide about every file in a folder, by its name and, where it is text, by what it says."""
    folder, files, left_out, refused = Path(folder), [], {}, {}
    for name in _names(folder):
        path = folder / name
        if reason := reason_to_stay(name):
            left_out[name] = reason
        elif not any(fnmatch(path.name, pattern) for pattern in PUBLISHED):
            left_out[name] = "no file that a model needs: upload it by hand, if anyone may see it"
        elif path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            left_out[name] = "a link out of the folder"
        elif path.suffix in TEXT and (text := path.read_text(encoding="utf-8", errors="replace")):
            if TOKEN.search(text):
                refused[name] = "holds an access token: remove it, and revoke the token"
            elif metric := _unnoised(path, text):  # a vocabulary may well hold the word "loss"
                left_out[name] = f"un-noised metric `{metric}`"
            elif name.endswith(".md") and re.search(r"^\|.*Training Loss|^- seed:", text, re.MULTILINE):
                refused[name] = "shows the training loss or the seed: write the card again (`hf-private card`)"
            else:
                files.append(name)
        else:
            files.append(name)
    if RECORD not in files:
        refused.setdefault(RECORD, "is missing, so nobody could check the model: save it with DPTrainer.save_model")
    else:
        try:
            json.loads((folder / RECORD).read_text())
        except ValueError:
            refused[RECORD] = "is not JSON: write it again with DPTrainer.save_model"
    return Release(tuple(files), left_out, refused)


def check(folder: str | Path) -> Release:
    """What may be published of a folder; raises `ReleaseError` if it may not be published."""
    release = scan(folder)
    if release.refused:
        reasons = "\n".join(f"`{name}` {reason}." for name, reason in release.refused.items())
        raise ReleaseError(f"{str(folder)!r} cannot be published:\n{reasons}")
    return release


def publish(folder: str | Path, repo_id: str, **options: Any) -> Any:
    """Upload what may be published of a folder, and nothing else.

    Args:
        options: As `HfApi.upload_folder` takes them: commit_message, token, revision, run_as_future.
    """
    release = check(folder)
    api = HfApi(library_name="hf_private", library_version=__version__)
    return api.upload_folder(
        repo_id=repo_id, folder_path=folder, allow_patterns=[escape(name) for name in release.files], **options
    )


def stage(source: str | Path, target: str | Path) -> Path:
    """A copy of what may be published, which stays as it is while `source` is rotated away; links where possible."""
    source, target = Path(source), Path(target)
    shutil.rmtree(target, ignore_errors=True)
    for name in check(source).files:
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, copy)
        except OSError:
            shutil.copyfile(source / name, copy)
    return target


def _unnoised(path: Path, text: str) -> str | None:
    if path.suffix != ".json" or any(fnmatch(path.name, pattern) for pattern in MODEL_FILES):
        return None
    found = UNNOISED.search(text)
    return found and found[1]


def _names(folder: Path) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders.sort()
        for file in sorted(files):
            yield Path(root, file).relative_to(folder).as_posix()
