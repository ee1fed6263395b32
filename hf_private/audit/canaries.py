"""Canaries: audit the trainer, method and settings of a run by training once.

A canary is a record whose gradient is as large as clipping allows and points along its own axis, which no other
record uses (a gradient-space canary). A fair coin decides whether it is in the training set. The attacker sees every
released gradient, as the guarantee permits, and guesses the coins from the sums along each axis. If more guesses are
right than the claimed epsilon allows, some part of the run (noise, clipping, sampling or accounting) is wrong.

A canary that is left out contributes nothing along its axis. It is still sampled, so that the number of records, which
counts as public, does not depend on the coins.

With `unit_column`, a canary is a unit: a person with twice as many records as may count in a step, all on one axis. So
a run that clips each record where it should clip each unit, or that lets in more than `records_per_unit`, leaks.
"""

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hf_private._validate import integer_at_least
from hf_private.config import DPConfig
from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.mechanism.units import Units, as_unit_batch
from hf_private.tasks.losses import LABEL_NAMES, PerSampleLoss
from hf_private.tasks.micro_batches import LogicalBatch, LogicalCollator
from hf_private.trainer.trainer import DPTrainer

from .statistics import OneRun, guess_coins

COLUMN = "canary"  # of a record: its canary number from 1 on, 0 if it is no canary, SILENT if it is left out
SILENT = -1
STRENGTH = 20  # approximate gradient norm of a canary in clip norms: clipping then makes it exactly one clip norm

# make_trainer(trainer_class, output_dir) builds the audited run, with `trainer_class` in place of DPTrainer.
MakeTrainer = Callable[[Callable[..., DPTrainer], str], DPTrainer]


class Canaries(nn.Module):
    """One axis for each of `count` canaries: an extra embedding with one number per canary.

    Hooked to a model, it takes `canary` (N,) from the model's inputs and replaces the logits of canaries by logits
    that depend on their axis only. Their values are constant, so the gradient of a canary is constant too.
    """

    def __init__(self, count: int, clip_norm: float) -> None:
        super().__init__()
        integer_at_least(10, count=count)
        self.axes = nn.Embedding(count + 1, 1)
        nn.init.zeros_(self.axes.weight)
        self.strength = STRENGTH * clip_norm
        self._numbers: Tensor | None = None

    def hook(self, model: nn.Module) -> None:
        """Attach to `model`."""
        model.canaries = self
        model.register_forward_pre_hook(self._take, with_kwargs=True)
        model.register_forward_hook(self._replace)

    def _take(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self._numbers = kwargs.get(COLUMN)
        return args, {name: value for name, value in kwargs.items() if name != COLUMN}

    def _replace(self, model: nn.Module, args: tuple, outputs: Any) -> Any:
        if self._numbers is None:
            return None
        logits = outputs["logits"]
        shape = (-1, *[1] * (logits.dim() - 1))
        numbers = self._numbers.to(logits.device)
        axis = self.axes(numbers.clamp_min(0).view(-1, 1)).view(shape)
        loud = (numbers > 0).to(logits.dtype).view(shape)
        # Class 0 is as likely as all other classes together; labels of canaries are never class 0.
        fixed = torch.zeros_like(logits)
        fixed[..., 0] = math.log(logits.shape[-1] - 1) if logits.shape[-1] > 1 else 1.0
        first = torch.zeros_like(logits)
        first[..., 0] = self.strength
        changed = fixed + first * loud * (axis - axis.detach())
        outputs["logits"] = torch.where((numbers != 0).view(shape), changed, logits)
        return outputs


class _WithCanaries(Dataset):
    """A dataset with canaries after its own records: numbered copies of the first record.

    Args:
        records: The records of the run.
        numbers: The number of each canary.
        column: The column of the units, or None. All ids become numbers, which those of canaries continue.
        units: The units of `records`, if there is a column.
        copies: Records of each canary.
    """

    def __init__(
        self,
        records: Any,
        numbers: np.ndarray,
        column: str | None = None,
        units: Units | None = None,
        copies: int = 1,
    ) -> None:
        self.records = records
        self.numbers = numbers
        self.column = column
        self.units = units
        self.copies = copies

    def __len__(self) -> int:
        return len(self.records) + self.copies * len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        canary = (index - len(self.records)) // self.copies
        record = {**self.records[index if canary < 0 else 0], COLUMN: 0 if canary < 0 else int(self.numbers[canary])}
        if self.column is not None and self.units is not None:
            record[self.column] = int(self.units.unit_of[index]) if canary < 0 else len(self.units) + canary
        return record


class _Collator:
    """The user's collator. Canary numbers bypass it, and labels of canaries become what `Canaries` expects."""

    def __init__(self, collator: Callable[[list], Any]) -> None:
        self.collator = collator
        self.tokenizer = getattr(collator, "tokenizer", None)

    def __call__(self, records: list[Mapping[str, Any]]) -> dict[str, Any]:
        numbers = torch.tensor([record[COLUMN] for record in records])
        batch = dict(self.collator([{k: v for k, v in record.items() if k != COLUMN} for record in records]))
        for name in LABEL_NAMES:
            if isinstance(batch.get(name), Tensor):
                labels = batch[name].clone()
                canary = (numbers != 0).view(-1, *[1] * (labels.dim() - 1)) & (labels != -100)
                batch[name] = labels.masked_fill(canary, 0 if labels.is_floating_point() else 1)
        return {**batch, COLUMN: numbers}


class CanaryTrainer(DPTrainer):
    """DPTrainer with canaries in its data that sums the released gradients along their axes."""

    def __init__(self, *args: Any, coins: np.ndarray, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.model is None or self.model_init is not None:
            raise ValueError("`model_init` must be None in an audit: build the model before the trainer.")
        if math.isinf(self.dp_config.clip_norm):
            raise ValueError("`clip_norm` must be finite in an audit, got inf: there is no bound to test.")
        numbers = np.where(coins, np.arange(1, len(coins) + 1), SILENT)
        self.canaries = Canaries(len(coins), self.dp_config.clip_norm).to(next(self.model.parameters()))
        self.canaries.hook(self.model)
        units = self.unit_column.units(self.train_dataset)
        copies = 1 if units is None else 2 * self.dp_config.records_per_unit
        self.train_dataset = _WithCanaries(self.train_dataset, numbers, self.unit_column.name, units, copies)
        self.data_collator = _Collator(self.data_collator)
        self.scores = np.zeros(len(coins))

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = list({*(self._signature_columns or ()), COLUMN})

    def public_batch(self, batch_size: int, length: int, generator: Any = None) -> dict[str, Tensor]:
        """The self-check's batch, in which one record is a canary."""
        batch = super().public_batch(batch_size, length, generator)
        numbers = torch.zeros(batch_size, dtype=torch.long)
        if batch_size > 1:  # a single record must use every parameter of the model, which a canary does not
            numbers[-1] = 1
        batch[COLUMN] = numbers
        return batch

    def check_canaries(self) -> None:
        """Check that a canary is clipped; otherwise the attack would be weaker than it claims."""
        model, data = self.model, self.train_dataset
        assert model is not None and isinstance(data, _WithCanaries)  # as the constructor has made them
        record = {**data.records[0], COLUMN: 1}
        collate = self.get_train_dataloader().collate_fn
        draw = [record] if isinstance(collate, LogicalCollator) else [[record]]
        batch = self._prepare_inputs(as_unit_batch(collate(draw).micro_batches[0]).batch)
        loss = PerSampleLoss(model, self.per_sample_loss, self.args.label_smoothing_factor)
        with BookKeeper(model) as book:
            book.backward(loss(model, batch))
            norm = book.norms().item()
        if norm < self.dp_config.clip_norm:
            raise ValueError(
                f"A canary's gradient must be at least `clip_norm` = {self.dp_config.clip_norm}, got {norm:.3g}: the"
                " loss is not computed from the model's `logits`. Audit the run with the loss of the model's head."
            )

    def training_step(self, model: nn.Module, inputs: LogicalBatch, num_items_in_batch: Any = None) -> Tensor:
        """Run a private step, then read the released gradient along the axis of every canary."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        released = self.canaries.axes.weight.grad
        if released is not None:
            self.scores += released[1:, 0].double().cpu().numpy()
        return loss


@dataclass(frozen=True)
class CanaryReport:
    """The outcome of one audited run."""

    found: OneRun
    claimed: float
    steps: int
    scores: np.ndarray
    included: np.ndarray

    @property
    def contradicted(self) -> bool:
        """Whether the audit refutes the claimed epsilon, at the confidence of `found`."""
        return self.found.contradicts(self.claimed)


def audit_run(
    make_trainer: MakeTrainer,
    output_dir: str,
    canaries: int = 1000,
    trainer_class: type[CanaryTrainer] = CanaryTrainer,
) -> CanaryReport:
    """Train once with canaries, guess their coins, and compare the lower bound of epsilon with the run's own claim.

    Args:
        make_trainer: f(trainer_class, output_dir) -> trainer; builds the run to audit, with `trainer_class` instead
            of DPTrainer. Canaries are added to its records, so set `expected_batch_size`.
        canaries: number m of coins. More canaries certify a larger epsilon: m = 1000 at most about 4.
    """
    coins = np.frombuffer(secrets.token_bytes(canaries), dtype=np.uint8) % 2 == 0  # unpredictable
    trainer = make_trainer(partial(trainer_class, coins=coins), output_dir)
    if not isinstance(trainer, CanaryTrainer):
        raise ValueError(
            f"`make_trainer` must build its trainer with the class that it gets, got a {type(trainer).__name__}."
        )
    trainer.check_canaries()
    trainer.train()
    spent = trainer.privacy_spent()
    found = guess_coins(trainer.scores, coins, spent.delta)
    return CanaryReport(found, spent.epsilon, trainer.state.global_step, trainer.scores, coins)


def small_task(trainer_class: Callable[..., DPTrainer], output_dir: str, **dp: Any) -> DPTrainer:
    """The run to audit if the user gives none: a tiny BERT classifier on synthetic records."""
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

    size = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(**size, vocab_size=100, max_position_embeddings=16))
    records = [{"input_ids": [5 + i % 90, 7, 9, 5 + i % 7], "labels": i % 2} for i in range(100)]
    args = TrainingArguments(
        output_dir,
        max_steps=60,
        per_device_train_batch_size=512,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    settings = {"target_epsilon": 1.0, "expected_batch_size": 100, **dp}
    return trainer_class(model, args, dp_config=DPConfig(**settings), train_dataset=records)
