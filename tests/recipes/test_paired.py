"""The comparison on the same held-out records: its parts, its frozen layers, and a tiny run of it."""

import json

import numpy as np
import paired
import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.recipes.test_recipes import RECIPES, make_bert

WORDS = "the film is a good bad long dull bright story of love and war".split()


def test_held_out_texts_are_not_trained_on_and_occur_once():
    records = [{"sentence": f"text {i % 40} ", "label": str(i % 2)} for i in range(100)]
    parts = paired.split(records, search=10, score=15)
    texts = {name: [record["sentence"] for record in part] for name, part in parts.items()}
    assert len(set(texts["search"])) == len(texts["search"]) == 10
    assert len(set(texts["score"])) == len(texts["score"]) == 15
    assert not set(texts["train"]) & {*texts["search"], *texts["score"]}
    assert not set(texts["search"]) & set(texts["score"])


def result(right: list[int]) -> dict:
    import base64

    packed = np.packbits(np.array(right, dtype=bool)).tobytes()
    return {"right": base64.b64encode(packed).decode(), "records": len(right)}


def test_a_paired_difference_counts_the_records_that_one_of_both_gets_right():
    mean, error = paired.difference(result([1, 1, 1, 0, 1, 0, 1, 1, 1, 1]), result([1, 1, 0, 0, 1, 1, 1, 1, 1, 0]))
    assert mean == pytest.approx(0.1)
    assert error == pytest.approx(np.std([0, 0, 1, 0, 0, -1, 0, 0, 0, 1]) / 10**0.5)
    assert paired.difference(result([1, 0, 1]), result([1, 0, 1])) == (0.0, 0.0)


@pytest.fixture
def plan(tmp_path, monkeypatch) -> dict:
    make_bert(tmp_path / "bert")
    (tmp_path / "sst2").mkdir()
    draw = np.random.default_rng(0)
    rows = [f"{i % 2}\t{' '.join(draw.choice(WORDS, 2 + i % 5))} {i}" for i in range(60)]
    (tmp_path / "sst2" / "train.tsv").write_text("\n".join(["label\tsentence", *rows]) + "\n")
    monkeypatch.setenv("HF_PRIVATE_DATA", str(tmp_path))
    monkeypatch.setattr(paired, "model_path", lambda name: str(tmp_path / "bert"))
    monkeypatch.setattr(paired, "public_sentences", lambda count: ["a good film", "a bad film", "long and dull"] * 4)
    settings = {"expected_batch_size": 8, "max_steps": 2}
    return {
        "title": "Tiny", "note": "Made up.", "results": str(tmp_path / "result"), "runs": str(tmp_path / "runs"),
        "frozen_layers": 1, "max_length": 16, "pooling": "first", "bf16": False, "delta": 1e-3, "train_records": 30,
        "held_out": {"search": 8, "score": 12}, "settings": settings,
        "methods": {"bk": {}, "rgp-public": {"carriers": {"r": 2, "source": "public"}}},
        "search": {"learning_rates": [1e-3], "by_method": {}, "settings": settings | {"noise_multiplier": 1.0}},
        "table": [{"methods": ["bk", "rgp-public"], "epsilon": 8, "seeds": [1]}],
    }  # fmt: skip


def test_the_layers_above_the_table_give_what_the_whole_model_gives(plan, tmp_path):
    data = paired.corpus(plan, tmp_path / "runs")
    model = paired.build(plan, data.table, seed=3).eval()
    torch.manual_seed(0)
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert", attn_implementation="eager").eval()
    whole.classifier.load_state_dict(model.classifier.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bert")
    texts = ["a good film", "a bad film", "long and dull"]
    expected = whole(**tokenizer(texts, return_tensors="pt", padding=True)).logits
    found = model(**{k: v for k, v in paired.collate(data.parts["public"][:3]).items() if k != "labels"}).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_tiny_comparison_runs_and_continues(plan, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan, sort_keys=False))
    assert paired.main([str(path), "--limit", "1"]) == 0
    assert paired.main([str(path)]) == 0
    cells = json.loads((tmp_path / "result.json").read_text())
    assert [cell["name"] for cell in cells] == [
        "search_bk_0.001", "search_rgp-public_0.001", "bk_eps8_seed1", "rgp-public_eps8_seed1"
    ]  # fmt: skip
    assert cells[2]["epsilon"] <= 8 and cells[2]["records"] == 12
    assert "| rgp-public | 8 | 1 |" in (tmp_path / "result.md").read_text()


def test_the_plans_name_methods_that_exist():
    for name in ("paired_sst2", "paired_small"):
        plan = yaml.safe_load((RECIPES / "configs" / f"{name}.yaml").read_text())
        assert {m for row in plan["table"] for m in row["methods"]} <= plan["methods"].keys()
        assert plan["search"]["by_method"].keys() <= plan["methods"].keys()
