"""Jupyter's table of metrics has a column for epsilon, with its heading."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.support import training

NOTEBOOK = "transformers.utils.notebook", "hf_private.trainer.notebook"


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> type:
    """Trainer's notebook callback, on an IPython that shows nothing."""
    display = ModuleType("IPython.display")
    vars(display).update(HTML=str, display=lambda *_, **__: SimpleNamespace(update=lambda *_: None))
    package = ModuleType("IPython")
    vars(package).update(display=display)
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    for name in NOTEBOOK:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return import_module(NOTEBOOK[0]).NotebookProgressCallback


@pytest.mark.parametrize("evaluates", [False, True])
def test_epsilon_has_a_column_with_a_heading(tmp_path: Path, progress: type, evaluates: bool) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": training.text(seed=1)} if evaluates else {}
    made = training.trainer(tmp_path, callbacks=[progress], **settings)
    tables: list[list[list]] = []
    shown = next(c for c in made.callback_handler.callbacks if "Notebook" in type(c).__name__)
    ends = shown.on_train_end
    shown.on_train_end = lambda *a, **k: (tables.append(shown.training_tracker.inner_table), ends(*a, **k))
    made.train()
    ((heading, *lines),) = tables
    assert "" not in heading and heading.count("Epsilon") == 1
    column = [line[heading.index("Epsilon")] for line in lines]
    assert len(column) == (2 if evaluates else 4) and column == sorted(column)
    assert column[-1] == pytest.approx(made.privacy_spent().epsilon)
