"""The table of architectures: what is shown is what was measured."""

import json

import families


def stored() -> tuple[list[dict], str]:
    found = json.loads((families.RESULTS / "families.json").read_text())
    return list(found["rows"].values()), found["transformers"]


def test_the_tables_agree_with_what_was_measured() -> None:
    rows, version = stored()
    assert (families.RESULTS / "families.md").read_text() == families.report(rows, version)
    guide = families.GUIDE.read_text()
    assert guide == families.with_guide_table(guide, families.guide_table(rows, version))


def test_nothing_is_wrong_and_every_refusal_names_a_parameter() -> None:
    rows, _ = stored()
    assert not [row for row in rows if row["status"] == "wrong"]
    assert not [row for row in rows if row["status"] == "refused" and "`" not in row["reason"]]


def test_the_families_that_people_use_are_exact() -> None:
    rows, _ = stored()
    names = (
        "deberta-v2 mixtral qwen3_moe gpt_oss whisper clip swin wav2vec2 mamba2 llava falcon mpnet longformer".split()
    )
    for method in ("full", "lora"):
        types = families.by_type(rows, method)
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
    ]
    rows = [{"type": name, "head": head, "method": "full", "status": status} for name, head, status in found]
    assert families.by_type(rows, "full") == {"a": "exact", "b": "mixed by head", "c": "wrong", "d": "wrong"}
