"""What Jupyter shows: epsilon in the table of metrics, reports as tables, progress of the self-check."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from hf_private.accounting.budget import epsilon
from hf_private.accounting.events import Event
from hf_private.gradients import selfcheck
from hf_private.publishing.findings import Finding, Verdict
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


def test_reports_are_tables() -> None:
    report = epsilon([Event(0.01, (1.0,), steps=1000)], delta=1e-5)
    shown = report._repr_html_()
    assert f"<tr><th>epsilon</th><td>{report.epsilon:.3f}</td></tr>" in shown and "<td>1e-05</td>" in shown
    verdict = Verdict((Finding("weights", "wrong", "<script>alert(1)</script>"),))
    shown = verdict._repr_html_()
    assert "The claim: wrong" in shown and "<td>wrong</td>" in shown
    assert "<script>" not in shown and "&lt;script&gt;" in shown, "a stranger's words are escaped"


@pytest.mark.parametrize("micro_batch", [1, 8])
def test_the_self_check_shows_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_batch: int) -> None:
    bars: list[selfcheck.tqdm] = []

    class Bar(selfcheck.tqdm):
        def close(self) -> None:
            bars.append(self)
            super().close()

    monkeypatch.setattr(selfcheck, "tqdm", Bar)
    training.trainer(tmp_path, max_steps=1, per_device_train_batch_size=micro_batch).train()
    assert bars and all(bar.n == bar.total >= 6 for bar in bars)
    assert "autograd" in bars[0].desc
