"""Follow what `hf-private plan` advises: run the code that it prints, on the first records of SST-2.

    HF_PRIVATE_DATA=path/to/data python recipes/advice.py
    HF_PRIVATE_DATA=path/to/data python recipes/advice.py --holdout 2000 --follow "LoRA r=4" "head only"

Nothing is tuned: method, batch size, steps, noise and learning rate are the plan's. Without `--follow` the runs are
of what the plan recommends; otherwise of the named rows of its table, to compare the measured order with the
predicted one. `defaults` is what one writes without a plan: all weights, batches of 512, three epochs, Trainer's
learning rate. Runs can be stopped: the same command goes on. Writes recipes/results/advice.{json,md}.

The rules of the plan must not be fitted to the dev set. With `--holdout` the score is that on other training records.
"""

import argparse
import contextlib
import io
import json
import statistics
import time
from pathlib import Path
from typing import Any

from data import model_path
from glue import GlueOptions, load_data
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from transformers.trainer_utils import get_last_checkpoint

from hf_private.cli.main import main as hf_private

RESULTS = Path(__file__).parent / "results"
DEFAULTS = """\
from transformers import TrainingArguments

from hf_private import DPConfig, DPTrainer

dp_config = DPConfig(target_epsilon={epsilon:g}, target_delta={delta:g}, expected_batch_size=512)
args = TrainingArguments(output_dir="private_model", num_train_epochs=3, per_device_train_batch_size=32)
trainer = DPTrainer(model, args, dp_config=dp_config, train_dataset=train_dataset, processing_class=tokenizer)
"""


def plan(n: int, epsilon: float, model: str, hours: float | None, length: int) -> dict[str, Any]:
    """What `hf-private plan --json` prints."""
    command = ["plan", "--n", n, "--epsilon", epsilon, "--model", model, "--task", "sequence-classification"]
    command += ["--length", length, "--micro-batch", 32, "--json", *(["--hours", hours] if hours else [])]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if hf_private([str(word) for word in command]):
            raise SystemExit("hf-private plan failed")
    return json.loads(printed.getvalue())


def follow(code: str, folder: Path, options: GlueOptions, seed: int) -> dict[str, Any]:
    """Run the code in `folder`, from its last checkpoint on, and score the model on the dev set.

    Args:
        seed: for what is random without privacy, such as the new head. Noise and sampling have secret keys.
    """
    path = model_path(options.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    train_set, dev_sets = load_data(options, tokenizer)
    set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        path,
        num_labels=2,
        attn_implementation="eager",  # a third faster on a CPU with short inputs
    )
    names: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "train_dataset": train_set}
    settings, trainer = code.split("\ntrainer = ")
    exec(settings, names)
    args = names["args"]  # only where things are written changes
    args.output_dir, args.save_steps, args.save_total_limit = str(folder), max(20, args.max_steps // 4), 1
    args.logging_steps, args.report_to = 20, []
    exec(f"trainer = {trainer}", names)
    trainer, start = names["trainer"], time.process_time()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.is_dir() else None)
    seconds = time.process_time() - start
    guessed = trainer.predict(dev_sets[""])
    report = trainer.privacy_spent()
    return {
        "accuracy": float((guessed.predictions.argmax(-1) == guessed.label_ids).mean()),
        "records": len(guessed.label_ids),
        "epsilon": report.epsilon,
        "delta": report.delta,
        "steps": trainer.state.global_step,
        "learning_rate": args.learning_rate,
        "batch": trainer.dp_config.expected_batch_size,
        "cpu_minutes": round(seconds / 60, 1),
    }


def table(advice: dict[str, Any], runs: dict[str, list[dict[str, Any]]], command: str, holdout: int) -> str:
    """The report: the runs of each row of the plan's table beside what the plan said about it."""
    usefulness = {name_of(row): (row["usefulness"], row["noise_to_signal"]) for row in advice["plans"]}
    lines = []
    for name, scores in sorted(runs.items(), key=lambda run: -mean_accuracy(run[1])):
        said = "{:.2f} | {:.2f}".format(*usefulness[name]) if name in usefulness else "- | -"
        one = scores[0]
        found = f"{mean_accuracy(scores):.1%}"
        if len(scores) > 1:
            found += f" ± {100 * statistics.stdev(score['accuracy'] for score in scores):.1f}"
        minutes = statistics.mean(score["cpu_minutes"] for score in scores)
        lines.append(
            f"| {name} | {said} | {one['batch']} | {one['steps']} | {one['learning_rate']:g} | {one['epsilon']:.2f} |"
            f" {found} | {len(scores)} | {minutes:.1f} |"
        )
    rows = "\n".join(lines)
    records = next(iter(runs.values()))[0]["records"]
    scored = f"{records:,} other training records" if holdout else f"the {records} dev records"
    error = 100 * (0.8 * 0.2 / records) ** 0.5
    return (
        "# What `hf-private plan` advises, tried\n\n"
        f"MiniLM-L6 with a new head on {'' if holdout else 'the first '}{advice['n']:,} records of SST-2, epsilon"
        f" {advice['epsilon']:g} at delta {advice['delta']:g}; accuracy on {scored} (standard error of a run about"
        f" {error:.1f} points): mean and standard deviation over seeds."
        f" The code is what the plan prints, run as it is; it recommends {name_of(advice['plans'][0])}. `defaults` is"
        " without a plan: all weights, batches of 512, three epochs, Trainer's learning rate.\n\n"
        f"`{command}`\n\n"
        "| method | predicted usefulness | noise / signal | batch | steps | learning rate | epsilon | accuracy |"
        " seeds | CPU minutes |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        f"{rows}\n\nCPU minutes are those of the last process, if a run was stopped and continued.\n"
    )


def mean_accuracy(scores: list[dict[str, Any]]) -> float:
    return statistics.mean(score["accuracy"] for score in scores)


def name_of(row: dict[str, Any]) -> str:
    return f"{row['method']} r={row['rank']}" if row["rank"] else row["method"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=5000)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--hours", type=float)
    parser.add_argument("--length", type=int, default=16, help="tokens of a record: SST-2 has 13 on average")
    parser.add_argument("--follow", nargs="+", help="rows of the plan's table, or `defaults` (default: the advice)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row")
    parser.add_argument("--holdout", type=int, default=0, help="score on so many other training records, not on dev")
    parser.add_argument("--folder", type=Path, default=Path("outputs/advice"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    options = GlueOptions(task="sst2", max_train_records=args.n, holdout=args.holdout)
    args.folder.mkdir(parents=True, exist_ok=True)
    kept = args.folder / "plan.json"
    if not kept.is_file():  # hours are measured, so that a later plan may differ
        advice = plan(args.n, args.epsilon, model_path(options.model_name_or_path), args.hours, args.length)
        kept.write_text(json.dumps({**advice, "model": "MiniLM-L6"}, indent=2) + "\n")
    advice = json.loads(kept.read_text())
    codes = {name_of(row): row["code"] for row in advice["plans"]}
    codes["defaults"] = DEFAULTS.format(epsilon=advice["epsilon"], delta=advice["delta"])
    command = "python recipes/advice.py" + (f" --hours {args.hours:g}" if args.hours else "")
    command += f" --holdout {args.holdout}" if args.holdout else ""

    def place(name: str, seed: int) -> Path:
        return args.folder / name.replace(" ", "_") / f"seed{seed}"

    for name in args.follow or [name_of(advice["plans"][0])]:
        if name not in codes:
            parser.error(f"argument --follow: must be one of {', '.join(codes)}, got {name}")
        for seed in range(args.seeds):
            path = place(name, seed) / "score.json"
            if not path.is_file():
                score = follow(codes[name], path.parent, options, seed)
                path.write_text(json.dumps(score, indent=2) + "\n")
                print(name, score, flush=True)
    files = {name: [place(name, seed) / "score.json" for seed in range(args.seeds)] for name in codes}
    runs = {name: [json.loads(path.read_text()) for path in paths if path.is_file()] for name, paths in files.items()}
    runs = {name: scores for name, scores in runs.items() if scores}
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "advice.json").write_text(json.dumps({"plan": advice, "runs": runs}, indent=2) + "\n")
    (args.output / "advice.md").write_text(table(advice, runs, command, args.holdout))


if __name__ == "__main__":
    main()
