"""Membership inference on models that leak and models that do not; audits on cards."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_private.audit.mia import read_records
from hf_private.cli.main import main
from hf_private.publishing.card import CARD, write_card
from hf_private.publishing.verify import verify
from hf_private.spending.statement import read_statement
from hf_private.tasks.losses import PerSampleLoss
from tests.support import zoo
from tests.support.card_facts import facts, saved_model

WORDS = [f"w{i}" for i in range(40)]


def texts(count: int, seed: int) -> list[tuple[str, int]]:
    """Random sentences with random labels: nothing can be learned about them but themselves."""
    generator = np.random.default_rng(seed)
    return [(" ".join(generator.choice(WORDS, 6)), int(generator.integers(2))) for _ in range(count)]


def write_tsv(path: Path, rows: list[tuple[str, int]]) -> str:
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
    return str(path)


def saved(folder: Path, model: Any, rows: list[tuple[str, int]], steps: int) -> str:
    """A model, trained without privacy on some rows, with its tokenizer."""
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, **{w: i + 2 for i, w in enumerate(WORDS)}}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    batch = dict(tokenizer([text for text, _ in rows], padding=True, return_tensors="pt"))
    batch.pop("token_type_ids", None)
    language = isinstance(model, GPT2LMHeadModel)
    batch["labels"] = batch["input_ids"] if language else torch.tensor([label for _, label in rows])
    optimizer, loss = torch.optim.Adam(model.parameters(), 3e-3), PerSampleLoss(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, batch).mean().backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments: the two files."""
    folder = tmp_path_factory.mktemp("data")
    train, test = (write_tsv(folder / f"{seed}.tsv", texts(120, seed)) for seed in (0, 1))
    return ["--members", train, "--others", test]


def small_bert() -> Any:
    return zoo.small("bert", hidden_size=32, intermediate_size=64)


def test_an_overfitted_classifier_is_found_and_an_untrained_one_is_not(
    tmp_path: Path, members: list[str], capsys: pytest.CaptureFixture
) -> None:
    leaky = saved(tmp_path / "leaky", small_bert(), texts(120, 0), steps=60)
    fresh = saved(tmp_path / "fresh", small_bert(), texts(120, 0), steps=0)
    plot = tmp_path / "roc.png"
    assert main(["audit", "mia", fresh, *members, "--compare", leaky, "--plot", str(plot), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["models"]
    assert found[leaky]["interval"][0] > 0.6 and found[leaky]["auc"] > 0.7 and found[leaky]["epsilon"] > 0.1
    assert found[fresh]["interval"][0] < 0.5 < found[fresh]["interval"][1]
    assert found[fresh]["epsilon"] == 0 and found[fresh]["claimed_epsilon"] == "inf"
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_a_language_model_that_knows_its_texts(
    tmp_path: Path, members: list[str], capsys: pytest.CaptureFixture
) -> None:
    model = zoo.small("gpt2", hidden_size=32, vocab_size=42)
    leaky = saved(tmp_path / "lm", model, texts(120, 0), steps=60)
    assert main(["audit", "mia", leaky, *members]) == 0
    assert "Membership inference" in capsys.readouterr().out
    assert main(["audit", "mia", leaky, *members, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"][leaky]["interval"][0] > 0.55


def test_attached_to_the_card_and_a_contradicted_claim(
    tmp_path: Path, members: list[str], capsys: pytest.CaptureFixture
) -> None:
    folder = saved(tmp_path / "claims", small_bert(), texts(120, 0), steps=60)
    write_card(folder, facts())  # epsilon 0.309: not of this model
    assert main(["audit", "mia", folder, *members, "--attach"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith(f"{folder}:"), "the model whose claim is contradicted is named"
    assert "without noise" in err
    attached = read_statement(folder)["audit"]
    assert attached["mia_success"] > 0.6 and attached["mia_is_private"] is False
    assert "mia_auc" in Path(folder, CARD).read_text()
    assert verify(folder).code == 0, "the record and its card stay consistent"


SCRIPT = """
from hf_private.audit.canaries import small_task

def make(trainer_class, folder):
    made = small_task(trainer_class, folder, accountant="rdp", target_epsilon=0.5, expected_batch_size=60)
    made.args.max_steps = 3
    return made
"""


@pytest.mark.parametrize("attack", ["canaries", "step"])
def test_a_runs_audit_is_attached_to_its_models_card(
    tmp_path: Path, capsys: pytest.CaptureFixture, attack: str
) -> None:
    folder, script = str(saved_model(tmp_path / "model")), tmp_path / "my_run.py"
    script.write_text(SCRIPT)
    size = {"canaries": ["--canaries", "20"], "step": ["--records", "3"]}[attack]
    assert main(["audit", attack, f"{script}:make", *size, "--attach", folder, "--json"]) == 0
    json.loads(capsys.readouterr().out)
    attached = read_statement(folder)["audit"]
    wanted = {
        "canaries": {"canaries_canaries": 20, "canaries_contradicted": False, "canaries_steps": 3},
        "step": {"step_holds": True, "step_records": 3, "step_coupled_pairs": 0, "step_is_private": False},
    }[attack]
    assert wanted.items() <= attached.items()
    assert all(name in Path(folder, CARD).read_text() for name in wanted)
    assert verify(folder).code == 0, "the record and its card stay consistent"
    for arguments, words in (
        ([f"{script}:make", "--attach", str(tmp_path)], "--attach"),
        (["--attach", folder], "RUN"),
    ):
        with pytest.raises(SystemExit):
            main(["audit", attack, *arguments])
        assert words in capsys.readouterr().err, "before the attack, not after it"


def test_files_of_records(tmp_path: Path) -> None:
    files = {
        "a.tsv": 'sentence\tlabel\nsay "hi\t1\n',
        "a.csv": 'label,text\n1,"say ""hi"\n',
        "a.json": json.dumps([{"text": 'say "hi', "label": 1}]),
        "a.jsonl": json.dumps({"text": 'say "hi', "label": 1}) + "\n\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        assert read_records(tmp_path / name) == [('say "hi', None, "1")]
    wrong = {"b.txt": "x", "b.json": "{", "c.json": "[1]", "c.tsv": "words\nx\n", "none.tsv": None}
    for name, content in wrong.items():
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=name):
            read_records(tmp_path / name)
