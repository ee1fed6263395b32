"""Private SFT and synthetic text on SGD's training conversations. Writes recipes/results/language.md.

    python recipes/pretrain_tiny.py ...      # the second command at its top: outputs/gpt2_small
    HF_PRIVATE_DATA=data python recipes/language_table.py --output_dir outputs/language

It runs what is missing: stop it at any time, and the next start continues with the first stage whose result is not
there. The stages are conversations.py, synthesize.py and compare_texts.py, and sft.py (untuned, without privacy,
private), with their configs. The scores compare private text with other text without noise, and are published here
because SGD is public.
"""

import argparse
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import compare_texts
import conversations
import data
import sft
import synthesize
import torch
from datasets import load_from_disk
from options import parse
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint

CONFIGS = Path(__file__).parent / "configs"
RESULTS = Path(__file__).parent / "results" / "language"
SFT = {"untuned": ["--untuned", "true"], "without privacy": ["--nonprivate", "true"], "epsilon 8": []}
QUIET = ["--use_cpu", "true", "--disable_tqdm", "true"]
TEXTS = 20_000  # for the classifier
SHOWN = 2  # synthetic texts of each service
TARGET = 0.85

Found = dict[str, Any]


def resumed(folder: Path) -> list[str]:
    """Arguments that continue a run which SIGTERM has stopped."""
    return ["--resume_from_checkpoint", "True"] if folder.is_dir() and get_last_checkpoint(str(folder)) else []


def fine_tuned(folder: Path, base: str, changes: list[str]) -> Found:
    """Perplexity on conversations of other people, and what the model answers to them."""
    said = StringIO()
    with redirect_stdout(said):
        metrics = sft.main(
            ["--config", str(CONFIGS / "sft_sgd.yaml"), "--model_name_or_path", base, "--output_dir", str(folder),
             "--max_eval_records", "200", "--answers", "6", *QUIET, *resumed(folder), *changes]
        )  # fmt: skip
    lines = [line for line in said.getvalue().splitlines() if line.startswith(("User: ", "Assistant: "))]
    return {"perplexity": metrics["eval_perplexity"], "answers": lines}


def synthesized(folder: Path, base: str) -> Found:
    """Scores of synthetic user turns and of turns of the untuned model, and a few of each."""
    files, model, untuned = folder / "sgd", folder / "turns", folder / "untuned_turns"
    if not (files / "private.jsonl").is_file():
        conversations.main(["--output_dir", str(files)])
    line = [
        "--config", str(CONFIGS / "synthesize_sgd.yaml"), "--model_name_or_path", base, "--output_dir", str(model),
        "--private_file", f"{files}/private.jsonl", "--codes", f"{files}/services.json", *QUIET,
    ]  # fmt: skip
    if not (model / "privacy.json").is_file():
        synthesize.main([*line, "--samples", "0", *resumed(model)])
    if not (model / synthesize.FOLDER).is_dir():
        synthesize.main([*line, "--sample_only", "true"])
    if not untuned.is_dir():
        options, _, args = parse(synthesize.SynthesisOptions, None, line)
        tokenizer = AutoTokenizer.from_pretrained(base)
        listed = synthesize.listed_codes(options)
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        synthesize.samples(plain, tokenizer, listed, options, args.seed).save_to_disk(str(untuned))
    folders = {"synthetic": model / synthesize.FOLDER, "untuned": untuned}
    texts = {name: load_from_disk(str(made)).to_list()[:TEXTS] for name, made in folders.items()}
    private, test = (data.read(files / f"{part}.jsonl") for part in ("private", "test"))
    scores = compare_texts.compare(texts, private, test, label="service")
    return {**scores, **{f"{name}_shown": shown(records) for name, records in texts.items()}}


def shown(records: list[dict[str, str]]) -> list[str]:
    """The first texts of each service."""
    found = []
    for service in conversations.SERVICES:
        of_it = [record["text"] for record in records if record["service"] == service]
        found += [f"{service}: {text}" for text in of_it[:SHOWN]]
    return found


def markdown(found: dict[str, Found]) -> str:
    """The page with the results that are there."""
    parts = [
        "# Language models on private conversations",
        "`HF_PRIVATE_DATA=data python recipes/language_table.py`",
        "The private data are the 12,174 training conversations of SGD; a conversation is the unit of privacy, delta"
        " is 1e-5. The base is a GPT-2 with 5.1 million parameters, pretrained on sentences of SST-2 and on three"
        " quarters of SGD's dev conversations (`pretrain_tiny.py`). It has seen no training conversation, and the"
        " scores are those of the last quarter of the dev file. One seed; settings: `configs/sft_sgd.yaml` and"
        " `configs/synthesize_sgd.yaml`.",
    ]
    runs = {name: found[name] for name in SFT if name in found}
    if runs:
        rows = "\n".join(f"| {name} | {run['perplexity']:.2f} |" for name, run in runs.items())
        parts += [
            "## SFT",
            "Perplexity per token of what the assistant says, in 200 test conversations.",
            f"| | perplexity |\n| --- | --- |\n{rows}",
        ]
        parts += [f"{name}:\n\n" + "\n".join(f"- {said}" for said in run["answers"]) for name, run in runs.items()]
    if "turns" in found:
        turns = found["turns"]
        made, real = turns["synthetic"], turns["private"]
        reached = "reached" if made["share_of_accuracy"] >= TARGET else "not reached"
        columns = {"epsilon 8": made, "untuned": turns["untuned"], "real": real, "test": turns["test"]}
        rows = "\n".join(
            f"| {name.replace('_', ' ')} | "
            + " | ".join(f"{column[name]:.4g}" if name in column else "" for column in columns.values())
            + " |"
            for name in made
        )
        parts += [
            "## Synthetic user turns by service, epsilon 8",
            f"A bag-of-words classifier trained on {made['texts']:,} synthetic turns reaches"
            f" **{made['share_of_accuracy']:.1%}** of the accuracy of one trained on all {real['texts']:,} real ones"
            f" (goal: {TARGET:.0%}, {reached}), on {turns['test']['texts']:,} turns of test conversations. *Untuned*:"
            " turns that the model writes for the same codes before it is trained. The table compares with private"
            " texts without noise; it can be published because SGD is public.",
            f"| | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}\n{rows}",
        ]
        for name in ("synthetic", "untuned"):
            parts += [f"{name}:\n\n" + "\n".join(f"- {text}" for text in turns[f"{name}_shown"])]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/language"))
    parser.add_argument("--model_name_or_path", default="outputs/gpt2_small")
    parser.add_argument("--only", nargs="+", choices=[*SFT, "turns"], help="stages; default: all")
    options = parser.parse_args(argv)
    folder, base, file = options.output_dir, options.model_name_or_path, RESULTS.with_suffix(".json")
    stages: dict[str, Callable[[], Found]] = {"turns": lambda: synthesized(folder, base)}
    for name, changes in SFT.items():
        stages[name] = lambda name=name, changes=changes: fine_tuned(folder / name.replace(" ", "_"), base, changes)
    found: dict[str, Found] = json.loads(file.read_text()) if file.is_file() else {}
    for name in options.only or stages:
        if name not in found:
            found[name] = stages[name]()
            file.write_text(json.dumps(found, indent=2) + "\n")
            RESULTS.with_suffix(".md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
