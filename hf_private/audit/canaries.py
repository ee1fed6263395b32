"""Canaries: a training run audited in one go, with the trainer, the method and the settings that will be used.

A canary is a record whose gradient is as large as clipping allows and points along an axis of its own, where no other
record is (a gradient-space canary). Each is in the training set or not by the toss of a fair coin. The attacker sees
every released gradient, as the guarantee permits, and guesses the coins by what accumulates along each axis. If more
guesses are right than the claimed epsilon allows, something in the run does not do what the accountant believes: the
noise, the clipping, the sampling, their composition.

Along its axis a canary that was left out contributes nothing. It still is drawn, so that the number of records, which
counts as public, is the same whatever the coins say.
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

from hf_private._validate import integer_at_least
from hf_private.config import DPConfig
from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.tasks.losses import LABEL_NAMES, PerSampleLoss
from hf_private.tasks.micro_batches import LogicalBatch
from hf_private.trainer.trainer import DPTrainer

from .statistics import CONFIDENCE, OneRun, guess_coins

COLUMN = "canary"  # of a record: 0 if it is none, its number from 1 on, or SILENT
SILENT = -1
STRENGTH = 20  # gradient of a canary in clip norms, about: clipping then makes it exactly one

# make_trainer(trainer_class, output_dir): builds the run that is audited, with `trainer_class` in place of DPTrainer
MakeTrainer = Callable[[Callable[..., DPTrainer], str], DPTrainer]


class Canaries(nn.Module):
    """One axis for each of `count` canaries: an embedding with one number each, beside the model's own weights.

    Hooked to a model, it takes `canary` (N,) from the model's inputs, and replaces the logits of canaries by ones that
    depend on their axis only. Their value never changes, so that a canary's gradient does not either.
    """

    def __init__(self, count: int, clip_norm: float) -> None:
        super().__init__()
        integer_at_least(10, count=count)
        self.axes = nn.Embedding(count + 1, 1)
        nn.init.zeros_(self.axes.weight)
        self.strength = STRENGTH * clip_norm
        self._numbers: Tensor | None = None

    def hook(self, model: nn.Module) -> None:
        """Become a part of `model`."""
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
        # Class 0 and all others together are equally likely; labels of canaries are never class 0.
        fixed = torch.zeros_like(logits)
        fixed[..., 0] = math.log(logits.shape[-1] - 1) if logits.shape[-1] > 1 else 1.0
        first = torch.zeros_like(logits)
        first[..., 0] = self.strength
        changed = fixed + first * loud * (axis - axis.detach())
        outputs["logits"] = torch.where((numbers != 0).view(shape), changed, logits)
        return outputs


class _WithCanaries:
    """A dataset with canaries behind its own records: copies of the first one, by number."""

    def __init__(self, records: Any, numbers: np.ndarray) -> None:
        self.records, self.numbers = records, numbers

    def __len__(self) -> int:
        return len(self.records) + len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        own = index < len(self.records)
        number = 0 if own else int(self.numbers[index - len(self.records)])
        return {**self.records[index if own else 0], COLUMN: number}


class _Collator:
    """The user's collator; numbers of canaries go past it, and their labels are set to what `Canaries` expects."""

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
    """DPTrainer with canaries in its data, which keeps score along their axes. Nothing else is changed."""

    def __init__(self, *args: Any, coins: np.ndarray, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.model_init is not None:
            raise ValueError("`model_init` must be None in an audit: build the model before the trainer.")
        if math.isinf(self.dp_config.clip_norm):
            raise ValueError("`clip_norm` must be finite in an audit, got inf: there is no bound to be tested.")
        numbers = np.where(coins, np.arange(1, len(coins) + 1), SILENT)
        canaries = Canaries(len(coins), self.dp_config.clip_norm).to(next(self.model.parameters()))
        canaries.hook(self.model)
        self.train_dataset = _WithCanaries(self.train_dataset, numbers)
        self.data_collator = _Collator(self.data_collator)
        self.scores = np.zeros(len(coins))

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = list({*self._signature_columns, COLUMN})

    def public_batch(self, batch_size: int, length: int, generator: Any = None) -> dict[str, Tensor]:
        """The self-check's batch, in which one record is a canary."""
        batch = super().public_batch(batch_size, length, generator)
        numbers = torch.zeros(batch_size, dtype=torch.long)
        numbers[-1] = 1
        batch[COLUMN] = numbers
        if batch_size == 1:  # every parameter must take part, the model's own too
            batch[COLUMN][0] = 0
        return batch

    def check_canaries(self) -> None:
        """A canary must be clipped, or it would be a weaker attack than it claims to be."""
        loader = self.get_train_dataloader()
        number = len(self.train_dataset) - len(self.scores)
        record = {**self.train_dataset[number], COLUMN: 1}
        batch = self._prepare_inputs(loader.collate_fn([record]).micro_batches[0])
        loss = PerSampleLoss(self.model, self.per_sample_loss, self.args.label_smoothing_factor)
        with BookKeeper(self.model) as book:
            book.backward(loss(self.model, batch))
            norm = book.norms().item()
        if norm < self.dp_config.clip_norm:
            raise ValueError(
                f"A canary's gradient must be at least `clip_norm` = {self.dp_config.clip_norm}, got {norm:.3g}: the"
                " model's loss does not follow from its `logits`. Audit it with the head's own loss."
            )

    def training_step(self, model: nn.Module, inputs: LogicalBatch, num_items_in_batch: Any = None) -> Tensor:
        """A private step, after which the released gradient is read along every canary's axis."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        released = self.model.canaries.axes.weight.grad
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
        """Whether the run did not keep its claim, at the confidence of `found`."""
        return self.found.contradicts(self.claimed)


def audit_run(
    make_trainer: MakeTrainer,
    output_dir: str,
    canaries: int = 1000,
    guesses: int | None = None,
    confidence: float = CONFIDENCE,
    trainer_class: type[CanaryTrainer] = CanaryTrainer,
) -> CanaryReport:
    """Train once with canaries, guess their coins, and hold the lower bound of epsilon against the run's own claim.

    Args:
        make_trainer: f(trainer_class, output_dir) -> trainer; builds the run as it would be, with `trainer_class`
            instead of DPTrainer. Canaries are added to its records: leave `expected_batch_size` set.
        canaries: m, how many coins are tossed. More certify more: m = 1000 at most an epsilon of about 4.
    """
    coins = np.frombuffer(secrets.token_bytes(canaries), dtype=np.uint8) % 2 == 0  # nobody knows them before
    trainer = make_trainer(partial(trainer_class, coins=coins), output_dir)
    if not isinstance(trainer, CanaryTrainer):
        raise ValueError(
            f"`make_trainer` must build its trainer with the class that it is given, got a {type(trainer).__name__}."
        )
    trainer.check_canaries()
    trainer.train()
    spent = trainer.privacy_spent()
    found = guess_coins(trainer.scores, coins, spent.delta, guesses, confidence)
    return CanaryReport(found, spent.epsilon, trainer.state.global_step, trainer.scores, coins)


def small_task(trainer_class: Callable[..., DPTrainer], output_dir: str, **dp: Any) -> DPTrainer:
    """The run that is audited if none is given: a tiny BERT classifier on invented records."""
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
