"""Measure costs of privacy other than clipping: sampling, noise, ledger, accounting and logging, as shares of a step.

    HF_PRIVATE_DATA=path/to/data python recipes/overheads.py --config recipes/configs/sst2_minilm.yaml --max_steps 4
    python recipes/overheads.py --config recipes/configs/sst2_minilm.yaml --methods bk --max_steps 4 --noise fast

A profiler measures a run of DPTrainer from the start of its first step to the end of its last. It excludes what
happens once: the self-check and the calibration of the noise. Every step is logged, which is more often than usual.
Writes <results>.json and <results>.md.
"""

import argparse
import cProfile
import inspect
import json
import pstats
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from glue import GlueOptions, load_data, load_model
from options import parse
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from training import RecipeTrainer
from transformers import DataCollatorWithPadding, TrainerCallback, TrainerState

from hf_private import DPTrainer, PrivacyCallback, WeightAverage
from hf_private.mechanism.noise import NoiseSource, reseed_global
from hf_private.mechanism.sampling import PoissonSampler
from hf_private.mechanism.step import Mechanism
from hf_private.methods.carriers.method import Carriers
from hf_private.spending.run import Run
from hf_private.trainer.guards import check_gradients, check_parameters

RESULTS = Path(__file__).parent / "results" / "overheads"
PARTS: dict[str, list[Callable]] = {  # overheads
    "sampling": [PoissonSampler.draw],
    "noise": [NoiseSource.add_, reseed_global],
    "ledger and budget": [Run.charge],
    "logging, with epsilon": [DPTrainer.log, PrivacyCallback.on_step_end],
    "checks at every step": [check_parameters, check_gradients],
}
SHOWN: dict[str, list[Callable]] = {  # other parts of a step
    "carriers from the weights": [Carriers.begin_step],
    "fetching and collating records": [_MapDatasetFetcher.fetch],
    "passes and clipped sums": [Mechanism._clipped_sums],
    "optimizer": [torch.optim.AdamW.step],
    "average of the weights, if asked for": [WeightAverage.on_step_end],
}


class Watch(TrainerCallback):
    """Profiles from the start of the first step to the end of the last."""

    def __init__(self) -> None:
        self.profile = cProfile.Profile()
        self.running = False

    def on_step_begin(self, *_: object, **__: object) -> None:
        if not self.running:
            self.running = True
            self.profile.enable()

    def on_step_end(self, _: object, state: TrainerState, *__: object, **___: object) -> None:
        if state.global_step >= state.max_steps:
            self.profile.disable()


def seconds(stats: dict, functions: list[Callable]) -> float:
    """Seconds spent in functions and in what they call."""
    codes = [inspect.unwrap(function).__code__ for function in functions]
    keys = [(code.co_filename, code.co_firstlineno, code.co_name) for code in codes]
    # calls, primitive calls, own seconds, cumulative seconds, callers
    return sum(stats[key][3] for key in keys if key in stats)


def run(method: str, argv: list[str]) -> dict[str, float]:
    """Seconds per step of one run, by part."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--output_dir", folder, "--save_strategy", "no", "--disable_tqdm", "true", "--logging_steps", "1"]
        options, dp_config, args = parse(GlueOptions, __doc__, [*fixed, "--method", method, *argv])
        model, tokenizer = load_model(options, args.seed)
        train_set, _ = load_data(options, tokenizer)
        watch = Watch()
        common = {"data_collator": DataCollatorWithPadding(tokenizer), "callbacks": [WeightAverage(decay=0.9), watch]}
        trainer = RecipeTrainer(model, args, dp_config=dp_config, train_dataset=train_set, **common)
        trainer.train()
        steps = trainer.state.global_step
    stats = pstats.Stats(watch.profile)
    found = {part: seconds(stats.stats, functions) / steps for part, functions in (PARTS | SHOWN).items()}
    missing = [part for part in PARTS if not found[part]]
    if missing:
        raise RuntimeError(f"The profile must show every part of a step, got nothing for {missing}.")
    return found | {"step": stats.total_tt / steps}


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [
        "# Overheads of a private step", "",
        "Milliseconds per logical step, and shares of it.", "",
        f"| part | {' | '.join(rows)} |", f"|---|{'---|' * len(rows)}",
    ]  # fmt: skip

    def line(name: str, values: list[tuple[float, float]]) -> str:
        return f"| {name} | " + " | ".join(f"{1000 * t:,.1f} ms ({t / step:.2%})" for t, step in values) + " |"

    for part in PARTS:
        lines.append(line(part, [(row[part], row["step"]) for row in rows.values()]))
    total = [(sum(row[part] for part in PARTS), row["step"]) for row in rows.values()]
    lines.append(line("**all overheads**", total))
    for part in (*SHOWN, "step"):
        lines.append(line(part, [(row[part], row["step"]) for row in rows.values()]))
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["bk", "rgp"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = sys.argv[1:] if argv is None else argv
    own, rest = parser.parse_known_args(given)
    torch.set_num_threads(1)
    rows = {method: run(method, rest) for method in own.methods}
    own.results.parent.mkdir(parents=True, exist_ok=True)
    own.results.with_suffix(".json").write_text(
        json.dumps({"seconds_per_step": rows, "settings": given}, indent=2) + "\n"
    )
    text = table(rows) + f"\n`python recipes/overheads.py {shlex.join(given)}`\n"
    own.results.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
