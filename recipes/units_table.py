"""Accuracy at a fixed epsilon, per turn and per conversation, by both samplings.

Stop it at any time; the next start continues. Writes recipes/results/units.json, .md and .png. Takes about 20 minutes
on one CPU thread, a third of them for the features.

    HF_PRIVATE_DATA=data python recipes/units_table.py                       # runs what is missing
    HF_PRIVATE_DATA=data python recipes/units_table.py --minutes 10          # and stops after about 10 minutes
    HF_PRIVATE_DATA=data python recipes/units_table.py --dry_run             # lists what is missing

The task is that of units.py: the service that a user's turn is about. MiniLM is frozen and public, so its means over
the tokens of a turn are computed once; DPTrainer trains the classifier on top. The input of a record is the user's
turn and the system's turn before it.

Every setting draws the same share q of what it draws (turns or conversations) in each of the same number of steps,
and gets the same search: learning rates once each, with the noise of its own budget, three at first and further ones
while the best is at an end; trained without 1,500 conversations of the training file, and scored on their turns. The
dev file is used once for each cell of the table: a random sample of its turns, without those whose text is in the
training file.
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
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0)
FIRST_RATES = slice(1, 4)  # the search begins with these
EPSILONS = (8.0, 3.0)
KS = (1, 4, 8)
SEEDS = (0, 1)
STEPS, SHARE, DELTA, CLIP_NORM = 60, 1 / 12, 5e-6, 1.0
HELD_OUT, DEV = 1500, 10_000  # conversations; turns
ROWS = 1024  # of a micro-batch: speed only
SCALE = 4.0  # of the features; the gradients of most turns are then longer than the clip norm

# Written by hand, for the results that are there.
READING = """
**Drawing conversations (`units`) wins** at k = 4 and 8 for both budgets, by 0.7 to 1.7 points, with the same expected
number of turns in a step. At k = 1 both are the same mechanism (one random turn of a conversation, drawn with the same
probability) and score the same: 79.5 and 80.0, 78.2 and 78.3. A larger k helps `units` more (2.4 points from 1 to 8 at
epsilon 8, 2.7 at epsilon 3), because it costs no privacy; the noise multiplier of `records` grows from 0.79 to 3.48.
At k = 8, privacy per conversation instead of per turn costs 0.7 points at epsilon 8 and 1.5 at 3.

Weak points: two runs for each line; the standard error of an accuracy on 10,000 turns is 0.4 points, but all lines
share these turns. Only the classifier is trained. The best learning rate is inside the grid in every line.
"""


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


def run(
    setting: Setting, rate: float, seed: int, training: Turns, evaluation: Turns, final: bool = True
) -> dict[str, Any]:
    """Train once; the accuracy on other turns in percent, and what was spent, for a run of the table."""
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
        spent = trainer.privacy_spent().epsilon if final else None
        sigma = trainer.privacy_record()["runs"][-1]["noise_multiplier"]
    with torch.no_grad():
        right = model(evaluation.features).argmax(1) == torch.tensor(evaluation.labels)
    return {
        "accuracy": 100 * right.float().mean().item(),
        "epsilon": None if spent is None or math.isinf(spent) else spent,
        "noise_multiplier": sigma,
        "expected_batch_size": config.expected_batch_size,
        "seconds": time.process_time() - start,
    }


# ---- the table


class Table:
    """Runs that are done, by name, in <results>.json."""

    def __init__(self) -> None:
        self.file = RESULTS.with_suffix(".json")
        content = json.loads(self.file.read_text()) if self.file.is_file() else {}
        self.runs: dict[str, dict[str, Any]] = content.get("runs", {})

    @staticmethod
    def name(setting: Setting, rate: float, seed: int | None) -> str:
        part = "search" if seed is None else f"seed {seed}"
        return f"{setting.name}; epsilon {setting.epsilon}; {part}; rate {rate:g}"

    def searched(self, setting: Setting) -> dict[float, float]:
        """Accuracy on held-out conversations by learning rate, as far as it is known."""
        found = {rate: self.runs.get(self.name(setting, rate, None)) for rate in RATES}
        return {rate: one["accuracy"] for rate, one in found.items() if one is not None}

    def best(self, setting: Setting) -> float:
        found = self.searched(setting)
        return max(found, key=lambda rate: found[rate])

    def missing(self) -> list[tuple[Setting, float, int | None]]:
        """The search first; a run of the table takes the rate that was best in it."""
        search = [(one, rate, None) for one in settings() for rate in self.rates(one)]
        if found := [run for run in search if self.name(*run) not in self.runs]:
            return found
        table = [(one, self.best(one), seed) for seed in SEEDS for one in settings()]
        return [run for run in table if self.name(*run) not in self.runs]

    def rates(self, setting: Setting) -> list[float]:
        """The rates to try: the first ones, and further ones while the best is at an end."""
        first, last = FIRST_RATES.start, FIRST_RATES.stop
        found = self.searched(setting)
        while all(rate in found for rate in RATES[first:last]):
            best = max(RATES[first:last], key=lambda rate: found[rate])
            if best == RATES[last - 1] and last < len(RATES):
                last += 1
            elif best == RATES[first] and first > 0:
                first -= 1
            else:
                break
        return list(RATES[first:last])

    def scores(self, setting: Setting) -> list[float]:
        if not self.searched(setting):
            return []
        found = [self.runs.get(self.name(setting, self.best(setting), seed)) for seed in SEEDS]
        return [one["accuracy"] for one in found if one is not None]

    def write(self, sizes: dict[str, int]) -> None:
        fixed = {"steps": STEPS, "share": SHARE, "delta": DELTA, "clip_norm": CLIP_NORM, "rates": RATES, **sizes}
        self.file.write_text(json.dumps({"settings": fixed, "runs": self.runs}, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(self.markdown(fixed))
        self.plot(RESULTS.with_suffix(".png"))

    def markdown(self, fixed: dict[str, Any]) -> str:
        lines = [
            "# Accuracy per turn and per conversation", "", "`HF_PRIVATE_DATA=data python recipes/units_table.py`", "",
            f"The service that a user's turn is about (Schema-Guided Dialogue, {fixed['services']} services):"
            f" {fixed['turns']:,} turns of {fixed['conversations']:,} conversations. A linear classifier on frozen"
            f" MiniLM features of the turn and of the system's turn before it. {STEPS} steps of AdamW, each draws"
            f" 1/{round(1 / SHARE)} of the turns or conversations; delta {DELTA:g}; clip norm {CLIP_NORM:g}. Accuracy"
            f" in percent on {fixed['dev']:,} random turns of the dev file whose text is not in the training file:"
            " mean and standard deviation of two runs. `k` is `records_per_unit`.", "",
            "| privacy per | drawn | k | epsilon | accuracy | noise multiplier | expected batch | learning rate |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]  # fmt: skip
        for one in settings():
            scores, dp = self.scores(one), dict(one.dp)
            if not scores:
                continue
            first = self.runs[self.name(one, self.best(one), SEEDS[0])]
            spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
            unit = "-" if one.epsilon is None else "conversation" if dp else "turn"
            epsilon = "not private" if one.epsilon is None else f"{one.epsilon:g}"
            drawn = dp.get("unit_sampling", "records")
            drawn = {"units": "conversations (`units`)", "records": "turns (`records`)" if dp else "turns"}[drawn]
            lines.append(
                f"| {unit} | {drawn} | {dp.get('records_per_unit', '-')} | {epsilon} |"
                f" {statistics.mean(scores):.1f}{spread} | {first['noise_multiplier']:.2f} |"
                f" {first['expected_batch_size']:,} | {self.best(one):g} |"
            )
        lines += ["", READING.strip()]
        lines += ["", "Learning rates tried (accuracy on held-out training conversations):", ""]
        for one in settings():
            tried = ", ".join(f"{rate:g}: {score:.1f}" for rate, score in self.searched(one).items())
            lines.append(f"- {one.name}{'' if one.epsilon is None else f', epsilon {one.epsilon:g}'}: {tried}")
        return "\n".join(lines) + "\n"

    def plot(self, path: Path) -> None:
        """Accuracy over k, a panel for each epsilon."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3.6))
        panels = figure.subplots(1, len(EPSILONS), sharey=True)
        for axes, epsilon in zip(panels, EPSILONS, strict=True):
            for one, style in zip(
                settings()[:1] + [s for s in settings() if s.name == "per turn"], ":--", strict=False
            ):
                if one.epsilon in (None, epsilon) and (scores := self.scores(one)):
                    axes.axhline(statistics.mean(scores), color="gray", linestyle=style, label=one.name)
            for sampling in ("units", "records"):
                lines = [s for s in settings() if s.epsilon == epsilon and dict(s.dp).get("unit_sampling") == sampling]
                points = [(dict(s.dp)["records_per_unit"], self.scores(s)) for s in lines if self.scores(s)]
                if points:
                    means = [statistics.mean(scores) for _, scores in points]
                    bars = [statistics.stdev(scores) if len(scores) > 1 else 0 for _, scores in points]
                    label = f'per conversation, unit_sampling="{sampling}"'
                    axes.errorbar([k for k, _ in points], means, bars, marker="o", capsize=3, label=label)
            axes.set(title=f"epsilon {epsilon:g}", xlabel="k = records_per_unit", xticks=KS)
        panels[0].set_ylabel("accuracy in percent")
        panels[0].legend(fontsize="x-small")
        figure.tight_layout()
        figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many minutes")
    parser.add_argument("--cache", type=Path, default=Path("outputs/units_table"), help="folder of the features")
    parser.add_argument("--dry_run", action="store_true", help="only list what is missing")
    options = parser.parse_args(argv)
    table = Table()
    if options.dry_run:
        print(*(table.name(*run) for run in table.missing()), sep="\n")
        return
    start, training = time.perf_counter(), turns("train", options.cache)
    dev = dev_sample(turns("dev", options.cache), training)
    without, outside = held_out(training)
    sizes = {"turns": len(training), "conversations": len(set(training.conversations)), "dev": len(dev)}
    sizes["services"] = len(set(training.labels))
    while (missing := table.missing()) and time.perf_counter() - start <= 60 * options.minutes:
        setting, rate, seed = missing[0]
        if seed is None:
            found = run(setting, rate, 0, without, outside, final=False)
        else:
            found = run(setting, rate, seed, training, dev)
        table.runs[table.name(setting, rate, seed)] = found
        table.write(sizes)
        print(f"{table.name(setting, rate, seed)}: {found}", flush=True)


if __name__ == "__main__":
    main()
