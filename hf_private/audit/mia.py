"""Membership inference on a saved model: its loss on records that it was trained on, and on other records.

The attacker calls a record a member if its loss is low (Sablayrolles et al. 2019). This is an average-case attack: a
success rate near one half is weak evidence of privacy, a rate far above one half is strong evidence against it.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from hf_private.tasks.heads import IGNORE_INDEX, Head, base_model, head_of
from hf_private.tasks.losses import PerSampleLoss

HEADS = (Head.CLASSIFICATION, Head.CAUSAL_LM)
TEXT = ("text", "sentence", "sentence1")  # accepted column names
PAIR = ("text_pair", "sentence2")
LABEL = ("label", "labels")
BATCH = 32  # records evaluated at a time
LONGEST = 512  # tokens of a record; longer ones are cut


class Record(NamedTuple):
    """One record of a file: its text, an optional second text, and an optional label."""

    text: str
    pair: str | None = None
    label: str | None = None


def read_records(path: str | Path) -> list[Record]:
    """Read a .tsv, .csv, .json (a list) or .jsonl file with the columns text and optionally text_pair and label."""
    path = Path(path)
    records = []
    for number, row in enumerate(_rows(path)):
        text, pair, label = _first(row, TEXT), _first(row, PAIR), _first(row, LABEL)
        if not isinstance(text, str):
            raise ValueError(
                f"{str(path)!r} must have a column `text`, got {sorted(map(str, row))} in record {number}."
            )
        records.append(Record(text, pair, None if label is None else str(label)))
    return records


def _first(row: dict[str, Any], names: Sequence[str]) -> Any:
    """The value of the first of `names` that is a column of `row`, or None."""
    return next((row[name] for name in names if name in row), None)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} must be a readable file of records: {error}.") from error
    lines = content.splitlines(keepends=True)
    if path.suffix == ".tsv":
        yield from csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        return
    if path.suffix == ".csv":
        yield from csv.DictReader(lines)
        return
    if path.suffix not in (".json", ".jsonl"):
        raise ValueError(f"{str(path)!r} must end in .tsv, .csv, .json or .jsonl.")
    try:
        rows = json.loads(content) if path.suffix == ".json" else [json.loads(x) for x in lines if x.strip()]
    except ValueError as error:
        raise ValueError(f"{str(path)!r} must be JSON: {error}.") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{str(path)!r} must be a list of objects, one per record.")
    yield from rows


def load(folder: str | Path) -> tuple[nn.Module, Any]:
    """Load a saved classifier or causal language model, or an adapter of one, and its tokenizer."""
    folder = str(folder)
    adapter = Path(folder, "adapter_config.json")
    try:
        if adapter.is_file():
            import peft

            task = json.loads(adapter.read_text()).get("task_type")
            names = {"SEQ_CLS": "AutoPeftModelForSequenceClassification", "CAUSAL_LM": "AutoPeftModelForCausalLM"}
            if task not in names:
                raise ValueError(f"`task_type` of the adapter must be one of {', '.join(names)}, got {task!r}.")
            model = getattr(peft, names[task]).from_pretrained(folder)
        else:
            named = (transformers.AutoConfig.from_pretrained(folder).architectures or [""])[0]
            if not hasattr(transformers, named):
                raise ValueError(f"`architectures` of {folder!r} must name a model with a head, got {named!r}.")
            model = getattr(transformers, named).from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except OSError as error:
        raise ValueError(
            f"{folder!r} must hold a saved model with its tokenizer: {str(error).splitlines()[0]}"
        ) from None
    if head_of(model) not in HEADS:
        raise ValueError(f"{folder!r} must be a classifier or a causal language model, got {head_of(model)}.")
    return model, tokenizer


@torch.no_grad()
def record_losses(model: nn.Module, tokenizer: Any, records: Sequence[Record]) -> np.ndarray:
    """The model's loss on each record (n,), in eval mode; a language model's loss is the mean over the tokens."""
    model.eval()
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    text_config = _config(model).get_text_config()
    if text_config.pad_token_id is None:
        text_config.pad_token_id = tokenizer.pad_token_id
    device = next(model.parameters()).device
    loss = PerSampleLoss(model)
    losses = np.empty(len(records))
    order = sorted(range(len(records)), key=lambda n: -len(records[n].text))  # similar lengths need little padding
    for start in range(0, len(order), BATCH):
        part = order[start : start + BATCH]
        batch = _encode(model, tokenizer, [records[n] for n in part])
        losses[part] = loss(model, {name: x.to(device) for name, x in batch.items()}).double().cpu().numpy()
    return losses


def _config(model: nn.Module) -> transformers.PretrainedConfig:
    base = base_model(model)
    assert isinstance(base, transformers.PreTrainedModel)  # `head_of` accepts no others
    return base.config


def _encode(model: nn.Module, tokenizer: Any, records: list[Record]) -> dict[str, Tensor]:
    texts = [record.text for record in records]
    pairs = [record.pair for record in records] if records[0].pair is not None else None
    positions = getattr(_config(model), "max_position_embeddings", None) or LONGEST
    longest = min(LONGEST, tokenizer.model_max_length, positions)
    tokens = dict(tokenizer(texts, pairs, truncation=True, max_length=longest, padding=True, return_tensors="pt"))
    if head_of(model) is Head.CAUSAL_LM:
        return {**tokens, "labels": tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, IGNORE_INDEX)}
    return {**tokens, "labels": torch.stack([_label(model, record) for record in records])}


def _label(model: nn.Module, record: Record) -> Tensor:
    config = _config(model)
    if record.label is None:
        raise ValueError(f"Records of a classifier must have a column `label`, got none for {record.text[:40]!r}.")
    if config.num_labels == 1:
        return torch.tensor(float(record.label))
    numbers = {str(label): int(number) for label, number in (config.label2id or {}).items()}
    number = numbers.get(record.label)
    if number is None and record.label.lstrip("-").isdigit():
        number = int(record.label)
    if number is None or not 0 <= number < len(config.id2label or {}):
        raise ValueError(f"`label` must be one of {', '.join(numbers)}, or its number, got {record.label!r}.")
    return torch.tensor(number)
