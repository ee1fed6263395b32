"""The table of architectures: what is shown is what was measured."""

import json

import families
import family_report
import pytest
import torch
from torch import Tensor, nn


def stored() -> tuple[list[dict], dict[str, str]]:
    found = json.loads((families.RESULTS / "families.json").read_text())
    return list(found["rows"].values()), found["versions"]


def test_the_tables_agree_with_what_was_measured() -> None:
    rows, versions = stored()
    assert (families.RESULTS / "families.md").read_text() == family_report.report(rows, versions)
    guide = family_report.GUIDE.read_text()
    assert guide == family_report.with_guide_table(guide, family_report.guide_table(rows, versions))


def test_nothing_is_wrong_and_every_refusal_names_a_parameter() -> None:
    """Or says that the records are not independent: then no parameter is to blame."""
    rows, _ = stored()
    assert not [row for row in rows if row["status"] == "wrong"]
    refused = [row["reason"] for row in rows if row["status"] == "refused"]
    assert all(reason.startswith(("`", "a record's loss changes")) for reason in refused)


def test_enough_types_are_exact_by_rules() -> None:
    rows, _ = stored()
    counts = {method: list(family_report.by_type(rows, method).values()).count("exact") for method in ("full", "lora")}
    assert counts["full"] >= 270 and counts["lora"] >= 310
    assert not family_report.unfinished(rows)


def test_the_families_that_people_use_are_exact() -> None:
    rows, _ = stored()
    names = (
        "deberta-v2 mixtral qwen3_moe gpt_oss whisper clip swin wav2vec2 mamba2 llava falcon mpnet longformer".split()
    )
    for method in ("full", "lora"):
        types = family_report.by_type(rows, method)
        for name in names:
            assert types.get(name, "exact").startswith("exact"), (name, method, types[name])


def test_types_are_counted_by_what_their_heads_agree_on() -> None:
    found = [
        ("a", "x", "exact"),
        ("a", "y", "not built"),
        ("b", "x", "exact"),
        ("b", "y", "refused"),
        ("c", "x", "wrong"),
        ("d", "x", "exact"),
        ("d", "y", "wrong"),
        ("e", "x", "exact"),
        ("e", "y", "exact by fallback"),
    ]
    rows = [{"type": name, "head": head, "method": "full", "status": status} for name, head, status in found]
    assert family_report.by_type(rows, "full") == {
        "a": "exact", "b": "mixed by head", "c": "wrong", "d": "wrong", "e": "exact by fallback"
    }  # fmt: skip


def test_records_that_meet_in_the_model_are_no_fault_of_the_engine() -> None:
    """The loop is no oracle there; the self-check has to refuse."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.linear(x + 0.1 * x.mean(0))}

    with pytest.raises(families.CoupledError, match="loss changes"):
        families.loop(Mixing().double(), {"x": torch.randn(5, 4, dtype=torch.float64)}, 5)
