"""Records, collator and trainers for the tests that train a tiny model of the zoo."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from hf_private.config import DPConfig
from hf_private.gradients.tensors import unsharded
from hf_private.spending.ledger import PrivacyLedger
from hf_private.trainer.trainer import DPTrainer
from tests.support import zoo

RECORDS = 40
KEY = bytes(range(32))
SGD = {"optim": "sgd", "learning_rate": 0.5}
FIELDS = {field.name for field in fields(TrainingArguments)}


# ---- records


class Padding:
    """Pads `input_ids` (and token labels) on the right; a record's own length is kept in the mask."""

    def __call__(self, records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(record["input_ids"]) for record in records)
        fill = {"input_ids": 0, "labels": -100}
        batch = {
            "attention_mask": [[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in records]
        }
        for name, value in fill.items():
            rows = [record[name] for record in records]
            batch[name] = [r + [value] * (longest - len(r)) for r in rows] if isinstance(rows[0], list) else rows
        return {name: torch.tensor(rows) for name, rows in batch.items()}


def text(kind: str = "class", records: int = RECORDS, seed: int = 0) -> list[dict[str, Any]]:
    """Records of 3 to 9 tokens; labels for classification, for each token, or the tokens themselves."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(records):
        length = int(torch.randint(3, 10, (1,), generator=generator))
        ids = torch.randint(5, zoo.VOCABULARY, (length,), generator=generator).tolist()
        labels = {"class": index % 2, "tokens": [token % 3 for token in ids], "itself": list(ids)}[kind]
        made.append({"input_ids": ids, "labels": labels})
    return made


def images(records: int = RECORDS) -> list[dict[str, Any]]:
    generator, size = torch.Generator().manual_seed(0), zoo.IMAGE["image_size"]
    return [{"pixel_values": torch.randn(3, size, size, generator=generator), "labels": i % 2} for i in range(records)]


# ---- trainers


def arguments(folder: str | Path, **settings: Any) -> TrainingArguments:
    defaults = {
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(str(folder), **{**defaults, **settings})


def trainer(
    folder: str | Path,
    model: PreTrainedModel | None = None,
    records: list | None = None,
    dp: dict[str, Any] | None = None,
    key: bytes | None = None,
    args: TrainingArguments | None = None,
    make_args: Callable[..., TrainingArguments] = arguments,
    **settings: Any,
) -> DPTrainer:
    """A DPTrainer on a small BERT, unless told otherwise; `key` repeats the run (and makes it NOT PRIVATE).

    `settings` are fields of TrainingArguments and arguments of DPTrainer.
    """
    of_args = {name: settings.pop(name) for name in [*settings] if name in FIELDS}
    made = DPTrainer(
        model or zoo.small("bert"),
        args or make_args(folder, **of_args),
        dp_config=DPConfig(**{"noise_multiplier": 1.0, "accountant": "rdp", **(dp or {})}),
        train_dataset=text() if records is None else records,
        **{"data_collator": Padding(), **settings},
    )
    made._test_key = key
    return made


class Stop(TrainerCallback):
    """Ends training after some step, as an interruption would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


# ---- what a run leaves


def trained(folder: Path, **settings: Any) -> torch.Tensor:
    made = trainer(folder, key=KEY, **settings)
    made.train()
    return weights(made.model)


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All parameters in one vector; sharded ones are gathered."""
    return torch.cat([unsharded(p.detach()).double().flatten() for p in model.parameters()])


def ledger(folder: Path) -> PrivacyLedger:
    return PrivacyLedger.read(folder / "_dp" / "ledger.jsonl")


def steps(folder: Path) -> int:
    """Number of steps that the ledger charges."""
    return sum(event.steps for event in ledger(folder).events)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
