"""SFT of conversations: from a file of chats and from SGD's turns."""

import gzip
import json
from pathlib import Path

import pytest
import yaml

pytest.importorskip("trl", reason="needs the extra `trl`")

import conversations  # noqa: E402
import pretrain_tiny  # noqa: E402
import sft  # noqa: E402

from hf_private import DPConfig, verify  # noqa: E402
from tests.support import chats, zoo  # noqa: E402

CONFIG = Path(sft.__file__).parent / "configs" / "sft_sgd.yaml"


def settings(folder: Path, **changes: object) -> list[str]:
    zoo.small("llama", max_position_embeddings=64).save_pretrained(folder / "model")
    chats.tokenizer().save_pretrained(folder / "model")
    changed = {
        "model_name_or_path": folder / "model", "output_dir": folder / "out", "max_steps": 2, "expected_batch_size": 8,
        "use_cpu": True, "disable_tqdm": True, **changes,
    }  # fmt: skip
    return ["--config", str(CONFIG), *(word for name, value in changed.items() for word in (f"--{name}", str(value)))]


def test_it_trains_on_chats_with_the_settings_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("train", 0), ("dev", 1)):
        records = [{**record, "dialogue": f"{name} {n}"} for n, record in enumerate(chats.made("chat", 40, seed))]
        text = "\n".join(map(json.dumps, records))
        (tmp_path / f"{name}.jsonl").write_text(text)
    files = {"chats": tmp_path / "train.jsonl", "eval_chats": tmp_path / "dev.jsonl"}
    metrics = sft.main(settings(tmp_path, rank=2, answers=1, **files))
    assert metrics["eval_perplexity"] > 1
    out = capsys.readouterr().out
    assert "User: " in out and "Assistant: " in out
    untuned = sft.main(settings(tmp_path, output_dir=tmp_path / "none", untuned=True, **files))
    assert untuned["eval_perplexity"] > 1 and not (tmp_path / "none" / "privacy.json").exists()
    verdict = verify(tmp_path / "out")
    assert verdict.status == "holds" and verdict.statement["privacy_unit"]["column"] == "dialogue"
    assert verdict.statement["mechanism"]["peft"] == "LORA"


@pytest.fixture
def sgd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 20 conversations, of which users say `asks N` and `Thanks`."""
    (tmp_path / "sgd").mkdir()
    columns = ["dialogue", "turn", "speaker", "service", "intent", "utterance"]
    for split in ("train", "dev"):
        rows = [columns]
        for n in range(20):
            said = [("U", f'asks "{split} {n}'), ("S", "Yes?"), ("U", "Thanks")]
            rows += [[f"1_{n:05}", str(t), who, "Music", "", words] for t, (who, words) in enumerate(said)]
        with gzip.open(tmp_path / "sgd" / f"{split}.tsv.gz", "wt") as file:
            file.write("\n".join(map("\t".join, rows)))
    monkeypatch.setenv("HF_PRIVATE_DATA", str(tmp_path))
    return tmp_path


def test_the_parts_share_no_conversation_and_the_base_reads_only_the_public_one(sgd: Path) -> None:
    parts = {part: conversations.turns(part) for part in conversations.PARTS}
    numbers = {part: {turn["dialogue"] for turn in found} for part, found in parts.items()}
    assert len(numbers["private"]) == 20 and min(map(len, numbers.values())) > 0
    assert len(numbers["public"] | numbers["test"] | numbers["private"]) == sum(map(len, numbers.values())) == 40
    assert all(number.startswith("train ") == (part == "private") for part in parts for number in numbers[part])
    for part in ("private", "test"):
        assert set(sft.read(None, part, None)["dialogue"]) == numbers[part]
    learnt = " ".join(pretrain_tiny.read("conversations", pretrain_tiny.PretrainOptions()))
    for part, found in parts.items():
        asked = [turn["utterance"] for turn in found if turn["utterance"].startswith("asks")]
        assert all((f"{words}\n" in learnt) == (part == "public") for words in asked)


def test_turns_become_conversations(sgd: Path) -> None:
    found = sft.read(None, "private", None)
    assert found[0]["messages"][0] == {"role": "user", "content": 'asks "train 0'}
    assert [len(chat) for chat in found["messages"]] == [3] * 20


def test_user_turns_are_written_for_synthesis(sgd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversations.main(["--output_dir", str(sgd / "turns")])
    private = [json.loads(line) for line in (sgd / "turns" / "private.jsonl").read_text().splitlines()]
    numbers = {turn["dialogue"] for turn in conversations.turns("private")}
    assert {record["dialogue"] for record in private} == numbers
    assert {record["text"] for record in private if "asks" not in record["text"]} == {"Thanks"}
    assert {"service": "Music"} in json.loads((sgd / "turns" / "services.json").read_text())
    out = capsys.readouterr().out
    assert out.count("one: 0") == 2 and out.count("sha256") == 3


def test_the_template_marks_what_the_assistant_says() -> None:
    tokenizer = chats.tokenizer()
    tokenizer.chat_template = sft.TEMPLATE.read_text()
    chat = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "User: w1 w2\nAssistant: w3 w4<eos>\n"
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "User: w1 w2\nAssistant:", "a space at the end would be a token that no text has"


def test_the_file_says_what_the_recipe_understands() -> None:
    known = {*sft.SFTOptions.__dataclass_fields__, *DPConfig.__dataclass_fields__, *sft.SFTConfig.__dataclass_fields__}
    assert yaml.safe_load(CONFIG.read_text()).keys() <= known
