"""recipes/sensitivity.py: what a row says, and which rows count."""

import json
from pathlib import Path

import sensitivity


def test_a_model_that_keeps_records_apart_is_accepted() -> None:
    rows = list(sensitivity.measure("bert", "classification"))
    assert [row["result"] for row in rows] == ["accepted", "accepted"]
    assert all(0.9 < row["varied"] <= sensitivity.ALLOWED and row["code"] == sensitivity.code() for row in rows)
    assert "other code" not in sensitivity.table(rows)
    assert "1 of 2 rows were measured with other code" in sensitivity.table([rows[0] | {"code": "before"}, rows[1]])


def test_the_last_row_of_a_model_counts(tmp_path: Path) -> None:
    row = {"type": "bert", "head": "masked-lm", "precision": "bf16"}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"result": result}) + "\n" for result in ("coupled", "refused")))
    assert [row["result"] for row in sensitivity.read(path)] == ["refused"]
