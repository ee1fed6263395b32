"""The release guard: which files of a folder may be published, and an upload of exactly those.

Trainer uploads everything in the output folder. Some of it would leak what the mechanism protects: states of random
generators, un-noised metrics, pickled arguments, the ledger's times, copies of the data. None of them is needed to
use or check the model.
"""

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
from hf_private.spending.statement import STATEMENT

from .curve import CURVE_FILE
from .schema import parse_json

PICKLE = "a pickle, which runs code when it is loaded"
LOCAL = {  # pattern of a file's or a folder's name -> why it stays here
    "_*": "local: the ledger and work files",
    ".*": "local: hidden",
    "checkpoint-*": "local: a checkpoint, with its optimizer and its ledger",
    "ledger*.jsonl": "the ledger's detail: when each step ran",
    "rng_state*": "a generator's state, which replays dropout and augmentation",
    "random_states*": "a generator's state, which replays dropout and augmentation",
    "training_args.bin": "pickled arguments: paths, the seed and possibly secrets",
    "trainer_state.json": "the log of training",
    "runs": "logs of training",
    "wandb": "logs of training",
    "mlruns": "logs of training",
    "events.out.tfevents*": "logs of training",
    "*.log": "logs of training",
    "*.bin": PICKLE,
    "*.pt": PICKLE,
    "*.pth": PICKLE,
    "*.ckpt": PICKLE,
    "*.pkl": PICKLE,
    "*.pickle": PICKLE,
    "*.arrow": "a copy of data",
    "*.parquet": "a copy of data",
    "*.csv": "a copy of data",
    "*.jsonl": "a copy of data",
}
KEPT = (".gitattributes",)

FORMATS = frozenset(".bin .ckpt .gguf .h5 .msgpack .onnx .ot .pt .pth .safetensors .tflite".split())
NO_WEIGHTS = re.compile(r"(optimizer|scheduler|scaler)\.(bin|pt)")  # of a checkpoint

# What `from_pretrained` reads, by its exact name: `tokenized_train.json` and `patients_vocab.json` are copies of data
MODEL = frozenset("config.json generation_config.json model.safetensors model.safetensors.index.json".split())
ADAPTER = frozenset("adapter_config.json adapter_model.safetensors anchor_config.json carrier_config.json".split())
TOKENIZER = frozenset(
    """
    added_tokens.json bpe.codes byte_maps.json chat_template.jinja chat_template.json dict.txt emoji.json
    entity_vocab.json merges.txt normalizer.json prophetnet.tokenizer sentencepiece.bpe.model sentencepiece.model
    source.spm special_tokens_map.json spiece.model spm.model spm_char.model target.spm target_vocab.json
    tiktoken.model tokenizer.json tokenizer.model tokenizer_config.json vocab-src.json vocab-tgt.json vocab.bpe
    vocab.json vocab.txt word_pronunciation.json word_shape.json
    """.split()
)
PROCESSOR = frozenset(
    """
    audio_tokenizer_config.json preprocessor_config.json processor_config.json video_preprocessor_config.json
    """.split()
)
RESULTS = frozenset({"all_results.json", "eval_results.json"})  # left out if they hold metrics of the training data
CARD_FILES = frozenset(
    {"README.md", STATEMENT, CURVE_FILE, ".gitattributes"}
    | {f"{name}{suffix}" for name in ("LICENSE", "NOTICE") for suffix in ("", ".md", ".txt")}
)
PUBLISHED = MODEL | ADAPTER | TOKENIZER | PROCESSOR | RESULTS | CARD_FILES
PATTERNED = re.compile(  # names with a part that differs: shards, code of custom models, further templates and parts
    r"(model|adapter_model)-\d{5}-of-\d{5}\.safetensors"
    r"|(configuration|feature_extraction|image_processing|modeling|processing|tokenization|video_processing)_\w+\.py"
    r"|additional_chat_templates/\w+\.jinja"
)
UNNOISED = re.compile(r'"(nonprivate_\w+|train_loss|loss|grad_norm|num_input_tokens_seen)"\s*:')
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")
TEXT = ("", ".jinja", ".json", ".md", ".py", ".txt")
TEXT_LIMIT = 200_000_000  # bytes; no tokenizer is larger


class ReleaseError(RuntimeError):
    """The folder must not be published as it is. Nothing was uploaded."""


@dataclass(frozen=True)
class Release:
    """Which files of a folder may be published, which are left out and why, and what forbids publishing at all."""

    files: tuple[str, ...]
    left_out: dict[str, str]
    refused: dict[str, str]


def reason_to_stay(name: str) -> str | None:
    """Why a file of this name must not be published; None if it may.

    >>> reason_to_stay("model.safetensors")
    >>> reason_to_stay("runs/Nov01/events.out.tfevents.1")
    'logs of training'
    """
    for part in PurePosixPath(name).parts:
        for pattern, reason in LOCAL.items():
            if fnmatch(part, pattern) and part not in KEPT:
                return reason
    return None


def may_hold_weights(name: str) -> bool:
    """Whether a file may be another copy of the model's weights, in any format; files of checkpoints are none.

    >>> may_hold_weights("onnx/model.onnx"), may_hold_weights("checkpoint-3/optimizer.pt")
    (True, False)
    """
    suffix = PurePosixPath(name).suffix.lower()
    reason = reason_to_stay(name)
    return suffix in FORMATS and (reason is None or reason == PICKLE) and not NO_WEIGHTS.fullmatch(name)


def is_published(name: str) -> bool:
    """Whether a model, its card or its use needs a file of this name.

    A named adapter and the second tokenizer of a processor are in folders of their own, one level down.

    >>> is_published("vocab.json"), is_published("patients_vocab.json"), is_published("data/vocab.json")
    (True, False, False)
    """
    folder, _, file = name.rpartition("/")
    if not folder:
        return file in PUBLISHED or PATTERNED.fullmatch(file) is not None
    if PATTERNED.fullmatch(name):
        return True
    if "/" in folder:
        return False
    if folder.endswith("tokenizer") and file in TOKENIZER:
        return True
    return file in ("adapter_config.json", "adapter_model.safetensors")


def scan(folder: str | Path) -> Release:
    """Decide about every file in a folder, by its name and, if it is text, by its content."""
    folder = Path(folder)
    files: list[str] = []
    left_out: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name in _names(folder):
        reason = _reason_by_name(folder, name) or _unnoised(folder / name)
        if reason is None:
            files.append(name)
            problem = _problem(folder / name)
            if problem is not None:
                refused[name] = problem
        else:
            left_out[name] = reason
    if STATEMENT not in files:
        refused.setdefault(
            STATEMENT, "is missing, so the model could not be checked: save it with DPTrainer.save_model"
        )
    return Release(tuple(files), left_out, refused)


def _reason_by_name(folder: Path, name: str) -> str | None:
    """Why a file is left out, judged by its name and its place."""
    path = folder / name
    reason = reason_to_stay(name)
    if reason is not None:
        return reason
    if not is_published(name):
        return "not a file that a model needs: upload it by hand, if anyone may see it"
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        return "a link out of the folder"
    if not path.is_file():  # a named pipe makes its reader wait for ever
        return "not a regular file"
    return None


def _unnoised(path: Path) -> str | None:
    """Why a file of results is left out: it shows a metric of the training data."""
    if path.name not in RESULTS:
        return None
    found = UNNOISED.search(path.read_text(encoding="utf-8", errors="replace"))
    return f"un-noised metric `{found[1]}`" if found else None


def _problem(path: Path) -> str | None:
    """Why the content of a file forbids publishing the folder; None if it does not."""
    if path.suffix not in TEXT:
        return None
    if path.stat().st_size > TEXT_LIMIT:
        return f"has more than {TEXT_LIMIT} bytes: too large to be searched for secrets"
    text = path.read_text(encoding="utf-8", errors="replace")
    if TOKEN.search(text):
        return "holds an access token: remove it, and revoke the token"
    if path.suffix == ".md" and re.search(r"^\|.*Training Loss|^- seed:", text, re.MULTILINE):
        return "shows the training loss or the seed: write the card again (`hf-private card`)"
    if path.name == STATEMENT:
        try:
            parse_json(text)
        except ValueError:
            return "is not JSON: write it again with DPTrainer.save_model"
    return None


def check(folder: str | Path) -> Release:
    """Which files of a folder may be published. Raises `ReleaseError` if the folder must not be published."""
    release = scan(folder)
    if release.refused:
        reasons = "\n".join(f"`{name}` {reason}." for name, reason in release.refused.items())
        raise ReleaseError(f"{str(folder)!r} cannot be published:\n{reasons}")
    return release


def publish(folder: str | Path, repo_id: str, **options: Any) -> Any:
    """Upload the files of a folder that may be published, and nothing else.

    Args:
        options: As `HfApi.upload_folder` takes them: commit_message, token, revision, run_as_future.
    """
    release = check(folder)
    api = HfApi(library_name="hf_private", library_version=__version__)
    return api.upload_folder(
        repo_id=repo_id, folder_path=folder, allow_patterns=[escape(name) for name in release.files], **options
    )


def stage(source: str | Path, target: str | Path) -> Path:
    """Copy (or link) the files that may be published, so that `source` can be deleted before they are uploaded."""
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


def _names(folder: Path) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders.sort()
        for file in sorted(files):
            yield Path(root, file).relative_to(folder).as_posix()
