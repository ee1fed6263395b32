"""LAMB (You et al. 2020), and how to bring your own optimizer: Trainer's `optimizers`, as without privacy.

An optimizer reads gradients that have their noise, so whatever it does is post-processing and costs no privacy. LAMB
takes Adam's step and scales it, tensor by tensor, to the norm of the weights.

    python recipes/lamb.py                                             # a tiny model on made-up records, in seconds
"""

import argparse
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
from powersgd import made_up_records
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from hf_private.config import DPConfig
from hf_private.trainer.trainer import DPTrainer


class Lamb(torch.optim.Optimizer):
    """Adam's step u + weight_decay * w, times lr * |w| / |u + weight_decay * w| for each tensor w that is not zero."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 - first)
                state["square"].lerp_(p.grad**2, 1 - second)
                mean = state["mean"] / (1 - first ** state["step"])
                square = state["square"] / (1 - second ** state["step"])
                update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * p
                size, length = p.norm(), update.norm()
                trust = torch.where((size > 0) & (length > 0), size / length, 1.0)
                p.sub_(group["lr"] * trust * update)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a tiny classifier with LAMB.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=0.01)
    options = parser.parse_args(argv)
    config = BertConfig(
        vocab_size=4, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        trainer = DPTrainer(
            model,
            TrainingArguments(
                folder, max_steps=options.steps, per_device_train_batch_size=64, logging_steps=10, save_strategy="no",
                report_to=[], disable_tqdm=True,
            ),
            dp_config=DPConfig(noise_multiplier=1.0, expected_batch_size=256),
            train_dataset=made_up_records(2048),
            optimizers=(Lamb(model.parameters(), lr=options.learning_rate), None),
        )  # fmt: skip
        trainer.train()
        print(trainer.privacy_spent())


if __name__ == "__main__":
    main()
