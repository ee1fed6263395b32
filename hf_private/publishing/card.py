"""README.md around the privacy section, and the files that a saved model gets: privacy.json, the curve and the card.

Trainer and PEFT write README.md too. So the section stands between two markers and is written again after them.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from huggingface_hub import ModelCard

from hf_private._files import write_atomically
from hf_private.spending.statement import STATEMENT, build_statement, read_statement, to_text

from .curve import CURVE_FILE
from .plain_text import cut
from .section import TAGS, card_tags, render_caution, render_curve, render_section, yaml_block
from .template_versions import in_own_words

CARD = "README.md"
BEGIN, END = "<!-- hf-private: begin {} -->", "<!-- hf-private: end {} -->"
LOCAL_DATA = ("arrow", "csv", "generator", "json", "pandas", "parquet", "text")  # builders, not names of datasets
WEIGHTS = re.compile(r"[^/]+\.safetensors|(?!checkpoint-|[_.])[^/]+/adapter_model\.safetensors")
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f<>|`]+")  # privacy_schema.json allows none of these in a name


def write_card(folder: str | Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Write privacy.json, the curve and the card's privacy section into the folder of a saved model.

    Keeps what an earlier statement in the folder says about `tuning` and `audit`. Of two numbers of runs, the larger
    one counts.

    Args:
        folder: Holds the weights, whose hashes go into the statement. All of its README.md but our section is kept.
        facts: What `DPTrainer.privacy_record` returns.

    Returns: the statement, as it stands in privacy.json.
    """
    folder = Path(folder)
    before = read_statement(folder) or {}
    kept = {name: before[name] for name in ("tuning", "audit") if before.get(name)}
    facts = {**kept, **_public(facts)}
    tried = [source["tuning"] for source in (kept, facts) if source.get("tuning")]
    if tried:
        facts["tuning"] = max(tried, key=lambda tuning: tuning["runs"] or 0)
    statement = build_statement(facts, weight_hashes(folder))
    write_files(folder, statement)
    return statement


def write_files(folder: str | Path, statement: dict[str, Any]) -> None:
    """Write a statement, and the card and the curve that follow from it, in the words of the statement's version."""
    folder = Path(folder)
    card = folder / CARD
    statement = in_own_words(statement)
    text = render_card(statement, card.read_text(encoding="utf-8") if card.is_file() else None)
    write_atomically(folder / STATEMENT, to_text(statement))
    svg = render_curve(statement)
    if svg is None:
        (folder / CURVE_FILE).unlink(missing_ok=True)
    else:
        write_atomically(folder / CURVE_FILE, svg)
    write_atomically(card, text)


def weight_hashes(folder: str | Path) -> dict[str, str]:
    """sha256 of every file of weights in a folder, by name. Nothing is loaded."""
    return {name: sha256(Path(folder, name)) for name in weight_names(folder)}


def weight_names(folder: str | Path) -> list[str]:
    """Names of all files of weights in a folder."""
    folder = Path(folder)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.glob("*.safetensors"))
    names += sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/adapter_model.safetensors"))
    return [name for name in names if is_weights(name) and (folder / name).is_file()]


def is_weights(name: str) -> bool:
    """Whether a file holds weights of the model: in its folder, or in that of a named adapter.

    >>> is_weights("dp/adapter_model.safetensors"), is_weights("checkpoint-3/adapter_model.safetensors")
    (True, False)
    """
    return WEIGHTS.fullmatch(name) is not None


def sha256(path: Path) -> str:
    """Hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def render_card(statement: dict[str, Any], readme: str | None = None) -> str:
    """README.md with the statement's warning, section and metadata, and without what must not be published."""
    card = ModelCard(_empty_card(statement) if readme is None else readme, ignore_metadata_errors=True)
    text = _publishable(card.text)
    for name in ("caution", "section"):
        text = re.sub("\0\n*", "", cut(text, *_markers(name), replacement="\0"))
    lines = text.strip("\n").split("\n")
    heading = next((i for i, line in enumerate(lines) if line.startswith("## ")), len(lines))
    parts = [
        _marked("caution", render_caution(statement)),
        "\n".join(lines[:heading]),
        _marked("section", render_section(statement)),
        "\n".join(lines[heading:]),
    ]
    card.text = "\n" + "\n\n".join(part.strip("\n") for part in parts if part.strip("\n")) + "\n"
    _set_metadata(card, statement)
    return str(card)


def _empty_card(statement: dict[str, Any]) -> str:
    base = statement["scope"]["base_model"]
    title = f"Fine-tuned {base}" if base else "Fine-tuned model"
    return f"---\nlibrary_name: transformers\n---\n\n# {title}\n"


def _set_metadata(card: ModelCard, statement: dict[str, Any]) -> None:
    tags = [tag for tag in card.data.get("tags") or [] if tag not in TAGS and not _local(tag.rpartition(":")[2])]
    card.data["tags"] = [*tags, *(tag for tag in card_tags(statement) if tag not in tags)]
    card.data["differential_privacy"] = yaml_block(statement)
    base = card.data.get("base_model") or statement["scope"]["base_model"]
    card.data["base_model"] = None if not isinstance(base, str | list) or _local(base) else base
    name = statement["dataset"]["name"]
    if not card.data.get("datasets") and name and name not in LOCAL_DATA and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        card.data["datasets"] = [name]


def _publishable(text: str) -> str:
    """Trainer's card without the seed, the training loss and the log's own epsilon."""
    lines: list[str] = []
    dropped: list[int] = []
    for line in text.split("\n"):
        if re.match(r"- (seed|Epsilon|Nonprivate|Privacy)\b.*:", line):
            continue
        if not line.startswith("|"):
            dropped = []
        else:
            cells = line.strip().strip("|").split("|")
            if not dropped and any("Training Loss" in cell for cell in cells):
                dropped = [i for i, cell in enumerate(cells) if cell.strip() in ("Training Loss", "")]
            if dropped:
                line = "|" + "|".join(cell for i, cell in enumerate(cells) if i not in dropped) + "|"
        lines.append(line)
    return "\n".join(lines)


class Parts(NamedTuple):
    """The parts of a card."""

    card: ModelCard
    caution: str
    section: str
    before: str  # the text before the section
    rest: str  # all text but the warning and the section


def split_card(readme: str) -> Parts:
    """Split a card into its parts. A second privacy section is text like any other."""
    card = ModelCard(readme, ignore_metadata_errors=True)
    rest = card.text
    found = {}
    before = ""
    for name in ("caution", "section"):
        begin, end = _markers(name)
        first = rest.find(f"{begin}\n")
        last = rest.find(f"\n{end}", first) if first >= 0 else -1
        found[name] = rest[first + len(begin) : last].strip("\n") if last >= 0 else ""
        if last >= 0:
            before = rest[:first]
            rest = f"{before}\n\n{rest[last + 1 + len(end) :]}"
    return Parts(card, found["caution"], found["section"], before, rest)


def _markers(name: str) -> tuple[str, str]:
    return BEGIN.format(name), END.format(name)


def _marked(name: str, text: str) -> str:
    begin, end = _markers(name)
    return "\n".join((begin, text.strip("\n"), end)) if text else ""


def _local(name: Any) -> TypeGuard[str]:
    """Whether a name is a path on this machine. Such a path must not be published."""
    return isinstance(name, str) and (os.path.isabs(name) or name.startswith((".", "~")) or os.path.isdir(name))


def _public(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts without paths of this machine, with names that a card can print."""
    dataset = dict(facts["dataset"])
    dataset["name"] = _printable(dataset.get("name"))
    base = facts.get("base_model")
    return {**facts, "dataset": dataset, "base_model": _printable(Path(base).name if _local(base) else base)}


def _printable(name: str | None) -> str | None:
    return (UNPRINTABLE.sub("_", name)[:200] or None) if name else None
