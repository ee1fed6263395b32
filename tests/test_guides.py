"""README, CONTRIBUTING and the guides name files, links and identifiers that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "recipes/README.md", "model_cards/README.md")
    ),
    *sorted(ROOT.glob("hf_private/*/README.md")),
]
# Options of other libraries.
ELSEWHERE = {"fsdp_transformer_layer_cls_to_wrap"}
# Files that a run writes, or that a model brings along.
WRITTEN = {"privacy.json", "carrier_config.json", "config.json", "privacy_curve.svg", "README.md", "ledger.jsonl"}
CODE = "\n".join(
    path.read_text()
    for folder in ("hf_private", "tests", "recipes", ".")
    for path in (ROOT / folder).glob("**/*.py" if folder != "." else "Makefile")
)


def quoted(text: str) -> list[str]:
    """What stands in backticks, outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def missing_files(guide: Path, text: str) -> list[str]:
    """Links and file names in backticks that exist neither beside the guide, nor in the project or its package."""
    missing = []
    for link, _, heading in re.findall(r"\]\(([^)#:]*)(#([^)]*))?\)", text):
        target = guide.parent / link if link else guide
        if not target.exists():
            missing.append(link)
        elif heading and heading not in anchors(target.read_text()):
            missing.append(f"{link}#{heading}")
    for name in quoted(text):
        is_path = re.fullmatch(r"[\w./-]+(\.(py|md|json|jsonl|yaml|toml|svg)|/)", name)
        if not is_path or name.rpartition("/")[2] in WRITTEN:
            continue
        if not any((folder / name).exists() for folder in (guide.parent, ROOT, ROOT / "hf_private")):
            missing.append(name)
    return missing


def unknown_names(text: str) -> list[str]:
    """Identifiers with an underscore or a dot whose last part stands nowhere in the code."""
    identifiers = (re.match(r"[A-Za-z_][\w.]*", name) for name in quoted(text) if "/" not in name)
    names = {match[0].rstrip(".") for match in identifiers if match and re.search(r"[_.]", match[0])} - ELSEWHERE
    return sorted(name for name in names if not re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", CODE))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_guide_names_what_exists(guide: Path) -> None:
    text = guide.read_text()
    assert missing_files(guide, text) == []
    assert unknown_names(text) == []


def test_wrong_names_are_found() -> None:
    text = "`trainer/private.py`, [this](no/such.md), [that](README.md#nowhere), `Mechanism.no_such_step_here`"
    assert missing_files(ROOT / "CONTRIBUTING.md", text) == ["no/such.md", "README.md#nowhere", "trainer/private.py"]
    assert unknown_names(text.replace("no_such", "nosuch" + "_")) == ["Mechanism." + "nosuch_" + "_step_here"]
