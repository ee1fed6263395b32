"""What a save writes beside weights: the model's settings and the tokenizer's vocabulary.

Training must not change them. A forward pass that notes its inputs in the config, or a collator that adds words to the
tokenizer, would publish training data without noise. Settings that are public whatever the records are may change.
"""

from typing import Any

from torch import nn

from hf_private.tasks.heads import base_model

# `differential_privacy` is our own mark; `save_pretrained` sets `architectures` to the name of the model's class
PUBLIC = frozenset(
    "architectures differential_privacy use_cache problem_type _name_or_path dtype torch_dtype"
    " transformers_version".split()
)


def saved_texts(model: nn.Module, processing_class: Any) -> dict[str, Any]:
    """Settings by name, and a mark of the vocabulary.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=1, n_layer=1, vocab_size=9))
    >>> before = saved_texts(model, None)
    >>> model.config.seen = [5, 6]
    >>> sorted(changed_texts(before, saved_texts(model, None)))
    ['config.seen']
    """
    found: dict[str, Any] = {}
    config = getattr(base_model(model), "config", None)
    if hasattr(config, "to_dict"):
        found |= {f"config.{key}": repr(value) for key, value in config.to_dict().items() if key not in PUBLIC}
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if hasattr(tokenizer, "get_vocab"):
        found["processing_class"] = hash(frozenset(tokenizer.get_vocab().items()))
    return found


def changed_texts(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Names of what differs, was added or is gone."""
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
