"""DPTrainer on several ranks: the same weights for every method, resumed, with dropout, workers, evaluation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import BertForSequenceClassification, TrainerCallback

from hf_private.distributed.ranks import Ranks
from hf_private.trainer.averaging import WeightAverage
from hf_private.trainer.trainer import DPTrainer
from tests.support import training, zoo
from tests.support.ranks.engine import KEY, RECORDS, lora

PEOPLE = [{**record, "who": f"person {index % 17 % 7}"} for index, record in enumerate(RECORDS)]  # 3 to 8 records each
UNITS = {"unit_column": "who", "records_per_unit": 3, "disjoint_units": True}
CARRIERS = {"r": 2, "target_modules": "all-linear", "exclude_modules": ["pooler"]}
TRAINERS = {
    "bk": {},
    "rgp": {"carriers": CARRIERS},
    "lsg": {"carriers": CARRIERS | {"sparsity": 0.3}},
    "gep": {"anchors": {"k": 1, "num_anchors": 8, "groups": [".*"]}},  # more directions these records do not have
    "lora": {"disjoint_data": True},  # its B is not zero, as if it had been trained before
    "history": {"carriers": CARRIERS | {"source": "history", "warmup_steps": 2, "power_iterations": 2}},
    "average": {},
    "units": UNITS,  # of three rows, which no micro-batch of two holds
    "units-records": UNITS | {"unit_sampling": "records", "expected_batch_size": 6},
}
OTHERS = [{**record, "input_ids": record["input_ids"][::-1]} for record in RECORDS[:6]]
EVALUATED = {"eval_dataset": OTHERS, "eval_strategy": "steps"}
EXTRA = {  # what a method's run is given besides
    "bk": EVALUATED | {"eval_steps": 2},
    "gep": {"anchor_dataset": [{"input_ids": [9, 9, 5 + i, 7 + i, 6, 8], "labels": 0} for i in range(8)]},
    "lora": {"optim": "adamw_torch", "learning_rate": 0.01},
    "history": {"optim": "adamw_torch", "learning_rate": 0.01},
    "average": EVALUATED | {"eval_steps": 2, "callbacks": [WeightAverage(decay=0.8)]},
    "units": {"records": PEOPLE},
    "units-records": {"records": PEOPLE},
}
SETTINGS = {"optim": "sgd", "learning_rate": 0.5, "max_steps": 5, "per_device_train_batch_size": 2}
DP = {"expected_batch_size": 2, "noise_multiplier": 0.7}


class After(TrainerCallback):
    """Calls something at the end of a step."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.action()


def make(folder: Path, dp: dict | None = None, **settings: Any) -> DPTrainer:
    return training.trainer(folder, dp={**DP, **(dp or {})}, **{"key": KEY, **SETTINGS, **settings})


def settings_of(name: str) -> dict[str, Any]:
    """What a method's run is given."""
    return {"dp": TRAINERS[name], **EXTRA.get(name, {}), **({"model": lora()} if name == "lora" else {})}


def trained(folder: Path, resume: bool = False, **settings: Any) -> dict[str, Any]:
    made = make(folder, **settings)
    made.train(resume_from_checkpoint=resume or None)
    return {
        "weights": training.weights(made.model),
        "steps": training.steps(folder),
        "global_step": made.state.global_step,
    }


def stopped(folder: Path, **settings: Any) -> dict[str, Any]:
    """A run that ends after its third step and a checkpoint."""

    def stop() -> None:
        made.control.should_training_stop = True

    made = make(folder, save_strategy="steps", save_steps=3, callbacks=[After(3, stop)], **settings)
    made.train()
    return {"steps": training.steps(folder)}


def trainers(folder: Path, ranks: Ranks) -> dict[str, Any]:
    world = ranks.world_size
    found = {
        name: trained(folder / f"{name}-{world}", **settings_of(name))
        for name in TRAINERS
        if world == 1 or name != "lora"
    }
    if world == 2:  # interrupted here, and finished by another number of ranks
        found["stopped"] = stopped(folder / "resume")
        found["workers"] = trained(folder / "workers", dataloader_num_workers=1)
        found["dropout"] = dropout(folder / "dropout")
        found["best"] = best(folder / "best")
    if world == 3:
        found["resumed"] = trained(folder / "resume", resume=True)
        if (folder / "killed").is_dir():
            found["before"] = {"steps": training.steps(folder / "killed")}
            found["after kill"] = trained(folder / "killed", resume=True)
    return found


def dropout(folder: Path) -> dict[str, Any]:
    """Masks come from each rank's own operating system; the weights stay the same."""
    found = trained(folder, key=None, model=zoo.small("bert", hidden_dropout_prob=0.5), max_steps=3)
    return found | {"random": torch.rand(4)}


def best(folder: Path) -> dict[str, Any]:
    """The best checkpoint is loaded at the end, and saved by `save_model` on all ranks, with its card."""
    settings = EVALUATED | {"eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    made = make(folder, key=None, load_best_model_at_end=True, **settings)
    made.train()
    made.save_model(folder / "saved")
    made.accelerator.wait_for_everyone()
    return {
        "weights": training.weights(made.model),
        "saved": training.weights(BertForSequenceClassification.from_pretrained(folder / "saved")),
        "best": training.weights(BertForSequenceClassification.from_pretrained(made.state.best_model_checkpoint)),
        "card": (folder / "saved" / "README.md").read_text(),
    }
