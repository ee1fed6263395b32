"""Tiny models, records and trainers for the tests of the upper rooms."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from hf_private.config import DPConfig
from hf_private.spending.ledger import PrivacyLedger
from hf_private.trainer.trainer import DPTrainer

RECORDS = 40
VOCABULARY = 60


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
        ids = torch.randint(5, VOCABULARY, (length,), generator=generator).tolist()
        labels = {"class": index % 2, "tokens": [token % 3 for token in ids], "itself": list(ids)}[kind]
        made.append({"input_ids": ids, "labels": labels})
    return made


def images(records: int = RECORDS) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": i % 2} for i in range(records)]


SMALL_BERT = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**{**SMALL_BERT, **changes}))


def token_bert() -> PreTrainedModel:
    torch.manual_seed(0)
    return BertForTokenClassification(BertConfig(**SMALL_BERT, num_labels=3))


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=VOCABULARY, n_positions=16))


def t5() -> PreTrainedModel:
    torch.manual_seed(0)
    config = T5Config(d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=VOCABULARY)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def vit() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(**shape, num_hidden_layers=1, intermediate_size=16))


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
    **settings: Any,
) -> DPTrainer:
    """A DPTrainer on a tiny BERT, unless told otherwise; `key` repeats the run (and makes it NOT PRIVATE)."""
    rest = {name: settings.pop(name) for name in PARTS if name in settings}
    made = DPTrainer(
        model or bert(),
        settings.pop("args", None) or arguments(folder, **settings),
        dp_config=DPConfig(**{"noise_multiplier": 1.0, "accountant": "rdp", **(dp or {})}),
        train_dataset=text() if records is None else records,
        data_collator=rest.pop("data_collator", Padding()),
        **rest,
    )
    made._test_key = key
    return made


PARTS = (
    "data_collator",
    "eval_dataset",
    "callbacks",
    "optimizers",
    "per_sample_loss",
    "compute_metrics",
    "model_init",
    "anchor_dataset",
)


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


# ---- of a run

KEY = bytes(range(32))
SGD = {"optim": "sgd", "learning_rate": 0.5}


def ledger(folder: Path) -> PrivacyLedger:
    return PrivacyLedger.read(folder / "_dp" / "ledger.jsonl")


def steps(folder: Path) -> int:
    return sum(event.steps for event in ledger(folder).events)


def trained(folder: Path, **settings: Any) -> torch.Tensor:
    made = trainer(folder, key=KEY, **settings)
    made.train()
    return weights(made.model)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


class Stop(TrainerCallback):
    """Ends training after some step, as an interruption would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step
