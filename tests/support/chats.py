"""Conversations and preference pairs for the tests of TRL's trainers, with a tokenizer made on the spot."""

from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support import zoo

SPECIAL = ("[PAD]", "<bos>", "<eos>", "[UNK]", "<user>", "<assistant>")  # pad, bos and eos as in zoo.SIZE
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<user> {{ m['content'] }} <eos> "
    "{% else %}<assistant> {% generation %}{{ m['content'] }} <eos>{% endgeneration %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word w0, w1, ...; its chat template marks what the assistant says."""
    words = [*SPECIAL, *(f"w{i}" for i in range(zoo.VOCABULARY - len(SPECIAL)))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(pad_token="[PAD]", bos_token="<bos>", eos_token="<eos>", unk_token="[UNK]")
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **names)


def words(generator: torch.Generator, longest: int = 5) -> str:
    length = int(torch.randint(1, longest + 1, (1,), generator=generator))
    drawn = torch.randint(zoo.VOCABULARY - len(SPECIAL), (length,), generator=generator)
    return " ".join(f"w{i}" for i in drawn.tolist())


def _said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def made(kind: str, count: int = 12, seed: int = 0) -> datasets.Dataset:
    """Records of one of TRL's formats: "chat", "prompt", "prompt-chat", "text", "pair", "pair-chat"."""
    g = torch.Generator().manual_seed(seed)
    records: list[dict[str, Any]] = []
    for _ in range(count):
        if kind == "chat":
            turns = [_said(role, words(g)) for role in ("user", "assistant", "user", "assistant")]
            records.append({"messages": sum(turns, [])})
        elif kind == "prompt":
            records.append({"prompt": words(g), "completion": " " + words(g)})
        elif kind == "prompt-chat":
            records.append({"prompt": _said("user", words(g)), "completion": _said("assistant", words(g))})
        elif kind == "text":
            records.append({"text": words(g, 9)})
        elif kind == "pair":
            records.append({"prompt": words(g), "chosen": " " + words(g), "rejected": " " + words(g)})
        elif kind == "pair-chat":
            sides = {side: _said("assistant", words(g)) for side in ("chosen", "rejected")}
            records.append({"prompt": _said("user", words(g)), **sides})
        else:
            raise ValueError(kind)
    return datasets.Dataset.from_list(records)
