"""The notebook: what it shows is small and whole, and in the slow test it runs from the first cell to the last."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "recipes" / "tutorial.ipynb"
SHOWN = ("text/html", "text/markdown", "text/plain")  # the richest first
ALL = (  # what a reader should see, in this order
    "'customer': ",
    "loss on our tickets, before they were used: ",
    "<th>Epsilon</th>",
    "loss on tickets of other customers: ",
    "<caption>Privacy spent</caption>",
    "| 50% | 50.0% | ",
    "DP-SGD with book-keeping",
    "<caption>The claim: holds</caption>",
    "- **praise**: ",
)


def shown(cells: list[dict[str, Any]]) -> list[str]:
    """Everything that the cells show, as text."""
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output["output_type"] == "error"]
    parts = [output.get("text") or _richest(output.get("data", {})) for output in outputs]
    return ["".join(part) for part in parts]


def _richest(found: dict[str, Any]) -> Any:
    return next((found[kind] for kind in SHOWN if kind in found), "")


def check(texts: list[str]) -> None:
    whole = "\n".join(texts)
    places = [whole.index(part) for part in ALL]
    assert places == sorted(places)
    before, after = (
        float(n) for n in whole.split("loss on tickets of other customers: ")[1].split("'")[0].split(" -> ")
    )
    assert after < 0.8 * before
    assert "<th>epsilon</th><td>8.0" in whole or "<th>epsilon</th><td>7.9" in whole


def test_its_outputs_are_small_and_whole() -> None:
    assert NOTEBOOK.stat().st_size < 50_000
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    check(shown(cells))
    for cell in cells:
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), "cell", "exec")


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the extra `notebook`")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra `notebook`")
    pytest.importorskip("ipykernel", reason="needs the extra `notebook`")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    check(shown(notebook.cells))
