"""Shared parts of the recipes: applying a method to a model, training, and saving the results."""

import json
import math
import re
import time
from pathlib import Path
from typing import Any

from options import RecipeOptions
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel, set_seed

from hf_private import DPTrainer
from hf_private.gradients.method import Method


class RecipeTrainer(DPTrainer):
    """DPTrainer with DP-PowerSGD, the example of a new method."""

    power_sgd_rank: int | None = None
    steps_run = 0  # by this process, without those before a resume

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.steps_run += 1
        return super().training_step(*args, **kwargs)

    def create_method(self) -> Method:
        if self.power_sgd_rank is None:
            return super().create_method()
        from powersgd import PowerSGD

        return PowerSGD(self.power_sgd_rank)


def with_method(model: PreTrainedModel, options: RecipeOptions, **lora: Any) -> PreTrainedModel:
    """Freeze what `frozen_modules` matches, and add adapters for LoRA.

    `lora`: fields of LoraConfig that depend on the model, `task_type` or `modules_to_save`.
    """
    frozen = options.frozen_modules
    if frozen is not None:
        matched = [p for name, p in model.named_parameters() if re.fullmatch(frozen, name)]
        if not matched:
            raise ValueError(f"`frozen_modules` must match names of parameters, got {frozen!r}, which matches none.")
        for parameter in matched:
            parameter.requires_grad_(False)
    if options.method != "lora":
        return model
    set_seed(0)  # equal adapters on every rank
    settings = {"r": options.rank, "lora_alpha": 2 * options.rank, "target_modules": "all-linear", **lora}
    settings["exclude_modules"] = frozen
    whole = [*settings.pop("modules_to_save", []), *(options.modules_to_save or [])]
    return get_peft_model(model, LoraConfig(**settings, modules_to_save=whole or None))


def train(trainer: RecipeTrainer, options: RecipeOptions) -> dict[str, float]:
    """Train, from a checkpoint if `--resume_from_checkpoint` names one (True: the last).

    Returns `train_seconds`, the wall time of this process, and `resumed_at`, the step at which it started.
    """
    if options.method == "powersgd":
        trainer.power_sgd_rank = options.rank
    checkpoint, start = trainer.args.resume_from_checkpoint, time.perf_counter()
    trainer.train(True if checkpoint == "True" else checkpoint)
    return {
        "train_seconds": round(time.perf_counter() - start, 1),
        "resumed_at": trainer.state.global_step - trainer.steps_run,
    }


def finish(trainer: RecipeTrainer, options: RecipeOptions, metrics: dict[str, float], took: dict[str, float]) -> dict:
    """Save the model with its card, and the scores as results.json; print them."""
    trainer.save_model()
    report, args = trainer.privacy_spent(), trainer.args
    metrics = {name: value for name, value in metrics.items() if name.startswith("eval_") and "_per_" not in name}
    results = {
        "method": options.method,
        "nonprivate": options.nonprivate,
        "epsilon": None if math.isinf(report.epsilon) else report.epsilon,
        "delta": report.delta,
        "seed": args.seed,
        "steps": trainer.state.global_step,
        "learning_rate": args.learning_rate,
        **took,
        "metrics": metrics,
        "dp_config": trainer.privacy_record()["settings"],
    }
    if trainer.is_world_process_zero():
        Path(args.output_dir, "results.json").write_text(json.dumps(results, indent=2) + "\n")
        spent = (
            "not private" if results["epsilon"] is None else f"epsilon {report.epsilon:.3f} at delta {report.delta:g}"
        )
        scores = ", ".join(f"{name.removeprefix('eval_')} {value:.4f}" for name, value in metrics.items())
        print(f"{options.method}: {scores}; {spent}; {took['train_seconds']:.0f} s; {args.output_dir}")
    return results
