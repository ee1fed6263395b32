"""What a save writes beside weights: settings of the model, of generation and of adapters, and the tokenizer.

Training must not change them. A forward pass that notes its inputs in the config, or a collator that adds words to the
tokenizer, would publish training data without noise. Settings that are public whatever the records are may change.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from hf_private.tasks.heads import base_model

# `differential_privacy` is our own mark; `save_pretrained` sets `architectures` to the name of the model's class
PUBLIC = frozenset(
    "architectures differential_privacy use_cache problem_type _name_or_path dtype torch_dtype"
    " transformers_version base_model_name_or_path inference_mode auto_mapping _from_model_config".split()
)
TOKENIZER = ("init_kwargs", "special_tokens_map", "chat_template", "model_max_length")  # what it saves of itself


def saved_texts(model: nn.Module, processing_class: Any) -> dict[str, Any]:
    """Settings by name, and a mark of the tokenizer.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=1, n_layer=1, vocab_size=9))
    >>> before = saved_texts(model, None)
    >>> model.config.seen = [5, 6]
    >>> sorted(changed_texts(before, saved_texts(model, None)))
    ['config.seen']
    """
    base = base_model(model)
    configs = {name: getattr(base, name, None) for name in ("config", "generation_config")}
    configs |= {f"peft_config.{name}": one for name, one in (getattr(model, "peft_config", None) or {}).items()}
    found = {
        f"{name}.{key}": repr(value)
        for name, config in configs.items()
        if hasattr(config, "to_dict")
        for key, value in _settings(config).items()
        if key not in PUBLIC
    }
    parts = (processing_class, *(getattr(processing_class, name, None) for name in ("tokenizer", "image_processor")))
    marks = [mark for part in parts for mark in _marks(part)]
    return found | ({"processing_class": hash(frozenset(marks))} if marks else {})


def _settings(config: Any) -> dict[str, Any]:
    """The settings of a config; those of generation with the defaults that `generate` fills in."""
    defaults = getattr(config, "_get_default_generation_params", dict)()
    return {key: defaults.get(key) if value is None else value for key, value in config.to_dict().items()}


def _marks(part: Any) -> Iterator[Any]:
    """What a tokenizer or a processor would save, as values that can be compared."""
    if hasattr(part, "get_vocab"):
        yield from part.get_vocab().items()
        yield from ((name, repr(getattr(part, name, None))) for name in TOKENIZER)
    elif hasattr(part, "to_dict"):
        yield repr(part.to_dict())


def changed_texts(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Names of what differs, was added or is gone."""
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
