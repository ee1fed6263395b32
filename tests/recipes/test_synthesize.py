"""Synthetic text: the samples, what is left out, the card, and what never depends on the private file."""

import json
from pathlib import Path
from typing import Any

import compare_texts
import pytest
import synthesize
import torch
from code_counts import exact_counts, noised_counts
from datasets import Dataset, load_from_disk

from hf_private import DPConfig, PrivacyLedger, verify
from hf_private.accounting.budget import BudgetExceeded
from tests.support import chats, zoo

CODES = [{"ward": "w1", "weight": 3}, {"ward": "w2"}]
SETTINGS = [
    "--text_column", "note", "--code_columns", "ward", "--max_length", "24", "--samples", "40", "--shortest", "1",
    "--noise_multiplier", "1.0", "--accountant", "rdp", "--max_steps", "2", "--expected_batch_size", "8",
    "--per_device_train_batch_size", "8", "--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "true",
    "--use_cpu", "true",
]  # fmt: skip


def line(folder: Path, *more: str) -> list[str]:
    private = [
        {"who": f"p{i // 2}", "ward": f"w{1 + i % 2}", "note": f"w{i} w{i + 1} w{i + 2} w53"} for i in range(40)
    ]
    (folder / "private.jsonl").write_text("\n".join(map(json.dumps, private)))
    (folder / "codes.json").write_text(json.dumps(CODES))
    zoo.small("gpt2", max_position_embeddings=32).save_pretrained(folder / "model")
    chats.tokenizer().save_pretrained(folder / "model")
    files = ["--private_file", f"{folder}/private.jsonl", "--codes", f"{folder}/codes.json"]
    models = ["--model_name_or_path", f"{folder}/model", "--output_dir", f"{folder}/out"]
    return [*SETTINGS, *files, *models, *more]


def test_it_samples_and_the_card_carries_the_statement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = [" ".join(f"w{i % 7 + k}" for k in range(3)) for i in range(40)]  # a tiny model never finishes a text
    monkeypatch.setattr(synthesize, "sampled", lambda model, tokenizer, codes, options: iter(written))
    synthesize.main(line(tmp_path))
    folder = tmp_path / "out" / "synthetic"
    texts = load_from_disk(str(folder))
    assert sorted(texts.column_names) == ["note", "ward"] and len(texts) == 7, "repetitions are left out"
    assert set(texts["ward"]) <= {"w1", "w2"}
    statement = json.loads((tmp_path / "out" / "privacy.json").read_text())
    assert json.loads((folder / "privacy.json").read_text()) == statement and statement["private"]
    card = (folder / "README.md").read_text()
    assert f"epsilon = {statement['guarantee']['epsilon']}" in card and "per record" in card
    assert "7 of 40 samples were kept" in " ".join(card.split())
    assert "NOT PRIVATE" not in capsys.readouterr().out


def test_comparisons_reach_the_screen_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line(tmp_path)
    other = [{"ward": f"w{1 + i % 2}", "note": f"w{1 + i % 2} w{i} w9"} for i in range(20)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, other)))
    made = Dataset.from_dict({"ward": ["w1", "w2"] * 10, "note": ["w3 w4 w5 w53", "w2 w7"] * 10})
    made.save_to_disk(str(tmp_path / "texts"))
    before = set(tmp_path.rglob("*"))
    files = ["--private_file", f"{tmp_path}/private.jsonl", "--test_file", f"{tmp_path}/test.jsonl"]
    columns = ["--text_column", "note", "--label_column", "ward"]
    found = compare_texts.main([str(tmp_path / "texts"), *files, *columns])
    assert set(tmp_path.rglob("*")) == before, "no file is written"
    assert compare_texts.HEADING in capsys.readouterr().out
    assert found["synthetic"]["longest_shared_passage"] == 4
    assert found["synthetic"]["share_of_texts_that_are_private_texts"] == 0.5
    assert found["private"]["share_of_texts_that_are_private_texts"] == 1.0
    assert {"accuracy", "share_of_accuracy"} <= found["synthetic"].keys()


def test_the_score_tells_good_texts_from_bad_ones() -> None:
    good = [f"{word} {n}" for n in range(20) for word in ("tea", "car")]
    labels, asked, wanted = ["drink", "ride"] * 20, ["some tea", "a car"], ["drink", "ride"]
    assert compare_texts.accuracy(good, labels, asked, wanted) == 1.0
    assert compare_texts.accuracy(good, labels[1:] + labels[:1], asked, wanted) == 0.0


def test_the_sampler_gives_finished_texts_for_its_codes(tmp_path: Path) -> None:
    tokenizer, seen = chats.tokenizer(), []

    class Model:
        device = "cpu"

        def eval(self) -> None:
            pass

        def generate(self, input_ids: Any, **settings: Any) -> Any:
            seen.extend(tokenizer.batch_decode(input_ids, skip_special_tokens=True))
            answers = tokenizer(["w1 w2 <eos>", "w3 w4 w5"], padding=True, return_tensors="pt")["input_ids"]
            return synthesize.torch.cat([input_ids, answers], 1)

    options = synthesize.SynthesisOptions(sample_batch=2)
    texts = list(synthesize.sampled(Model(), tokenizer, [{"ward": "w1"}, {"ward": "w2"}], options))
    assert texts == ["w1 w2", ""] and len(seen) == 2


def test_codes_are_public_and_complete(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`--codes`"):
        synthesize.main([word for word in line(tmp_path) if "codes.json" not in word and word != "--codes"])
    (tmp_path / "other.json").write_text('[{"bed": "w1"}]')
    with pytest.raises(ValueError, match="`--codes`.*'ward'"):
        synthesize.main(line(tmp_path, "--codes", f"{tmp_path}/other.json"))
    assert not (tmp_path / "out" / "_dp").exists(), "nothing was charged"


def test_codes_are_drawn_with_their_weights(tmp_path: Path) -> None:
    (tmp_path / "codes.json").write_text(json.dumps(CODES))
    options = synthesize.SynthesisOptions(code_columns=["ward"], codes=f"{tmp_path}/codes.json", samples=4000)
    drawn = synthesize.chosen_codes(synthesize.listed_codes(options), options, seed=0)
    assert abs(sum(one["ward"] == "w1" for one in drawn) / 4000 - 0.75) < 0.03


def test_a_persons_records_count_as_one() -> None:
    counts = exact_counts(list("aabz") * 50, ["a", "b"], units=["p"] * 200)
    assert counts.tolist() == pytest.approx([0.5, 0.25])  # a norm below 1
    assert exact_counts(["a", "z"], ["a"], units=[0, 1]).tolist() == [1.0]


def test_counts_have_the_noise_that_was_charged(tmp_path: Path) -> None:
    config = DPConfig(noise_multiplier=1.0, accountant="rdp")
    codes = [str(n) for n in range(4000)]
    counts = noised_counts(codes * 9, codes, 2.0, str(tmp_path), config, key=bytes(32))
    spread = torch.tensor(counts) - 9
    assert abs(spread.std() - 2) < 0.1 and abs(spread.mean()) < 0.15
    (event,) = PrivacyLedger.read(tmp_path / "_dp" / "ledger.jsonl").events
    assert (event.sample_rate, event.releases, event.steps) == (1.0, (2.0,), 1)


def test_counts_are_charged_before_they_are_looked_at(tmp_path: Path) -> None:
    config = DPConfig(target_epsilon=0.1, accountant="rdp")
    with pytest.raises(BudgetExceeded):
        noised_counts(["a"], ["a"], 1.0, str(tmp_path), config)

    class Unread(list):
        def __iter__(self) -> Any:
            assert PrivacyLedger.read(tmp_path / "_dp" / "ledger.jsonl").events, "it is charged"
            return super().__iter__()

    noised_counts(Unread(["a"]), ["a"], 100.0, str(tmp_path), config)


@pytest.mark.parametrize("unit_column", [None, "who"])
def test_noised_frequencies_share_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit_column: str | None
) -> None:
    monkeypatch.setattr(synthesize, "sampled", lambda model, tokenizer, codes, options: iter(["w1"] * len(codes)))
    unit = ["--unit_column", unit_column, "--records_per_unit", "2"] if unit_column else []
    words = line(tmp_path, "--count_noise", "2.0", *unit)
    (tmp_path / "codes.json").write_text(json.dumps([{"ward": "w1"}, {"ward": "w9"}]))
    synthesize.main(words)
    statement = json.loads((tmp_path / "out" / "privacy.json").read_text())
    assert sorted(phase["noise_multiplier"] for phase in statement["mechanism"]["phases"]) == [1.0, 2.0]
    assert verify(tmp_path / "out").status == "holds"
    assert "noised at the expense of epsilon" in (tmp_path / "out" / "synthetic" / "README.md").read_text()
    weights = {one["ward"]: one["weight"] for one in json.loads((tmp_path / "out" / "codes.json").read_text())}
    assert weights["w1"] > weights["w9"]
    synthesize.main([*words, "--sample_only", "--samples", "10"])
    assert {one["ward"]: one["weight"] for one in json.loads((tmp_path / "out" / "codes.json").read_text())} == weights
    assert len(load_from_disk(str(tmp_path / "out" / "synthetic"))) == 1, "equal samples are kept once"
    assert json.loads((tmp_path / "out" / "privacy.json").read_text()) == statement, "it has cost nothing"


def test_weights_are_listed_or_counted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`--codes` must have no weights with `--count_noise`"):
        synthesize.main(line(tmp_path, "--count_noise", "2.0"))


def test_only_synthetic_repetitions_are_left_out() -> None:
    assert synthesize.kept(["One two.", "three", "one  TWO.", "", "four five"], shortest=2) == [0, 4]
