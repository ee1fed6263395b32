"""Wall time of one epoch of DPTrainer, by method, and of the stock Trainer, with the same model, data and precision.

    HF_PRIVATE_DATA=path/to/data python recipes/epoch_time.py --config recipes/configs/sst2_minilm.yaml
    python recipes/epoch_time.py --config recipes/configs/sst2_minilm.yaml --methods rgp --max_steps 5   # short

The time includes sampling, noise, ledger, optimizer and logging. It excludes loading, tokenizing, and what happens
once: the self-check and the calibration of the noise. The stock Trainer uses random batches, or batches of similar
lengths, with the same micro-batch size, and accumulates gradients to about the same number of optimizer steps. The
trainers take turns, `--repeats` times; the best time counts. Writes <results>.json and <results>.md.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path

import torch
from glue import GlueOptions, load_data, load_model
from options import parse
from training import RecipeTrainer
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback

RESULTS = Path(__file__).parent / "results" / "epoch_time"
STOCK = {"stock": "random", "stock, sorted": "group_by_length"}  # batches of the stock Trainer


class Stopwatch(TrainerCallback):
    """Time from the beginning of the first step to the end of the last."""

    start: float | None = None
    seconds = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.start = time.perf_counter() if self.start is None else self.start

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds = time.perf_counter() - self.start


def epoch(method: str, argv: list[str]) -> tuple[float, int, int]:
    """Seconds of one run, its (expected) number of records, and the size of the data; STOCK is the stock Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--num_train_epochs", "1", "--output_dir", folder, "--save_strategy", "no", "--disable_tqdm", "true"]
        asked = ["--method", "np" if method in STOCK else method]
        options, dp_config, args = parse(GlueOptions, __doc__, [*fixed, *asked, *argv])
        model, tokenizer = load_model(options, args.seed)
        train_set, _ = load_data(options, tokenizer)
        watch = Stopwatch()
        common = {"data_collator": DataCollatorWithPadding(tokenizer), "callbacks": [watch]}
        if method in STOCK:
            args.train_sampling_strategy = STOCK[method]
            rows = args.per_device_train_batch_size
            args.gradient_accumulation_steps = round(dp_config.expected_batch_size / rows)
            trainer = Trainer(model, args, train_dataset=train_set, **common)
        else:
            trainer = RecipeTrainer(model, args, dp_config=dp_config, train_dataset=train_set, **common)
        trainer.train()
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        batch = batch if method in STOCK else dp_config.expected_batch_size
        return watch.seconds, trainer.state.global_step * batch, len(train_set)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["bk", "lora", "rgp", "lsg"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = sys.argv[1:] if argv is None else argv
    own, rest = parser.parse_known_args(given)
    times: dict[str, list[float]] = {}
    for _ in range(own.repeats):
        for method in (*STOCK, *own.methods):
            seconds, records, size = epoch(method, rest)
            times.setdefault(method, []).append(1000 * seconds / records)
            print(f"{method}: {seconds:.1f} s, {records:,} records")
    best = {method: min(values) for method, values in times.items()}
    lines = [
        "# Wall time of training: DPTrainer and Trainer", "",
        f"Best of {own.repeats}, {torch.get_num_threads()} threads, {records:,} records; minutes per epoch at that",
        "rate. Speed: records per second relative to the stock Trainer, whose batches are random and padded to their",
        "longest record. DPTrainer sorts a logical batch by length before it splits it into micro-batches; `stock,",
        "sorted` has batches of similar lengths too (`train_sampling_strategy='group_by_length'`).", "",
        f"`python recipes/epoch_time.py {shlex.join(given)}`", "",
        f"| trainer | seconds per 1000 records | minutes per epoch of {size:,} | speed |", "| --- | --- | --- | --- |",
        *(
            f"| {method} | {seconds:.3f} | {seconds * size / 60_000:.1f} | {best['stock'] / seconds:.2f} |"
            for method, seconds in best.items()
        ),
    ]  # fmt: skip
    own.results.parent.mkdir(parents=True, exist_ok=True)
    own.results.with_suffix(".json").write_text(
        json.dumps({"seconds_per_1000_records": times, "settings": given}, indent=2)
    )
    own.results.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
