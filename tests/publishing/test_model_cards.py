"""The cards in model_cards/ come from real runs: each must still follow from its own record."""

import re
from pathlib import Path

import pytest

from hf_private.publishing.card import CARD, render_card
from hf_private.publishing.verify import verify
from hf_private.spending.statement import read_statement

FOLDER = Path(__file__).parents[2] / "model_cards"
CARDS = sorted(path.parent for path in FOLDER.glob("*/privacy.json"))


@pytest.mark.parametrize("folder", CARDS, ids=lambda path: path.name)
def test_card_follows_from_its_record(folder: Path) -> None:
    record, text = read_statement(folder), (folder / CARD).read_text(encoding="utf-8")
    assert render_card(record, text) == text
    wrong = [finding for finding in verify(str(folder)).findings if finding.status == "wrong"]
    assert wrong == [] or (not record["private"] and [finding.check for finding in wrong] == ["private"])


def test_every_folder_has_a_record() -> None:
    assert [path for path in FOLDER.iterdir() if path.is_dir() and path not in CARDS] == []


def test_links_of_the_overview_resolve() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (FOLDER / CARD).read_text())
    assert links and [link for link in links if not (FOLDER / link).exists()] == []
