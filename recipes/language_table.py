"""Private SFT and synthetic text on SGD's private half: runs what is missing, and writes recipes/results/language.md.

    python recipes/pretrain_tiny.py ...      # the second command at its top: outputs/gpt2_small
    HF_PRIVATE_DATA=data python recipes/language_table.py --output_dir outputs/language

Stop it at any time; the next start continues with the first stage whose result is not there. The stages are sft.py
(untuned, without privacy, private) and conversations.py, synthesize.py and compare_texts.py, with their configs. The
scores compare private text with other text without noise, and are published here because SGD is public.
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
import sft
import synthesize
from datasets import load_from_disk

CONFIGS = Path(__file__).parent / "configs"
RESULTS = Path(__file__).parent / "results" / "language"
SFT = {"untuned": ["--untuned", "true"], "without privacy": ["--nonprivate", "true"], "epsilon 8": []}
QUIET = ["--use_cpu", "true", "--disable_tqdm", "true"]
SHOWN = 2  # synthetic texts of each service
TARGET = 0.85

Found = dict[str, Any]


def fine_tuned(folder: Path, base: str, changes: list[str]) -> Found:
    """Perplexity on conversations of other people, and what the model answers to them."""
    said = StringIO()
    with redirect_stdout(said):
        metrics = sft.main(
            ["--config", str(CONFIGS / "sft_sgd.yaml"), "--model_name_or_path", base, "--output_dir", str(folder),
             "--max_eval_records", "200", "--answers", "6", *QUIET, *changes]
        )  # fmt: skip
    lines = [line for line in said.getvalue().splitlines() if line.startswith(("User: ", "Assistant: "))]
    return {"perplexity": metrics["eval_perplexity"], "answers": lines}


def synthesized(folder: Path, base: str) -> Found:
    """Scores of synthetic user turns, and a few of them."""
    data, model = folder / "sgd", folder / "turns"
    if not (data / "train.jsonl").is_file():
        conversations.main(["--output_dir", str(data)])
    line = [
        "--config", str(CONFIGS / "synthesize_sgd.yaml"), "--model_name_or_path", base, "--output_dir", str(model),
        "--private_file", f"{data}/train.jsonl", "--codes", f"{data}/services.json", *QUIET,
    ]  # fmt: skip
    if not (model / "privacy.json").is_file():
        synthesize.main([*line, "--samples", "0"])
    if not (model / synthesize.FOLDER).is_dir():
        synthesize.main([*line, "--sample_only", "true"])
    made = model / synthesize.FOLDER
    files = ["--private_file", f"{data}/train.jsonl", "--test_file", f"{data}/dev.jsonl"]
    scores = compare_texts.main([str(made), *files, "--label_column", "service"])
    texts, shown = load_from_disk(str(made)), []
    for service in conversations.SERVICES:
        found = [record["text"] for record in texts if record["service"] == service]
        shown += [f"{service}: {text}" for text in found[:SHOWN]]
    return {**scores, "shown": shown}


def markdown(found: dict[str, Found]) -> str:
    """The page with the results that are there."""
    parts = [
        "# Language models on private conversations",
        "`HF_PRIVATE_DATA=data python recipes/language_table.py`",
        "A GPT-2 with 5.1 million parameters, pretrained on the public half of SGD's conversations and on SST-2's"
        " sentences (`pretrain_tiny.py`); it has seen no conversation of the private half. The unit of privacy is a"
        " conversation, delta 1e-5. One seed; settings: `configs/sft_sgd.yaml` and `configs/synthesize_sgd.yaml`.",
    ]
    runs = {name: found[name] for name in SFT if name in found}
    if runs:
        rows = "\n".join(f"| {name} | {run['perplexity']:.2f} |" for name, run in runs.items())
        parts += [
            "## SFT",
            "Perplexity per token of what the assistant says, in 200 conversations of the dev file.",
            f"| | perplexity |\n| --- | --- |\n{rows}",
        ]
        parts += [f"{name}:\n\n" + "\n".join(f"- {said}" for said in run["answers"]) for name, run in runs.items()]
    if "turns" in found:
        made, real = found["turns"]["synthetic"], found["turns"]["private"]
        reached = "reached" if made["share_of_accuracy"] >= TARGET else "not reached"
        names = [name for name in made if name != "share_of_accuracy"]
        rows = "\n".join(
            f"| {name.replace('_', ' ')} | "
            + " | ".join(f"{x[name]:.4g}" if name in x else "" for x in columns)
            + " |"
            for columns in [(made, real, found["turns"]["test"])]
            for name in names
        )
        parts += [
            "## Synthetic user turns by service, epsilon 8",
            f"A bag-of-words classifier trained on {made['texts']:,} synthetic turns reaches"
            f" **{made['share_of_accuracy']:.1%}** of the accuracy of one trained on all {real['texts']:,} real ones"
            f" (goal: {TARGET:.0%}, {reached}), on turns of the dev file.",
            f"| | synthetic | real | dev |\n| --- | --- | --- | --- |\n{rows}",
            "\n".join(f"- {text}" for text in found["turns"]["shown"]),
        ]
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
