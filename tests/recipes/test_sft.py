"""SFT of conversations: from a file of chats and from SGD's turns."""

import gzip
import json
from pathlib import Path

import pytest
import yaml

pytest.importorskip("trl", reason="needs the extra `trl`")

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


def test_it_trains_on_chats_with_the_settings_of_the_file(tmp_path: Path) -> None:
    for name, seed in (("train", 0), ("dev", 1)):
        text = "\n".join(map(json.dumps, chats.made("chat", 40, seed)))
        (tmp_path / f"{name}.jsonl").write_text(text)
    files = {"chats": tmp_path / "train.jsonl", "eval_chats": tmp_path / "dev.jsonl"}
    metrics = sft.main(settings(tmp_path, rank=2, **files))
    assert metrics["eval_perplexity"] > 1
    verdict = verify(tmp_path / "out")
    assert verdict.status == "holds" and verdict.statement["privacy_unit"]["unit"] == "record"
    assert verdict.statement["mechanism"]["peft"] == "LORA"


def test_turns_become_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sgd").mkdir()
    rows = ["dialogue\tturn\tspeaker\tutterance", '1\t0\tU\tHello "you', "1\t1\tS\tHi", "2\t0\tU\tBye"]
    with gzip.open(tmp_path / "sgd" / "train.tsv.gz", "wt") as file:
        file.write("\n".join(rows))
    monkeypatch.setenv("HF_PRIVATE_DATA", str(tmp_path))
    found = sft.read(None, "train", None)
    assert found is not None and sft.read(None, "dev", None) is None
    assert found[0]["messages"][0] == {"role": "user", "content": 'Hello "you'}
    assert [len(chat) for chat in found["messages"]] == [2, 1]


def test_the_template_marks_what_the_assistant_says() -> None:
    tokenizer = chats.tokenizer()
    tokenizer.chat_template = sft.TEMPLATE.read_text()
    chat = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "User: w1 w2\nAssistant: w3 w4<eos>\n"
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "User: w1 w2\nAssistant: "


def test_the_file_says_what_the_recipe_understands() -> None:
    known = {*sft.SFTOptions.__dataclass_fields__, *DPConfig.__dataclass_fields__, *sft.SFTConfig.__dataclass_fields__}
    assert yaml.safe_load(CONFIG.read_text()).keys() <= known
