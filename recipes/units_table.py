"""Accuracy at a fixed epsilon, per turn and per conversation, by both samplings. Stop it at any time; the next start
continues. Writes recipes/results/units.json, .md and .png. Takes about an hour on one CPU thread.

    HF_PRIVATE_DATA=data python recipes/units_table.py                       # runs what is missing
    HF_PRIVATE_DATA=data python recipes/units_table.py --minutes 10          # and stops after about 10 minutes
    HF_PRIVATE_DATA=data python recipes/units_table.py --dry_run             # lists what is missing

The task is that of units.py: the service that a user's turn is about. MiniLM is frozen and public, so its means over
the tokens of a turn are computed once; DPTrainer trains the classifier on top. The input of a record is the user's turn
and the system's turn before it.

Every setting draws the same share q of what it draws (turns or conversations) in each of the same number of steps, and
gets the same search: each learning rate once, with the noise of its own budget, trained without 1,500 conversations of
the training file and scored on their turns. The dev file is used once for each cell of the table: a random sample of
its turns, without those whose text is in the training file.
"""

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from data import model_path
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModel, AutoTokenizer, TrainingArguments
from units import SERVICES, UNIT, UnitOptions, rows_of

from hf_private import DPConfig, DPTrainer

RESULTS = Path(__file__).parent / "results" / "units"
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
EPSILONS = (8.0, 3.0)
KS = (1, 4, 8)
SEEDS = (0, 1, 2)
STEPS, SHARE, DELTA, CLIP_NORM = 100, 1 / 12, 5e-6, 1.0
HELD_OUT, DEV = 1500, 10_000  # conversations; turns
ROWS = 1024  # of a micro-batch: speed only


@dataclass
class Turns(Dataset):
    """Turns as features of the frozen encoder, with their services and conversations."""

    features: Tensor
    labels: list[int]
    conversations: list[str]
    texts: list[str] = field(repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "features": self.features[index],
            "labels": self.labels[index],
            UNIT: self.conversations[index],
        }

    def part(self, keep: list[int]) -> "Turns":
        """Some of the turns."""
        return Turns(
            self.features[keep],
            [self.labels[i] for i in keep],
            [self.conversations[i] for i in keep],
            [self.texts[i] for i in keep],
        )


class Classifier(nn.Module):
    """A linear classifier (N, d) -> (N, number of services) that begins at zero."""

    main_input_name = "features"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, len(SERVICES))
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features)


@dataclass(frozen=True)
class Setting:
    """A line of the table at one epsilon."""

    name: str
    epsilon: float | None
    dp: tuple[tuple[str, Any], ...] = ()

    @property
    def draws_units(self) -> bool:
        return dict(self.dp).get("unit_sampling") == "units"

    def config(self, data: Turns) -> DPConfig:
        """The settings of DPTrainer, which draws the same share of every dataset."""
        drawn = len(set(data.conversations)) if self.draws_units else len(data)
        budget: dict[str, Any] = {"target_epsilon": self.epsilon, "clip_norm": CLIP_NORM}
        if self.epsilon is None:
            budget = {"noise_multiplier": 0.0, "clip_norm": math.inf}
        return DPConfig(**budget, **dict(self.dp), target_delta=DELTA, expected_batch_size=round(SHARE * drawn))


def settings() -> list[Setting]:
    """All lines: without privacy, per turn, and per conversation."""
    found = [Setting("not private", None)]
    for epsilon in EPSILONS:
        found.append(Setting("per turn", epsilon))
        for sampling in ("units", "records"):
            for k in KS:
                dp = {"unit_column": UNIT, "unit_sampling": sampling, "records_per_unit": k}
                found.append(Setting(f"per conversation, {sampling}, k = {k}", epsilon, tuple(dp.items())))
    return found


# ---- data


@torch.no_grad()
def encode(texts: list[str]) -> Tensor:
    """The mean of MiniLM's last states over the tokens of each text (n, 384), of norm 1."""
    path = model_path("minilm")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.bfloat16).eval()
    different = sorted(set(texts), key=len)
    found: dict[str, Tensor] = {}
    for first in range(0, len(different), 64):
        part = different[first : first + 64]
        batch = tokenizer(part, padding=True, truncation=True, max_length=64, return_tensors="pt")
        states, mask = model(**batch).last_hidden_state.float(), batch["attention_mask"].unsqueeze(-1)
        found.update(zip(part, F.normalize((states * mask).sum(1) / mask.sum(1), dim=1), strict=True))
    return torch.stack([found[text] for text in texts])


def turns(split: str, cache: Path) -> Turns:
    """All turns of the user in one file; features are computed once and kept in `cache`."""
    rows = rows_of(split, UnitOptions())
    kept, pairs = [], []
    for i, row in enumerate(rows):
        if row["speaker"] == "U" and row["service"] in SERVICES:
            before = rows[i - 1] if i else row
            answered = before["dialogue"] == row["dialogue"] and before["speaker"] == "S"
            kept.append(row)
            pairs.append((before["utterance"] if answered else "", row["utterance"]))
    file = cache / f"{split}.safetensors"
    if not file.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        user, system = (encode([pair[side] for pair in pairs]) for side in (1, 0))
        save_file({"features": torch.cat([user, system], 1).half()}, file)
    features = load_file(file)["features"].float()
    return Turns(
        features * SCALE,
        [SERVICES.index(row["service"]) for row in kept],
        [f"{split}:{row['dialogue']}" for row in kept],
        ["|".join(pair).lower() for pair in pairs],
    )


def held_out(data: Turns) -> tuple[Turns, Turns]:
    """The training turns without some conversations, and the turns of those."""
    names = sorted(set(data.conversations))
    out = set(random.Random(0).sample(names, HELD_OUT))
    inside = [i for i, name in enumerate(data.conversations) if name not in out]
    outside = [i for i, name in enumerate(data.conversations) if name in out]
    return data.part(inside), data.part(outside)


def dev_sample(data: Turns, training: Turns) -> Turns:
    """A random part of the dev turns whose text is not in the training file, and whose service is."""
    texts, services = set(training.texts), set(training.labels)
    fresh = [i for i, text in enumerate(data.texts) if text not in texts and data.labels[i] in services]
    return data.part(sorted(random.Random(0).sample(fresh, min(DEV, len(fresh)))))


# ---- runs


def losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


def collate(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    features = torch.stack([record["features"] for record in records])
    return {"features": features, "labels": torch.tensor([record["labels"] for record in records])}


def run(setting: Setting, rate: float, seed: int, training: Turns, evaluation: Turns) -> dict[str, float]:
    """Train once; the accuracy on other turns in percent, and what was spent."""
    start = time.process_time()
    model = Classifier(training.features.shape[1])
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=ROWS, learning_rate=rate, warmup_steps=10,
            lr_scheduler_type="linear", save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
            seed=seed, dataloader_pin_memory=False, remove_unused_columns=False, use_cpu=True,
        )  # fmt: skip
        config = setting.config(training)
        trainer = DPTrainer(
            model, args, dp_config=config, train_dataset=training, data_collator=collate, per_sample_loss=losses
        )
        trainer.train()
        spent = trainer.privacy_spent().epsilon
        sigma = trainer.privacy_record()["runs"][-1]["noise_multiplier"]
    with torch.no_grad():
        right = model(evaluation.features).argmax(1) == torch.tensor(evaluation.labels)
    return {
        "accuracy": 100 * right.float().mean().item(),
        "epsilon": None if math.isinf(spent) else spent,
        "noise_multiplier": sigma,
        "expected_batch_size": config.expected_batch_size,
        "seconds": time.process_time() - start,
    }
