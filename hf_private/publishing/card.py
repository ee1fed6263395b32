"""The model card: a privacy section for people, a YAML block for programs, and privacy.json, which both follow from.

Trainer and PEFT write README.md too, each in its own way. So the section is written after them, between two markers,
and written again whenever they did.
"""

import hashlib
import math
import os
import re
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import ModelCard

from hf_private.spending.statement import RECORD, build_record, read_record, to_text

from .curve import CURVE_FILE, curve_svg

CARD = "README.md"
BEGIN, END = "<!-- hf-private: begin {} -->", "<!-- hf-private: end {} -->"
TAGS = ("differential-privacy", "differential_privacy", "dp-sgd")
LOCAL_DATA = ("arrow", "csv", "generator", "json", "pandas", "parquet", "text")  # builders, not names of datasets
SHOWN = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4)  # rows of the table of delta(epsilon), as multiples of epsilon


def write_card(folder: str | Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Write privacy.json, the curve and the card's privacy section into the folder of a saved model.

    What was recorded there by others, the runs tried before (`tuning`) and an `audit`, is kept.

    Args:
        folder: Holds the weights, whose hashes go into the record. Of a README.md in it, all but our section is kept.
        facts: What `DPTrainer.privacy_record` returns.

    Returns: the record, as it stands in privacy.json.
    """
    folder = Path(folder)
    before = read_record(folder) or {}
    kept = {name: before[name] for name in ("tuning", "audit") if before.get(name)}
    tried = [one["tuning"] for one in (kept, facts) if one.get("tuning")]  # the larger number holds
    public = {**facts, "base_model": _public_name(facts.get("base_model"))}
    public |= {"tuning": max(tried, key=lambda tuning: tuning["runs"] or 0)} if tried else {}
    record = build_record({**kept, **public}, weight_hashes(folder))
    write_files(folder, record)
    return record


def write_files(folder: str | Path, record: dict[str, Any]) -> None:
    """Write a record, and the card and the curve that follow from it."""
    folder = Path(folder)
    card = folder / CARD
    text = render_card(record, card.read_text(encoding="utf-8") if card.is_file() else None)
    _write(folder / RECORD, to_text(record))
    if svg := render_curve(record):
        _write(folder / CURVE_FILE, svg)
    else:
        (folder / CURVE_FILE).unlink(missing_ok=True)
    _write(card, text)


def weight_hashes(folder: str | Path) -> dict[str, str]:
    """sha256 of every file of weights in a folder, by name. Nothing is loaded."""
    return {path.name: sha256(path) for path in sorted(Path(folder).glob("*.safetensors"))}


def sha256(path: Path) -> str:
    """Hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- the parts, all of them functions of the record alone


def render_curve(record: dict[str, Any]) -> str | None:
    """The picture of delta(epsilon); None for a run that is not private."""
    guarantee = record["guarantee"]
    if not record["private"] or not guarantee["curve"]:
        return None
    epsilon = guarantee["accountants"].get("prv", guarantee["accountants"].get("pld"))["upper"]
    return curve_svg(guarantee["curve"], epsilon, guarantee["delta"])


def render_caution(record: dict[str, Any]) -> str:
    """The warning at the top of a card that claims no privacy; empty otherwise."""
    if record["private"]:
        return ""
    reasons = "\n".join(f"> - {reason}" for reason in record["not_private_because"])
    return (
        f"> [!CAUTION]\n> **NOT PRIVATE.** This model has no privacy guarantee:\n>\n{reasons}\n>\n"
        "> Treat it, and all that came out of its training, as you treat the training data."
    )


def render_section(record: dict[str, Any]) -> str:
    """The privacy section of a card."""
    guarantee, unit = record["guarantee"], record["privacy_unit"]
    private, k = record["private"], unit["records_per_unit"]
    who = "record" if k == 1 else f"person with up to {k} records"
    if private:
        summary = (
            f"This model was fine-tuned with differential privacy: **epsilon = {guarantee['epsilon']}, delta ="
            f" {guarantee['delta']}**, per {who}. Smaller is more private. Epsilon is rounded up."
        )
    else:
        summary = f"**NOT PRIVATE**: {'; '.join(record['not_private_because'])}. No epsilon is claimed."
    template = "card.md" if private else "card_not_private.md"
    rows = "\n".join(f"| {name} | {text} |" for name, text in _table(record, who))
    return Template(
        files("hf_private.publishing").joinpath("templates", template).read_text(encoding="utf-8")
    ).substitute(
        summary=summary,
        table=rows,
        unit=who,
        not_covered=_bullets(record["scope"]["not_covered"]),
        caveats=_bullets(record["caveats"] or ["Nothing beyond the above."]),
        odds=_best_guess(guarantee),
        curve=_curve_table(guarantee["curve"]),
        curve_note="" if k == 1 and not record["tuning"]["runs"] else ", of this run alone",
    )


def _table(record: dict[str, Any], who: str) -> list[tuple[str, str]]:
    mechanism, guarantee, data = record["mechanism"], record["guarantee"], record["dataset"]
    n, tuning, ledger, random = data["num_records"], record["tuning"], record["ledger"], record["randomness"]
    phases = "; ".join(
        f"{phase['steps']} steps, noise multiplier {phase['noise_multiplier']:.6g},"
        f" sample rate {phase['sample_rate']:.6g}"
        for phase in mechanism["phases"]
    )
    bounds = ", ".join(
        f"{name.upper()} {_short(bound['upper'])}" for name, bound in sorted(guarantee["accountants"].items())
    )
    tried = "not recorded" if not tuning["runs"] else f"{tuning['runs']:g} runs ({tuning['law']}), charged"
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    rows = [
        ("epsilon, delta", f"{guarantee['epsilon']}, {guarantee['delta']}"),
        ("unit of privacy", f"one {who}"),
        ("neighbouring datasets", "differ by adding or removing one; their size is public"),
        ("method", mechanism["method"]),
        ("what ran", phases or "nothing"),
        ("clipping", f"{mechanism['clipping']}, norm {mechanism['clip_norm']}"),
        ("batches", f"Poisson, {mechanism['expected_batch_size']} records expected; empty ones count"),
        ("optimizer", str(mechanism["optimizer"])),
        (
            "accountants, one run" if record["private"] else "accountants, had it been private",
            f"{bounds} (upper bounds); {record['accounting']['note'] or 'none failed'}",
        ),
        (
            "randomness",
            f"keys {random['keys']}, noise {'cryptographic' if random['cryptographic'] else 'not cryptographic'}",
        ),
        ("training data", f"{_code(data['name'])}, {n} records"),
        ("base model", _code(record["scope"]["base_model"])),
        ("runs tried before", tried),
        ("audit", "none" if not record["audit"] else ", ".join(f"{k} {v}" for k, v in record["audit"].items())),
        ("ledger", f"{ledger['length']} entries, head {_code((ledger['head'] or '')[:16])}"),
        ("made with", versions),
    ]
    return [(name, " ".join(text.replace("|", "/").split())) for name, text in rows]


def _best_guess(guarantee: dict[str, Any]) -> str:
    """How often the best test of membership is right, in percent: (e^eps + delta) / (e^eps + 1), rounded up."""
    inverse = math.exp(-float(guarantee["epsilon"]))
    return f"{math.ceil(10000 * (1 + inverse * guarantee['delta']) / (1 + inverse)) / 100:g}"


def _curve_table(points: list[dict[str, float]]) -> str:
    by_factor = {round((index + 1) / 10, 1): point for index, point in enumerate(points)}
    shown = [by_factor[factor] for factor in SHOWN if factor in by_factor]
    rows = "\n".join(f"| {point['epsilon']:g} | {point['delta']:.2e} |" for point in shown)
    return f"| epsilon | delta |\n| ---: | ---: |\n{rows}"


def yaml_block(record: dict[str, Any]) -> dict[str, Any]:
    """The card's `differential_privacy` metadata."""
    guarantee, phases = record["guarantee"], record["mechanism"]["phases"]
    return {
        "private": record["private"],
        "epsilon": guarantee["epsilon"],
        "delta": guarantee["delta"],
        "unit": record["privacy_unit"]["unit"],
        "records_per_unit": record["privacy_unit"]["records_per_unit"],
        "adjacency": record["adjacency"],
        "sampling": ", ".join(record["sampling"]["declared"]),
        "method": record["mechanism"]["method"],
        "clip_norm": record["mechanism"]["clip_norm"],
        "noise_multiplier": [phase["noise_multiplier"] for phase in phases],
        "sample_rate": [phase["sample_rate"] for phase in phases],
        "steps": [phase["steps"] for phase in phases],
        "record": RECORD,
        "record_sha256": hashlib.sha256(to_text(record).encode()).hexdigest(),
    }


def card_tags(record: dict[str, Any]) -> list[str]:
    """Tags under which a card is found; a run that is not private gets none that says it is."""
    return ["hf_private", *(TAGS if record["private"] else ())]


# ---- the card around them


def render_card(record: dict[str, Any], readme: str | None = None) -> str:
    """README.md with the record's warning, section and metadata, and without what must not be published."""
    if readme is None:
        base = record["scope"]["base_model"]
        readme = f"---\nlibrary_name: transformers\n---\n\n# {f'Fine-tuned {base}' if base else 'Fine-tuned model'}\n"
    card = ModelCard(readme, ignore_metadata_errors=True)
    text = _without(_without(_publishable(card.text), "caution"), "section").strip("\n")
    lines = text.split("\n")
    heading = next((i for i, line in enumerate(lines) if line.startswith("## ")), len(lines))
    section = "\n".join((BEGIN.format("section"), render_section(record).strip("\n"), END.format("section")))
    parts = ["\n".join(lines[:heading]).strip("\n"), section, "\n".join(lines[heading:]).strip("\n")]
    if caution := render_caution(record):
        parts.insert(0, "\n".join((BEGIN.format("caution"), caution, END.format("caution"))))
    card.text = "\n" + "\n\n".join(part for part in parts if part) + "\n"
    _set_metadata(card, record)
    return str(card)


def _set_metadata(card: ModelCard, record: dict[str, Any]) -> None:
    tags = [tag for tag in card.data.get("tags") or [] if tag not in TAGS and not _local(tag.rpartition(":")[2])]
    card.data["tags"] = [*tags, *(tag for tag in card_tags(record) if tag not in tags)]
    card.data["differential_privacy"] = yaml_block(record)
    base = card.data.get("base_model") or record["scope"]["base_model"]
    card.data["base_model"] = None if not isinstance(base, str | list) or _local(base) else base
    name = record["dataset"]["name"]
    if not card.data.get("datasets") and name and name not in LOCAL_DATA and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        card.data["datasets"] = [name]


def _publishable(text: str) -> str:
    """Trainer's card without the seed, the training loss and the log's own epsilon."""
    lines, dropped = [], []
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


def split_card(readme: str) -> tuple[ModelCard, str, str, str]:
    """The card, its warning, its privacy section, and the rest of its text."""
    card = ModelCard(readme, ignore_metadata_errors=True)
    found = {}
    rest = card.text
    for name in ("caution", "section"):
        match = _between(name).search(rest)
        found[name] = match[1].strip("\n") if match else ""
        rest = _between(name).sub("", rest, count=1)  # a second one is text like any other
    return card, found["caution"], found["section"], rest


def _between(name: str) -> re.Pattern[str]:
    begin, end = re.escape(BEGIN.format(name)), re.escape(END.format(name))
    return re.compile(rf"{begin}\n(.*?)\n{end}\n*", re.DOTALL)


def _without(text: str, name: str) -> str:
    return _between(name).sub("", text)


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"


def _code(text: str | None) -> str:
    return f"`{text}`" if text else "not named"


def _local(name: Any) -> bool:
    """Whether a name is a path on some machine, which is nobody's business and no name on the Hub."""
    return isinstance(name, str) and (os.path.isabs(name) or name.startswith((".", "~")) or os.path.isdir(name))


def _public_name(name: str | None) -> str | None:
    return Path(name).name if name and _local(name) else name


def _write(path: Path, text: str) -> None:
    """Write so that the file is, at every instant, either what it was or the whole of `text`."""
    part = path.with_name(f"_{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
