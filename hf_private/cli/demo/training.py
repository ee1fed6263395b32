"""The training of the demo: one `DPTrainer` run, with curves of epsilon and accuracy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
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
    """Settings for one model, found on tickets with other seeds. The private run tolerates a higher learning rate."""

    steps: int
    private_rate: float
    twin_rate: float
    carriers: CarrierConfig


PLANS = {
    # Trains the last two layers. Freezing those below saves half of the backward pass and much noise.
    "pretrained": Plan(
        24, 1e-2, 3e-3, CarrierConfig(r=8, target_modules=r".*layer\.(4|5)\..*(query|key|value|dense)|.*pooler\.dense")
    ),
    # Random embeddings must be trained too.
    "random": Plan(150, 3e-3, 1e-3, CarrierConfig(r=8, modules_to_save=["word_embeddings"])),
}
EVALUATIONS = 4
MAX_LENGTH = 32  # tokens of a ticket; its signature may be cut


@dataclass(frozen=True)
class Data:
    """Tokenized tickets for training and evaluation."""

    train: datasets.Dataset
    test: datasets.Dataset

    @classmethod
    def tokenized(cls, tokenizer: PreTrainedTokenizerBase, train: Sequence[Ticket], test: Sequence[Ticket]) -> "Data":
        def encode(tickets: Sequence[Ticket]) -> datasets.Dataset:
            tokens = tokenizer([ticket.text for ticket in tickets], truncation=True, max_length=MAX_LENGTH)
            columns = {name: tokens[name] for name in ("input_ids", "attention_mask")}
            info = datasets.DatasetInfo(dataset_name="synthetic support tickets")  # for the card
            return datasets.Dataset.from_dict({**columns, "labels": [ticket.label for ticket in tickets]}, info=info)

        return cls(encode(train), encode(test))


@dataclass
class Outcome:
    """Result of a run: curves of (step, value), the spent epsilon, and the noise multiplier."""

    epsilons: list[tuple[int, float]] = field(default_factory=lambda: [(0, 0.0)])
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    epsilon: float = math.inf
    noise_multiplier: float = 0.0


class Progress(TrainerCallback):
    """A progress bar with epsilon and accuracy; records both in `outcome`."""

    def __init__(self, outcome: Outcome, trainer: DPTrainer, steps: int) -> None:
        self.outcome = outcome
        self.trainer = trainer
        self.shown: dict[str, str] = {}
        self.bar = tqdm(
            total=steps, bar_format="{l_bar}{bar:30}| step {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
        )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show and record the epsilon spent so far."""
        epsilon = self.trainer.privacy_callback.epsilon()
        self.outcome.epsilons.append((state.global_step, epsilon))
        self._show(epsilon=f"{epsilon:.2f}" if math.isfinite(epsilon) else "infinite")
        self.bar.update()

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show and record the accuracy on test tickets."""
        found = kwargs["metrics"]["eval_accuracy"]
        self.outcome.accuracies.append((state.global_step, found))
        self._show(accuracy=f"{found:.1%}")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.bar.close()

    def _show(self, **parts: str) -> None:
        self.shown |= parts
        self.bar.set_postfix(self.shown, refresh=False)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Share of tickets whose predicted topic is right."""
    predicted = np.asarray(prediction.predictions).argmax(-1)
    return {"accuracy": float((predicted == prediction.label_ids).mean())}


def budget(epsilon: float | None) -> dict[str, Any]:
    """Settings of DPConfig for a target epsilon, or for training without privacy if it is None."""
    return {"noise_multiplier": 0.0, "clip_norm": math.inf} if epsilon is None else {"target_epsilon": epsilon}


def train(
    encoder: Encoder, data: Data, folder: Path, plan: Plan, batch: int, *, epsilon: float | None, delta: float
) -> Outcome:
    """Train with carriers to a budget, or without privacy if `epsilon` is None. Saves the private model only."""
    method: dict[str, Any] = {"expected_batch_size": batch, "carriers": plan.carriers}
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
        dp_config=DPConfig(**budget(epsilon), **method, target_delta=delta),
        train_dataset=data.train,
        eval_dataset=data.test,
        processing_class=encoder.tokenizer,
        compute_metrics=accuracy,
    )
    trainer.remove_callback(PrinterCallback)  # it prints every log entry if the progress bar of Trainer is off
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
