"""What to train, by name: `DPConfig(train_only=...)`. A preset freezes the rest before the method looks at the model.

Fewer trained numbers get less noise in all. Names and layer numbers decide; no record is read.
"""

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from peft import PeftModel
from torch import nn

from .targeting import freeze_rest, head_of


class Preset(NamedTuple):
    """Which parameters a preset trains, and what a card calls them."""

    chosen: Callable[[nn.Module], set[str]]  # their names, of those that are trainable
    words: str


def _trainable(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def _refuse_peft(model: nn.Module, preset: str) -> None:
    if isinstance(model, PeftModel):
        raise ValueError(
            f"`train_only` must be None or 'lora-B' for a PEFT model, got {preset!r}: PEFT says what it trains"
            " (`bias`, `layers_to_transform` and `modules_to_save` of its config)."
        )


def _head(model: nn.Module, preset: str) -> set[str]:
    _refuse_peft(model, preset)
    head = head_of(model) & _trainable(model)
    if not head:
        raise ValueError(
            f"`train_only` must be None for {type(model).__name__}, got {preset!r}: it has no trainable task"
            " head of its own. Freeze what should not be trained yourself (`requires_grad_(False)`)."
        )
    return head


def _bias(model: nn.Module) -> set[str]:
    _refuse_peft(model, "bias")
    biases = {name for name in _trainable(model) if name.rpartition(".")[2] == "bias"}
    if not biases:
        raise ValueError(
            f"`train_only` must be None for {type(model).__name__}, got 'bias': it has no trainable biases. Use LoRA"
            " or carriers."
        )
    return biases | (head_of(model) & _trainable(model))


def _upper_half(model: nn.Module) -> set[str]:
    head = _head(model, "upper-half")
    names = [name for name, _ in model.named_parameters()]
    numbered = {name: found for name in names if (found := re.match(r"(.*?)\.(\d+)\.", name))}
    stacks = {found[1] for found in numbered.values()}
    count = 1 + max((int(found[2]) for found in numbered.values()), default=0)
    if len(stacks) != 1 or count < 2:
        raise ValueError(
            f"`train_only` must be None for {type(model).__name__}, got 'upper-half': it needs one stack of numbered"
            f" layers, and this model has {', '.join(sorted(stacks)) or 'none'}. Freeze what should not be trained"
            " yourself (`requires_grad_(False)`)."
        )
    after = names[max(map(names.index, numbered)) + 1 :]  # pooler, last norm
    upper = {name for name, found in numbered.items() if int(found[2]) >= count // 2}
    return (upper | set(after) | head) & _trainable(model)


def _lora_b(model: nn.Module) -> set[str]:
    trained = _trainable(model)
    second = {name for name in trained if ".lora_B." in name or ".lora_embedding_B." in name}
    if not isinstance(model, PeftModel) or not second:
        raise ValueError(
            f"`train_only` = 'lora-B' must come with a LoRA model, got {type(model).__name__}. Add an adapter:"
            " get_peft_model(model, LoraConfig(...))."
        )
    return trained - {name for name in trained if ".lora_A." in name or ".lora_embedding_A." in name}


PRESETS = {
    "bias": Preset(_bias, "biases and the task head (BiTFiT)"),
    "head": Preset(lambda model: _head(model, "head"), "the task head"),
    "upper-half": Preset(_upper_half, "the upper half of the layers and the task head"),
    "lora-B": Preset(_lora_b, "the matrices B (FFA-LoRA)"),
}


def train_only(model: nn.Module, preset: str) -> None:
    """Freeze what a preset does not train.

    - `"bias"`: biases and the task head are trained (BiTFiT, Zaken et al. 2022).
    - `"head"`: the task head alone.
    - `"upper-half"`: the upper half of the numbered layers, what comes after them, and the task head.
    - `"lora-B"`: of a LoRA, all but the matrices A (FFA-LoRA, Sun et al. 2024). Half as many numbers get noise, and
      the noise of A is not multiplied by that of B.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
    >>> model = BertForSequenceClassification(config)
    >>> train_only(model, "head")
    >>> [name for name, p in model.named_parameters() if p.requires_grad]
    ['classifier.weight', 'classifier.bias']
    """
    trained: Collection[str] = PRESETS[preset].chosen(model)
    freeze_rest(model, trained)
