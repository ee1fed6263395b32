"""Models that `hf-private doctor` examines, built from a configuration alone, and inputs for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_private.cli.arguments import TASKS, UsageError

T = TypeVar("T")
SMALL = 500_000_000  # parameters of a model that may be built with data, if a step on tensors without data fails
PEFT_TASKS = {
    "SEQ_CLS": "sequence-classification",
    "TOKEN_CLS": "token-classification",
    "QUESTION_ANS": "question-answering",
    "CAUSAL_LM": "causal-lm",
    "SEQ_2_SEQ_LM": "seq2seq-lm",
}


def builder(name: str, task: str | None = None) -> Callable[[str], nn.Module]:
    """A function from a device to the model `name`: a folder, a config file, an adapter or a name on the Hub.

    Weights are not read: coverage and cost depend on the architecture alone.
    """
    adapter = Path(name) / "adapter_config.json"
    if adapter.is_file():
        from peft import PeftConfig, get_peft_model

        peft_config = PeftConfig.from_pretrained(name)
        if not peft_config.base_model_name_or_path:
            raise UsageError(f"argument MODEL: must name its base model in {adapter}, got none")
        peft_config.inference_mode = False  # PEFT freezes a loaded adapter otherwise
        task = task or PEFT_TASKS.get(json.loads(adapter.read_text()).get("task_type") or "")
        base = builder(peft_config.base_model_name_or_path, task)
        return lambda device: get_peft_model(base(device), peft_config)
    must = f"argument MODEL: must be a folder with a config.json or a name on the Hub, got {name!r}"
    if name == "" or (name[0] in "./~" and not Path(name).exists()):
        raise UsageError(must)

    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UsageError(f"{must}: {str(error).strip().splitlines()[0]}") from None
    factory = _factory(config, task)

    def build(device: str) -> nn.Module:
        with torch.device(device):
            return factory(config)

    return build


def on_some_device(
    build: Callable[[str], nn.Module],
    run: Callable[[Callable[[], nn.Module], str, bool, int], T],
    batch: int,
    length: int | None,
) -> T:
    """Run on tensors without data if the model allows it, otherwise on the CPU.

    Args:
        run: fn(build, device, mask, length) on a model in training mode, with or without a mask.
        batch: Records, for the message.
        length: Tokens of a record; 128 by default, or the most that the model takes.
    """
    model = build("meta")
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None) or 128
    length = min(128, longest) if length is None else length
    attempts = [("meta", False), ("meta", True)]  # without a mask some models look at the data; others reject a mask
    if sum(p.numel() for p in model.parameters()) <= SMALL:
        attempts.append(("cpu", True))
    reason = ""
    for device, mask in attempts:
        try:
            return run(lambda device=device: build(device).train(), device, mask, length)
        except (NotImplementedError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
    raise UsageError(f"argument MODEL: cannot be run on {batch} records of {length} tokens: {reason}")


def _factory(config: Any, task: str | None) -> Callable[[Any], nn.Module]:
    """The class that the config names if it has a head, otherwise a classifier."""
    import transformers

    from hf_private.tasks.heads import HEAD_CLASSES

    heads = frozenset().union(*HEAD_CLASSES.values())
    named = (config.architectures or [""])[0]
    if task is None and named in heads:
        return getattr(transformers, named)._from_config
    task = task or ("image-classification" if hasattr(config, "image_size") else "sequence-classification")
    auto = getattr(transformers, TASKS[task])
    if type(config) not in auto._model_mapping:
        fitting = [t for t, a in TASKS.items() if type(config) in getattr(transformers, a)._model_mapping]
        allowed = f"must be one of {', '.join(fitting)}" if fitting else "none is known"
        raise UsageError(f"argument --task: {allowed} for a {config.model_type} model, got {task}")
    if task == "sequence-classification" and config.get_text_config().pad_token_id is None:
        config.get_text_config().pad_token_id = 0  # classifiers on decoders search the last token before the padding
    return auto.from_config


def inputs(model: nn.Module, batch: int, length: int, device: str, mask: bool) -> dict[str, Tensor]:
    """Inputs: `batch` records of `length` tokens, or images of the size in the config."""
    from hf_private.tasks.heads import Head, base_model, head_of

    base = base_model(model)
    if base.main_input_name == "pixel_values":
        size = getattr(base.config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(base.config, "num_channels", 3)
        return {"pixel_values": torch.zeros(batch, channels, height, width, device=device)}
    shape = (batch, 2, length) if head_of(model) is Head.MULTIPLE_CHOICE else (batch, length)
    ids = torch.ones(shape, dtype=torch.long, device=device)
    tensors = {"input_ids": ids}
    if mask:
        tensors["attention_mask"] = torch.ones_like(ids)
    if head_of(model) is Head.SEQ2SEQ_LM:
        tensors["decoder_input_ids"] = ids
    return tensors


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss (N,) with the cost of the real one: cross entropy of the first class, averaged over each record."""
    outputs = model(**batch)
    logits = [outputs[key] for key in ("logits", "start_logits", "end_logits") if key in outputs]
    return -torch.stack([_first_class(x) for x in logits]).sum(0)


class UnitLosses:
    """The losses of units of so many records each, for a batch: (N / rows,)."""

    def __init__(self, batch: dict[str, Tensor], rows_per_record: int) -> None:
        self.batch = batch
        self.rows_per_record = rows_per_record

    def __call__(self, model: nn.Module) -> Tensor:
        return losses(model, self.batch).unflatten(0, (-1, self.rows_per_record)).mean(1)


def _first_class(logits: Tensor) -> Tensor:
    """Log-probability of the first class, (N, ..., V) -> (N,)."""
    if logits.dim() == 2:
        return logits.log_softmax(-1)[:, 0]
    return logits.float().log_softmax(-1)[..., 0].flatten(1).mean(1)
