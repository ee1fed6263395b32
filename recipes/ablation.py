"""Try single additions to a private run, each with the same search, on held-out training records.

    python recipes/ablation.py recipes/configs/ablation_digits.yaml     # offline
    HF_PRIVATE_DATA=path/to/data python recipes/ablation.py recipes/configs/ablation_sst2.yaml

A row of the file changes some settings of the base: fields of TrainingArguments and DPConfig, `frozen` (a regular
expression for parameters), `lora` (fields of LoraConfig), `optimizer` and `method` (classes of recipes/candidates.py
and recipes/preconditioned.py with their arguments), and its `learning_rates` and `seeds`. Frozen layers are computed
once, as in recipes/paired.py.

Runs with the same seed have the same draws and the same noise, so that rows are compared with less noise of their own.
Noise that can be repeated protects nobody: the runs are NOT PRIVATE, and serve only to choose settings on public data.
Averages of weights (`averages`) are scored along the runs of rows with `averaged: true`, at no further run.

A run that is done is not run again; the same command continues.
"""

import argparse
import base64
import hashlib
import json
import re
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import candidates
import numpy as np
import paired
import preconditioned
import torch
import vision
import yaml
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_private import DPConfig, DPTrainer
from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.method import Method

METHODS = {"Shaped": candidates.Shaped, "QuantileClip": preconditioned.QuantileClip}
PRIVATE = tuple(DPConfig.__dataclass_fields__)
COMMON = (  # what all runs of a plan share
    *("task", "frozen_layers", "max_length", "held_out", "train_records", "pooling", "bf16", "delta", "averages"),
)


class Averages(TrainerCallback):
    """Averages of the weights after each step: {"decay": d} is exponential, {"tail": share} that of the last steps."""

    def __init__(self, asked: dict[str, dict[str, float]]) -> None:
        self.asked = asked
        self.found: dict[str, dict[str, Tensor]] = {}
        self.steps: dict[str, int] = {}

    @torch.no_grad()
    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        step = state.global_step + 1
        for name, kind in self.asked.items():
            if "tail" in kind and step <= (1 - kind["tail"]) * state.max_steps:
                continue
            count = self.steps[name] = self.steps.get(name, 0) + 1
            weight = 1 / count if "tail" in kind else (1 - kind["decay"]) / (1 - kind["decay"] ** count)
            average = self.found.setdefault(name, {n: torch.zeros_like(p) for n, p in trainable(model).items()})
            for n, p in trainable(model).items():
                average[n].lerp_(p, weight)


class Trainer(DPTrainer):
    """DPTrainer whose draws and noise follow from the seed, with the ideas of recipes/candidates.py."""

    chosen: dict[str, Any]
    public: list[Any]

    def create_method(self) -> Method:
        asked = self.chosen.get("method")
        if not asked:
            return super().create_method()
        if asked["name"] == "Preconditioned":
            return preconditioned.Preconditioned(self._public_sides(**asked["with"]))
        return METHODS[asked["name"]](**asked["with"])

    def _public_sides(self, **settings: Any) -> dict[str, tuple[preconditioned.Side, preconditioned.Side]]:
        loss, records = self.create_loss(self.model), self.public
        batches = [self._prepare_inputs(self.data_collator(records[i : i + 32])) for i in range(0, len(records), 32)]
        return preconditioned.public_sides(self.model, lambda batch: loss(self.model, batch), batches, **settings)

    def _attach(self, method: Method, sample_rate: float, steps: int) -> None:
        super()._attach(method, sample_rate, steps)
        assert self._mechanism is not None
        stds = self._mechanism._stds()
        std = {block: s / self.expected_batch_size for block, s in stds.items()}
        if isinstance(method, candidates.Shaped):
            method.variance = next(iter(std.values())) ** 2
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if isinstance(optimizer, candidates.NoiseAwareAdam):
            optimizer.noise_std = {p: std[name] for name, p in self._mechanism.parameters.items()}


def cells(plan: dict[str, Any]) -> list[tuple[str, float, int]]:
    """Row, learning rate and seed of all runs: first all rows with the first seed."""
    return [
        (row, float(rate), seed)
        for seed in plan["seeds"]
        for row, changes in plan["rows"].items()
        for rate in (changes or {}).get("learning_rates", plan["learning_rates"])
        if seed in (changes or {}).get("seeds", plan["seeds"])
    ]


def asked(plan: dict[str, Any], row: str, rate: float, seed: int) -> dict[str, Any]:
    """Everything that a run depends on."""
    changes = {k: v for k, v in (plan["rows"][row] or {}).items() if k not in ("learning_rates", "seeds")}
    return (
        {name: plan[name] for name in COMMON if name in plan}
        | plan["settings"]
        | changes
        | {"learning_rate": rate, "seed": seed}
    )


def file_of(plan: dict[str, Any], settings: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    return Path(plan["runs"], f"{name}.json")


class Bench(NamedTuple):
    """A task: how to build its model for a seed, its training set, arguments of DPTrainer, and how to score."""

    build: Callable[[int], PreTrainedModel]
    train: Any
    arguments: dict[str, Any]
    correct: Callable[[PreTrainedModel], np.ndarray]  # for each held-out record, whether it is classified correctly
    public: list[Any]


def sst2(plan: dict[str, Any]) -> Bench:
    """The layers above the frozen ones, whose outputs are computed once."""
    data = paired.corpus(plan, Path(plan["corpus"]))
    return Bench(
        build=lambda seed: paired.build(plan, data.table, seed),
        train=data.parts["train"],
        arguments={"data_collator": paired.collate},
        correct=lambda model: paired.correct(model, data.parts["score"], plan["bf16"]),
        public=data.parts["public"][:256],
    )


def digits(plan: dict[str, Any]) -> Bench:
    """A small ViT from scratch. The held-out part is of the training images; the test images are not used."""
    images, labels = vision.load_arrays("digits", "train", None)
    order = np.random.default_rng(0).permutation(len(images))
    held, rest = order[: plan["held_out"]], order[plan["held_out"] :]
    scored = vision.Images(images[held], labels[held], "digits")
    batch = default_data_collator([scored[i] for i in range(len(scored))])

    def build(seed: int) -> PreTrainedModel:
        set_seed(seed)
        return vision.make_model("vit-tiny", 8, 1, 10)

    @torch.no_grad()
    def correct(model: PreTrainedModel) -> np.ndarray:
        model.eval()
        return (model(pixel_values=batch["pixel_values"]).logits.argmax(-1) == batch["labels"]).numpy()

    arguments = {"data_collator": default_data_collator, "per_sample_loss": vision.class_losses}
    return Bench(build, vision.Images(images[rest], labels[rest], "digits"), arguments, correct, [])


BENCHES = {"sst2": sst2, "digits": digits}


def run(plan: dict[str, Any], settings: dict[str, Any], bench: Bench, where: Path) -> dict[str, Any]:
    """Train and score, also with averaged weights; `right` has a bit for each held-out record."""
    shutil.rmtree(where, ignore_errors=True)
    model = bench.build(settings["seed"])
    for name, p in model.named_parameters():
        if re.fullmatch(settings.get("frozen", "-"), name):
            p.requires_grad_(False)
    if settings.get("lora"):
        set_seed(settings["seed"])
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="SEQ_CLS", **settings["lora"]))
    own = ("frozen", "lora", "optimizer", "method", "averaged", *COMMON)
    private = {name: settings[name] for name in PRIVATE if name in settings}
    training = {n: v for n, v in settings.items() if n not in (*own, *PRIVATE)}
    fixed = {"bf16": plan["bf16"], "use_cpu": True, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    usual = {"per_device_train_batch_size": 32, "logging_steps": 10, "warmup_steps": 10, "lr_scheduler_type": "linear"}
    args = TrainingArguments(str(where), **fixed | usual | training)
    averages = Averages(plan["averages"] if settings.get("averaged") else {})
    optimizer = None
    if settings.get("optimizer"):
        optimizer = candidates.NoiseAwareAdam(
            [p for p in model.parameters() if p.requires_grad], settings["learning_rate"], **settings["optimizer"]
        )
    trainer = Trainer(
        model, args, dp_config=DPConfig(target_delta=plan["delta"], **private), train_dataset=bench.train,
        callbacks=[averages], optimizers=(optimizer, None), **bench.arguments,
    )  # fmt: skip
    trainer.chosen, trainer.public = settings, bench.public
    trainer._test_key = hashlib.sha256(f"ablation {settings['seed']}".encode()).digest()
    start = time.process_time()
    trainer.train()
    seconds = time.process_time() - start
    scored = {"": bench.correct(trainer.model)}
    for name, weights in averages.found.items():
        for n, p in trainable(trainer.model).items():
            p.data.copy_(weights[n])
        scored[name] = bench.correct(trainer.model)
    shutil.rmtree(where, ignore_errors=True)
    return {
        "asked": settings,
        "trained": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "scores": {name: float(right.mean()) for name, right in scored.items()},
        "right": {name: base64.b64encode(np.packbits(right).tobytes()).decode() for name, right in scored.items()},
        "records": len(scored[""]),
        "cpu_minutes": round(seconds / 60, 2),
    }


def markdown(plan: dict[str, Any], path: str, done: dict[tuple[str, float, int], dict[str, Any]]) -> str:
    """Each row at its best learning rate, and its difference to the base at the base's."""
    lines = [f"# {plan['title']}", "", plan["note"].strip(), "", f"`python recipes/ablation.py {path}`", ""]
    lines += [
        "| addition | accuracy, by seed | minus base (standard error over held-out records) | learning rates tried |"
        " numbers trained |",
        "| --- | --- | --- | --- | --- |",
    ]
    seeds = plan["seeds"]
    names = ["", *plan["averages"]]

    def mean(row: str, rate: float, average: str) -> float:
        found = [done[row, rate, s]["scores"][average] for s in seeds if (row, rate, s) in done]
        return statistics.mean(found)

    base = next(iter(plan["rows"]))
    chosen: dict[str, float] = {}
    for row in plan["rows"]:
        rates = sorted({rate for r, rate, _ in done if r == row})
        full = [r for r in rates if all((row, r, s) in done for s in seeds)] or rates
        if full:
            chosen[row] = max(full, key=lambda rate: mean(row, rate, ""))
    for row, rate in chosen.items():
        rates = sorted({rate for r, rate, _ in done if r == row})
        for average in names if (plan["rows"][row] or {}).get("averaged") else [""]:
            found = [done[row, rate, s] for s in seeds if (row, rate, s) in done]
            scores = ", ".join(f"{100 * one['scores'][average]:.2f}" for one in found)
            pairs = []
            for s in seeds:
                if (row, rate, s) in done and (base, chosen[base], s) in done:
                    one, other = done[row, rate, s], done[base, chosen[base], s]
                    pairs.append(
                        paired.difference(
                            {"right": one["right"][average], "records": one["records"]},
                            {"right": other["right"][""], "records": other["records"]},
                        )
                    )
            minus = (
                "" if row == base and not average else ", ".join(f"{100 * d:+.2f} ± {100 * e:.2f}" for d, e in pairs)
            )
            tried = ", ".join(f"{r:g}: {100 * mean(row, r, ''):.2f}" for r in rates) if not average else ""
            title = f"{row}, {average}" if average else row
            lines.append(f"| {title} | {scores} | {minus} | {tried} | {found[0]['trained']:,} |")
    return "\n".join([*lines, "", plan.get("reading", "").strip()]).rstrip() + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file of the rows")
    parser.add_argument("--limit", type=int, help="stop after this many runs")
    parser.add_argument("--rows", nargs="+", help="only these")
    options = parser.parse_args(argv)
    plan = yaml.safe_load(Path(options.config).read_text())
    runs, results = Path(plan["runs"]), Path(plan["results"])
    runs.mkdir(parents=True, exist_ok=True)
    bench, count = None, 0
    known = json.loads(results.with_suffix(".json").read_text()) if results.with_suffix(".json").is_file() else []
    for one in known:
        file = file_of(plan, one["asked"])
        if not file.is_file():
            file.write_text(json.dumps(one))
    done: dict[tuple[str, float, int], dict[str, Any]] = {}
    for row, rate, seed in cells(plan):
        settings = asked(plan, row, rate, seed)
        file = file_of(plan, settings)
        if not file.is_file():
            if count == options.limit or (options.rows and row not in options.rows):
                continue
            count += 1
            bench = bench or BENCHES[plan["task"]](plan)
            result = run(plan, settings, bench, runs / "run")
            print(f"{row} {rate:g} seed {seed}: {result['scores']} {result['cpu_minutes']} CPU minutes", flush=True)
            file.write_text(json.dumps(result))
        done[row, rate, seed] = json.loads(file.read_text())
        results.with_suffix(".json").write_text(json.dumps([*done.values()], indent=1) + "\n")
        results.with_suffix(".md").write_text(markdown(plan, options.config, done))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
