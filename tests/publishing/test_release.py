"""The release guard: what must stay on the machine stays, by name and by content, and the rest goes out untouched."""

import pickle
import re
from pathlib import Path

import pytest

from hf_private.publishing.card import write_card
from hf_private.publishing.release import ReleaseError, check, is_published, publish, reason_to_stay, scan, stage
from hf_private.publishing.verify import verify
from tests.support import zoo
from tests.support.card_facts import facts, saved_model

FORBIDDEN = [
    "training_args.bin",
    "rng_state.pth",
    "rng_state_0.pth",
    "random_states_0.pkl",
    "optimizer.pt",
    "scheduler.pt",
    "optimizer.bin",
    "trainer_state.json",
    "_dp/ledger.jsonl",
    "ledger.jsonl",
    "checkpoint-3/model.safetensors",
    "runs/Nov01_host/events.out.tfevents.1",
    "events.out.tfevents.2",
    "wandb/run-1/files/output.log",
    "train.log",
    "pytorch_model.bin",
    "model.pkl",
    "cache-0123.arrow",
    "data/train.parquet",
    "predictions.csv",
    "records.jsonl",
    ".env",
    ".cache/huggingface/x",
]
UNKNOWN = [
    "train.json",
    "train.tsv",
    "notes.txt",
    "features.npy",
    "data.h5",
    "train.csv.gz",
    "all.zip",
    "scan.png",
    "tokenized_train.json",
    "patients_vocab.json",
    "train_config.json",
    "vocab_patients.txt",
    "my.index.json",
    "records.safetensors",
    "model-train.safetensors",
    "patients.model",
    "notes.md",
    "LICENSE_patients.txt",
    "prompts.jinja",
    "records.py",
    "data/vocab.json",
    "data/config.json",
    "data/model.safetensors",
    "a/b/adapter_model.safetensors",
    "my_tokenizer/train.json",
]
PUBLIC = [
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "generation_config.json",
    "adapter_model.safetensors",
    "adapter_config.json",
    "second/adapter_model.safetensors",
    "second/adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "qformer_tokenizer/tokenizer.json",
    "preprocessor_config.json",
    "processor_config.json",
    "carrier_config.json",
    "privacy_curve.svg",
    ".gitattributes",
    "LICENSE",
    "eval_results.json",
    "modeling_custom.py",
]


def put(folder: Path, name: str, content: str = "{}") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def test_every_file_is_decided_by_name(tmp_path: Path) -> None:
    folder = saved_model(tmp_path)
    before = set(scan(folder).files)
    for name in FORBIDDEN + UNKNOWN + PUBLIC:
        put(folder, name)
    release = scan(folder)
    assert set(release.left_out) == {*FORBIDDEN, *UNKNOWN}
    assert all("not a file that a model needs" in release.left_out[name] for name in UNKNOWN)
    assert set(release.files) == before | set(PUBLIC)
    assert {"README.md", "privacy.json", "model.safetensors", "config.json"} <= set(release.files)
    assert release.refused == {}
    assert all(reason_to_stay(name) for name in FORBIDDEN)
    assert not any(reason_to_stay(name) for name in PUBLIC)


def test_unnoised_metrics_are_left_out_whatever_the_file_is_called(tmp_path: Path) -> None:
    folder = saved_model(tmp_path)
    put(folder, "all_results.json", '{"epoch": 1.0, "train_loss": 0.43}')
    put(folder, "my_history.json", '[{"step": 1, "loss": 0.5}]')
    put(folder, "noted.json", '{"nonprivate_loss": 0.5}')
    put(folder, "eval_results.json", '{"eval_loss": 0.69, "eval_accuracy": 0.5}')
    put(folder, "vocab.json", '{"loss": 1204, "grad_norm": 7}')
    put(folder, "tokenizer.json", '{"model": {"vocab": {"loss": 1204}}}')
    release = scan(folder)
    assert set(release.left_out) == {"all_results.json", "my_history.json", "noted.json"}
    assert "`train_loss`" in release.left_out["all_results.json"]
    assert {"vocab.json", "tokenizer.json", "eval_results.json"} <= set(release.files)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", '{"token": "hf_' + "a" * 34 + '"}', "access token"),
        ("README.md", "| Training Loss | Epoch |\n|---|---|\n| 0.4 | 1 |", "training loss"),
        ("README.md", "- seed: 42", "seed"),
        ("privacy.json", "not json", "not JSON"),
        ("privacy.json", None, "is missing"),
    ],
)
def test_refusals_name_the_file_and_a_remedy(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    folder = saved_model(tmp_path)
    check(folder)
    if content is None:
        (folder / name).unlink()
    else:
        put(folder, name, content)
    with pytest.raises(ReleaseError, match=f"`{name}`.*{words}"):
        check(folder)
    with pytest.raises(ReleaseError):
        publish(folder, "someone/model")  # refused before the network is touched


def test_links_out_of_the_folder_are_left_out(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "model")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "vocab.txt").symlink_to(tmp_path / "secret.txt")
    assert scan(folder).left_out == {"vocab.txt": "a link out of the folder"}


def test_what_from_pretrained_needs_is_published(tmp_path: Path) -> None:
    """A model, a named adapter, a tokenizer and an image processor load from the published files alone."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, BertTokenizer, ViTImageProcessor

    vocabulary = tmp_path / "words.txt"
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n")
    model = zoo.small("bert").bert
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["query"]), adapter_name="named")
    folder = tmp_path / "out"
    adapted.save_pretrained(folder)
    AutoModel.from_pretrained(tmp_path / "base").save_pretrained(folder)
    BertTokenizer(str(vocabulary)).save_pretrained(folder)
    ViTImageProcessor().save_pretrained(folder)
    write_card(folder, facts() | {"peft": "LORA"})
    put(folder, "tokenized_train.json")
    published = stage(folder, tmp_path / "published")
    assert not (published / "tokenized_train.json").exists()
    base = AutoModel.from_pretrained(published)
    assert AutoTokenizer.from_pretrained(published)("a b")["input_ids"]
    assert AutoImageProcessor.from_pretrained(published).size
    assert PeftModel.from_pretrained(base, published / "named")
    assert "named/adapter_model.safetensors" in verify(folder).statement["weights"]
    assert verify(folder).code == 0


def test_every_vocabulary_of_transformers_has_a_published_name() -> None:
    """Names in transformers' source, so that a new tokenizer's file does not stay behind unseen."""
    import transformers

    source = Path(transformers.__file__).parent
    tables = re.findall(
        r"VOCAB_FILES_NAMES = \{(.*?)\}",
        "".join(path.read_text() for path in sorted(source.glob("models/*/tokenization_*.py"))),
        re.DOTALL,
    )
    names = {name for table in tables for name in re.findall(r': "([^"]+\.\w+)"', table)}
    assert len(names) > 15
    assert [name for name in sorted(names) if not is_published(name)] == []


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    folder = saved_model(tmp_path / "model")
    for name in ("training_args.bin", "pytorch_model.bin", "x.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    scan(folder)
    assert not (tmp_path / "exploded").exists()


def test_a_staged_copy_outlives_its_source(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "checkpoint-3")
    put(folder, "optimizer.pt")
    put(folder, "_dp/ledger.jsonl")
    weights = (folder / "model.safetensors").read_bytes()
    staged = stage(folder, tmp_path / "_dp" / "release")
    for path in folder.glob("*.*"):
        path.unlink()
    assert (staged / "model.safetensors").read_bytes() == weights
    assert {path.name for path in staged.rglob("*")} == {
        "README.md", "config.json", "model.safetensors", "privacy.json", "privacy_curve.svg",
    }  # fmt: skip
