"""Private TRL trainers on tiny models, and the update that a for-loop of a record's own objective gives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_private.config import DPConfig
from tests.support import chats, oracle, zoo

SGD = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_steps": 1}


def model(name: str = "llama") -> Any:
    """A language model in float64 without dropout."""
    return zoo.small(name).double()


def arguments(kind: type, folder: Path, **settings: Any) -> Any:
    defaults = {
        "max_steps": 2,
        "per_device_train_batch_size": 5,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "dataloader_pin_memory": False,
    }
    return kind(str(folder), **{**defaults, **settings})


def trainer(
    cls: type, folder: Path, records: Any, model: nn.Module, dp: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """`settings` are arguments of the trainer if they are named here, else of its config."""
    own = ("ref_model", "peft_config", "eval_dataset", "data_collator", "per_sample_loss", "callbacks")
    given = {name: settings.pop(name) for name in own if name in settings}
    return cls(
        model=model,
        args=arguments(cls.arguments_class, folder, **settings),
        train_dataset=records,
        processing_class=chats.tokenizer(),
        dp_config=DPConfig(**{"noise_multiplier": 1.0, "accountant": "rdp", **(dp or {})}),
        **given,
    )


def assert_update_of_a_loop(made: Any, objective: Callable[[dict[str, Any]], Tensor]) -> None:
    """One step of SGD on all records without noise gives W - (sum of clipped gradients) / B.

    `made` has the settings `SGD`, no noise, and all records in its batch. Half of them are clipped: a wrong factor of
    a gradient would not show if all were.
    """
    records = list(made.train_dataset)
    gradients = [oracle.gradient(made.model, objective(record)) for record in records]
    norms = oracle.norms(gradients)
    made.dp_config.clip_norm = clip = float(norms.median())
    assert (norms > clip).any() and (norms < clip).any() and clip > 0
    total = oracle.weighted_sum(gradients, (clip / norms).clamp(max=1))
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    made.train()
    moved = 0.0
    for name, p in made.model.named_parameters():
        update = total.get(name, torch.zeros_like(p)) / len(records)
        torch.testing.assert_close(before[name] - p.detach(), update, rtol=1e-6, atol=1e-6 * clip / len(records))
        moved += float(update.norm())
    assert moved > 0


def all_records(records: Any, clip_norm: float = 1.0) -> dict[str, Any]:
    return {"noise_multiplier": 0.0, "clip_norm": clip_norm, "expected_batch_size": len(records)}


def answer_nll(model: nn.Module, ids: list[int], labels: list[int]) -> Tensor:
    """- log p (T,) of the tokens that `labels` names, by plain torch on one sequence alone."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    wanted = torch.tensor(labels[1:])
    logp = logits.log_softmax(-1)[torch.arange(len(wanted)), wanted.clamp(min=0)]
    return -logp[wanted != -100]
