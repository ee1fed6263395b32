"""README.md: its first example runs as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_first_example_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks[0], "README.md", "exec"), {})
    spent = re.search(r"^epsilon (\S+) at delta 1e-05", capsys.readouterr().out, re.MULTILINE)
    assert spent and 0 < float(spent[1]) <= 8
