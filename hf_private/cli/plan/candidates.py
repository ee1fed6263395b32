"""The ways in which a model could be trained, each with the cost of a micro-batch as the doctor counts it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import nn

from hf_private.cli.arguments import UsageError
from hf_private.cli.doctor.models import builder, inputs, losses, on_some_device
from hf_private.cli.doctor.variants import Row, compare
from hf_private.gradients.coverage import coverage, without
from hf_private.tasks.pooling import can_read_by_mean, read_by_mean, trained_for_mean

RANKS = (4, 8, 16)
ENDINGS = {  # PEFT's name of a task, and how Transformers' classes for it end
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
    "CAUSAL_LM": ("ForCausalLM", "LMHeadModel"),
    "SEQ_2_SEQ_LM": "ForConditionalGeneration",
}


@dataclass(frozen=True)
class Candidate:
    """A method on the model; `kind` is a key of `rules.KEPT`."""

    kind: str
    rank: int | None
    noised: int  # numbers that get noise
    operations: float  # floating-point operations per record
    memory: int  # bytes of training in all
    task_type: str | None = None  # what PEFT calls the model's task
    mean: bool = False  # whether the head reads the mean of the tokens, which the encoder was trained for

    @property
    def name(self) -> str:
        return f"{self.kind} r={self.rank}" if self.rank else self.kind


def candidates(model: str, task: str | None, batch: int, length: int | None) -> list[Candidate]:
    """Everything that applies to the model, dry-run on micro-batches of `batch` records of `length` tokens."""

    def dry_run(build: Callable[[], nn.Module], device: str, mask: bool, length: int) -> list[Candidate]:
        for_mean = trained_for_mean(model)

        def read() -> nn.Module:
            built = build()
            return read_by_mean(built) if for_mean and can_read_by_mean(built) else built

        return _on(read, device, mask, batch, length, for_mean and can_read_by_mean(build()))

    try:
        return on_some_device(builder(model, task), dry_run, batch, length)
    except UsageError as error:  # the doctor's argument has another name
        raise UsageError(str(error).replace("argument MODEL", "argument --model")) from error


def _on(
    build: Callable[[], nn.Module], device: str, mask: bool, batch: int, length: int, mean: bool
) -> list[Candidate]:
    model = build()
    few = inputs(model, 2, min(length, 7), device, mask)
    entries = coverage(model, lambda: losses(model, few))
    if all(entry.status != "covered" for entry in entries):
        raise UsageError("argument --model: no parameter can be trained privately. See `hf-private doctor`.")
    many = inputs(model, batch, length, device, mask)

    def candidate(kind: str, rank: int | None, row: Row) -> Candidate:
        return Candidate(kind, rank, row.noised, row.flops / batch, row.total_bytes, _task_type(model), mean)

    def rows(change: Callable[[nn.Module], nn.Module], **carriers: int) -> list[Row]:
        return compare(lambda: change(without(build(), entries)), lambda model: losses(model, many), carriers)

    if isinstance(model, PeftModel):
        return [candidate("LoRA", None, rows(lambda model: model)[1])]
    found = [candidate("BK", None, rows(lambda model: model)[1])]
    for rank in RANKS:
        try:
            _, _, *low_rank = (row for row in rows(lambda model: model, r=rank) if "train_only" not in row.method)
        except ValueError:  # no linear layers, or smaller ones
            continue
        kinds = zip(("LoRA", "RGP", "LSG"), low_rank, strict=True)
        found += [candidate(kind, rank, row) for kind, row in kinds]
    if any(p.requires_grad for p in head_only(without(build(), entries)).parameters()):
        found.append(candidate("head only", None, rows(head_only)[1]))
    return found


def _task_type(model: nn.Module) -> str | None:
    name = type(model).__name__
    return next((task for task, ending in ENDINGS.items() if name.endswith(ending)), None)


def head_only(model: nn.Module) -> nn.Module:
    """Freeze all but the task head."""
    getattr(model, "base_model", model).requires_grad_(False)
    return model


def operations_per_second(seconds: float = 0.3) -> float:
    """Rate of this machine, measured on products of a transformer layer's size."""
    x, w = torch.randn(512, 768), torch.randn(768, 768)
    x @ w
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        x @ w
        count += 1
    return 2 * count * 512 * 768 * 768 / spent
