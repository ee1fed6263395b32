"""The demo's training: one `DPTrainer` run, observed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
from tqdm import tqdm
from transformers import (
    EvalPrediction,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_private.config import DPConfig
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.trainer.trainer import DPTrainer

from .encoder import Encoder
from .tickets import Ticket

MICRO_BATCH = 32


@dataclass(frozen=True)
class Plan:
    """Settings that suit a model, found on tickets of other seeds. Noise tames Adam, so the private run bears more."""

    steps: int
    private_rate: float
    twin_rate: float
    carriers: CarrierConfig


PLANS = {
    # The last two layers are trained; what lies below is frozen, which saves half of the backward pass and much noise.
    "pretrained": Plan(
        24, 1e-2, 3e-3, CarrierConfig(r=8, target_modules=r".*layer\.(4|5)\..*(query|key|value|dense)|.*pooler\.dense")
    ),
    # Random embeddings have to be learned, all of them.
    "random": Plan(150, 3e-3, 1e-3, CarrierConfig(r=8, modules_to_save=["word_embeddings"])),
}
EVALUATIONS = 4
LONGEST = 32  # tokens of a ticket; its signature may be cut


@dataclass(frozen=True)
class Data:
    """Tokenized tickets, to train on and to evaluate with."""

    train: datasets.Dataset
    test: datasets.Dataset

    @classmethod
    def tokenized(cls, tokenizer: PreTrainedTokenizerBase, train: Sequence[Ticket], test: Sequence[Ticket]) -> "Data":
        def encode(tickets: Sequence[Ticket]) -> datasets.Dataset:
            tokens = tokenizer([ticket.text for ticket in tickets], truncation=True, max_length=LONGEST)
            columns = {name: tokens[name] for name in ("input_ids", "attention_mask")}
            info = datasets.DatasetInfo(dataset_name="invented support tickets")  # for the card
            return datasets.Dataset.from_dict({**columns, "labels": [ticket.label for ticket in tickets]}, info=info)

        return cls(encode(train), encode(test))


@dataclass
class Outcome:
    """What became of a run: curves over (step, value), the spent epsilon, and the noise that it took."""

    epsilons: list[tuple[int, float]] = field(default_factory=list)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    epsilon: float = math.inf
    noise_multiplier: float = 0.0


class Progress(TrainerCallback):
    """A progress bar that shows epsilon and accuracy, and notes both."""

    def __init__(self, outcome: Outcome, trainer: DPTrainer, steps: int) -> None:
        self.outcome, self.trainer = outcome, trainer
        self.bar = tqdm(
            total=steps, bar_format="{l_bar}{bar:30}| step {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
        )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Show what has been spent so far."""
        # The quick bound of every step is loose; the budget, which no step may exceed, bounds epsilon as well.
        epsilon = min(self.trainer.privacy_callback.epsilon(), self.trainer.dp_config.target_epsilon or math.inf)
        self._show(epsilon=f"{epsilon:.2f}" if math.isfinite(epsilon) else "infinite")
        self.bar.update()

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, metrics: dict, **_: Any) -> None:
        """Note the accuracy on tickets that were not trained on, and what it has cost."""
        self.outcome.epsilons.append((state.global_step, self.trainer.privacy_callback.epsilon(exact=True)))
        self.outcome.accuracies.append((state.global_step, metrics["eval_accuracy"]))
        self._show(accuracy=f"{metrics['eval_accuracy']:.1%}")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.bar.close()

    def _show(self, **parts: str) -> None:
        self.shown = {**getattr(self, "shown", {}), **parts}
        self.bar.set_postfix(self.shown, refresh=False)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Share of tickets whose topic was found."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def train(
    encoder: Encoder, data: Data, folder: Path, plan: Plan, batch: int, *, epsilon: float | None, delta: float
) -> Outcome:
    """Train with carriers to a budget, or without privacy if `epsilon` is None, and save what is private."""
    budget = {"noise_multiplier": 0.0, "clip_norm": math.inf} if epsilon is None else {"target_epsilon": epsilon}
    trainer = DPTrainer(
        encoder.model,
        TrainingArguments(
            str(folder),
            max_steps=plan.steps,
            per_device_train_batch_size=MICRO_BATCH,
            per_device_eval_batch_size=MICRO_BATCH,
            learning_rate=plan.twin_rate if epsilon is None else plan.private_rate,
            eval_strategy="steps",
            eval_steps=max(1, plan.steps // EVALUATIONS),
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        dp_config=DPConfig(**budget, target_delta=delta, expected_batch_size=batch, carriers=plan.carriers),
        train_dataset=data.train,
        eval_dataset=data.test,
        processing_class=encoder.tokenizer,
        compute_metrics=accuracy,
    )
    trainer.remove_callback(PrinterCallback)  # without Trainer's bar it would print every log entry
    outcome = Outcome()
    trainer.add_callback(Progress(outcome, trainer, plan.steps))
    trainer.evaluate()
    trainer.train()
    if outcome.accuracies[-1][0] < plan.steps:
        trainer.evaluate()
    outcome.epsilon = trainer.privacy_spent().epsilon
    outcome.noise_multiplier = trainer.spending.last_run["noise_multiplier"]
    if epsilon is not None:
        trainer.save_model()
    return outcome
