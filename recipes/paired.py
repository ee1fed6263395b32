"""Compare methods pairwise, on held-out training records, where the frozen layers are computed only once.

    HF_PRIVATE_DATA=path/to/data python recipes/paired.py recipes/configs/paired_sst2.yaml
    python recipes/paired.py recipes/configs/paired_sst2.yaml --only search     # the short runs

Embeddings and lower layers are frozen and without dropout, so their outputs never change: they are computed once, and
the runs train what is above them. This is exact, and the same for all methods. Texts of the held-out records do not
occur in the training data. A run that is done is not run again; the same command continues, also beside itself.

Pairing: methods are scored on the same records, so the standard error of a difference comes from the records that only
one of them gets right. It does not hold the noise of training, which is drawn anew in every run: that shows in the
deviation over seeds.
"""

import argparse
import base64
import gc
import hashlib
import itertools
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from data import load, model_path
from public_text import public_sentences
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    BertForSequenceClassification,
    PreTrainedModel,
    TrainingArguments,
    set_seed,
)

from hf_private import DPConfig, DPTrainer, read_by_mean

PADDING = 0


class Known(nn.Module):
    """In place of BERT's embeddings: looks up what frozen layers gave for a token of a record."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding.from_pretrained(table, freeze=True)

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        return self.word_embeddings(input_ids)


class Corpus(NamedTuple):
    """Outputs of the frozen layers (tokens, hidden), where row 0 is padding, and records that refer to its rows."""

    table: Tensor
    parts: dict[str, list[dict[str, Any]]]  # train, search, score, public


def split(records: list[dict[str, Any]], search: int, score: int) -> dict[str, list[dict[str, Any]]]:
    """Training records, and two held-out parts of distinct texts that do not occur in the others."""
    texts = list(dict.fromkeys(record["sentence"].strip() for record in records))
    order = np.random.default_rng(0).permutation(len(texts))
    held = {texts[i]: "search" if rank < search else "score" for rank, i in enumerate(order[: search + score])}
    parts: dict[str, list[dict[str, Any]]] = {"train": [], "search": [], "score": []}
    for record in records:
        text = record["sentence"].strip()
        parts[held.get(text, "train")].append({"sentence": text, "labels": int(record["label"])})
    for part in ("search", "score"):  # one record for each text
        parts[part] = list({record["sentence"]: record for record in parts[part]}.values())
    return parts


@torch.no_grad()
def corpus(plan: dict[str, Any], folder: Path) -> Corpus:
    """Texts through the frozen layers, computed once and kept in `folder`."""
    wanted = {name: plan[name] for name in ("frozen_layers", "max_length", "held_out", "bf16")}
    name = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:12]
    file = folder / f"corpus_{name}.pt"
    if not file.is_file():
        records = load("sst2", "train", None, ("train",), ("nyu-mll/glue", "sst2"), "train").to_list()
        parts = split(records, **plan["held_out"])
        parts["public"] = [{"sentence": text, "labels": i % 2} for i, text in enumerate(public_sentences(2000))]
        path = model_path("minilm")
        tokenizer = AutoTokenizer.from_pretrained(path)
        lower = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
        lower.encoder.layer = lower.encoder.layer[: plan["frozen_layers"]]
        everything = [record for part in parts.values() for record in part]
        for start in range(0, len(everything), 1024):
            chunk = everything[start : start + 1024]
            found = tokenizer([r["sentence"] for r in chunk], truncation=True, max_length=plan["max_length"])
            for record, ids in zip(chunk, found["input_ids"], strict=True):
                record["ids"] = ids
        rows = [torch.zeros(1, lower.config.hidden_size)]
        used = 1
        everything.sort(key=lambda record: len(record["ids"]))
        for length, group in itertools.groupby(everything, key=lambda record: len(record["ids"])):
            same = list(group)
            for start in range(0, len(same), 64):
                chunk = same[start : start + 64]
                with torch.autocast("cpu", torch.bfloat16, enabled=plan["bf16"]):
                    states = lower(torch.tensor([record["ids"] for record in chunk])).last_hidden_state
                rows.append(states.float().flatten(0, 1))
                for record in chunk:
                    record["input_ids"] = list(range(used, used + length))
                    used += length
        for record in everything:
            del record["ids"], record["sentence"]
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"table": torch.cat(rows), "parts": parts}, file)
    found = torch.load(file, mmap=True)
    parts = found["parts"]
    if plan["train_records"]:
        order = np.random.default_rng(1).permutation(len(parts["train"]))
        parts["train"] = [parts["train"][i] for i in order[: plan["train_records"]]]
    return Corpus(found["table"], parts)


def build(plan: dict[str, Any], table: Tensor, seed: int) -> PreTrainedModel:
    """The layers that are trained, on top of the table. The classifier is new, and so is the top layer if pooled."""
    path = model_path("minilm")
    config = AutoConfig.from_pretrained(path, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    set_seed(seed)
    model = BertForSequenceClassification.from_pretrained(path, config=config, attn_implementation="eager")
    if plan["pooling"] == "mean":
        read_by_mean(model)
    model.bert.encoder.layer = model.bert.encoder.layer[plan["frozen_layers"] :]
    model.bert.embeddings = Known(table)
    model.config.num_hidden_layers = len(model.bert.encoder.layer)
    model.config.vocab_size, model.config.pad_token_id = len(table), PADDING
    return model


def collate(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(record["input_ids"]) for record in records)
    ids = torch.tensor([r["input_ids"] + [PADDING] * (longest - len(r["input_ids"])) for r in records])
    batch = {"input_ids": ids, "attention_mask": (ids != PADDING).long()}
    if "labels" in records[0]:
        batch["labels"] = torch.tensor([record["labels"] for record in records])
    return batch


class Cell(NamedTuple):
    """One run: its name, method, seed and settings."""

    name: str
    method: str
    seed: int
    epsilon: float | None
    settings: dict[str, Any]
    part: str


def search(plan: dict[str, Any]) -> list[Cell]:
    """Short runs of every method with its learning rates."""
    short = plan["search"]
    cells = []
    for method in plan["methods"]:
        for rate in short["by_method"].get(method, short["learning_rates"]):
            settings = short["settings"] | {"learning_rate": float(rate)}
            cells.append(Cell(f"search_{method}_{float(rate):g}", method, 0, None, settings, "search"))
    return cells


def table_of(plan: dict[str, Any], done: dict[str, Any]) -> list[Cell]:
    """The runs of the table, each at the best rate of its method in the search."""
    rates: dict[str, tuple[float, float]] = {}
    for cell in search(plan):
        if cell.name in done:
            rates[cell.method] = max(
                rates.get(cell.method, (0.0, 0.0)), (done[cell.name]["accuracy"], cell.settings["learning_rate"])
            )
    cells = []
    for row in plan["table"]:
        for seed, method in itertools.product(row["seeds"], row["methods"]):
            if method not in rates:
                continue
            epsilon = float(row["epsilon"])
            settings = plan["settings"] | {"target_epsilon": epsilon, "learning_rate": rates[method][1]}
            cells.append(Cell(f"{method}_eps{epsilon:g}_seed{seed}", method, seed, epsilon, settings, "score"))
    return cells


def run(plan: dict[str, Any], cell: Cell, data: Corpus, folder: Path) -> dict[str, Any]:
    """Train and score; `right` has a bit for each held-out record."""
    where = folder / cell.name
    shutil.rmtree(where, ignore_errors=True)
    settings = dict(cell.settings)
    private = {
        name: settings.pop(name)
        for name in ("target_epsilon", "noise_multiplier", "expected_batch_size", "clip_norm")
        if name in settings
    }
    model = build(plan, data.table, cell.seed)
    dp_config = DPConfig(target_delta=plan["delta"], **private, **(plan["methods"][cell.method] or {}))
    args = TrainingArguments(
        str(where), seed=cell.seed, bf16=plan["bf16"], use_cpu=True, save_strategy="no", report_to=[],
        per_device_train_batch_size=128, per_device_eval_batch_size=64, logging_strategy="no", disable_tqdm=True,
        lr_scheduler_type="linear", warmup_steps=10, **settings,
    )  # fmt: skip
    public = None
    if dp_config.carriers is not None and dp_config.carriers.reads_public_data:
        public = data.parts["public"]
    trainer = DPTrainer(
        model, args, dp_config=dp_config, train_dataset=data.parts["train"], data_collator=collate,
        anchor_dataset=public,
    )  # fmt: skip
    start = time.process_time()
    trainer.train()
    seconds = time.process_time() - start
    right = correct(trainer.model, data.parts[cell.part], plan["bf16"])
    shutil.rmtree(where, ignore_errors=True)
    spent = trainer.privacy_spent()
    return {
        "name": cell.name,
        "method": cell.method,
        "seed": cell.seed,
        "asked": asked(plan, cell),
        "steps": trainer.state.global_step,
        "epsilon": spent.epsilon,
        "accuracy": float(right.mean()),
        "records": len(right),
        "right": base64.b64encode(np.packbits(right).tobytes()).decode(),
        "cpu_minutes": round(seconds / 60, 2),
    }


@torch.no_grad()
def correct(model: PreTrainedModel, records: list[dict[str, Any]], bf16: bool) -> np.ndarray:
    """Whether each record is classified correctly."""
    model.eval()
    order = sorted(range(len(records)), key=lambda i: len(records[i]["input_ids"]))
    right = np.zeros(len(records), dtype=bool)
    for start in range(0, len(order), 64):
        chosen = order[start : start + 64]
        batch = collate([records[i] for i in chosen])
        labels = batch.pop("labels")
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            right[chosen] = (model(**batch).logits.argmax(-1) == labels).numpy()
    return right


def asked(plan: dict[str, Any], cell: Cell) -> dict[str, Any]:
    common = ("frozen_layers", "max_length", "held_out", "train_records", "pooling", "bf16", "delta")
    return {name: plan[name] for name in common} | cell.settings | {"config": plan["methods"][cell.method] or {}}


def finished(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Results by name, of this file's runs and of those in its results, as far as they have the settings asked for."""
    file = Path(plan["results"]).with_suffix(".json")
    found = json.loads(file.read_text()) if file.is_file() else []
    found += [json.loads(path.read_text()) for path in sorted(Path(plan["runs"]).glob("*.json"))]

    def of(cells: list[Cell]) -> dict[str, dict[str, Any]]:
        known = {cell.name: asked(plan, cell) for cell in cells}
        return {result["name"]: result for result in found if result["asked"] == known.get(result["name"])}

    tried = of(search(plan))
    return tried | of(table_of(plan, tried))


def running(file: Path) -> bool:
    """Whether another process, whose number the file holds, still works on a run."""
    try:
        os.kill(int(file.read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


def bits(result: dict[str, Any]) -> np.ndarray:
    return np.unpackbits(np.frombuffer(base64.b64decode(result["right"]), np.uint8))[: result["records"]].astype(float)


def difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """Accuracy of one minus that of another on the same records, and its standard error."""
    found = bits(one) - bits(other)
    return float(found.mean()), float(found.std() / len(found) ** 0.5)


def markdown(plan: dict[str, Any], path: str, done: dict[str, Any]) -> str:
    """The table, paired differences with the first method, and the search."""
    cells = table_of(plan, done)
    base = next(iter(plan["methods"]))
    lines = [f"# {plan['title']}", "", plan["note"].strip(), "", f"`python recipes/paired.py {path}`", ""]
    lines += [
        f"| method | epsilon | seeds | accuracy | minus {base} (by seed, with standard error) | mean difference"
        " | learning rate | CPU minutes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for epsilon, method in dict.fromkeys((cell.epsilon, cell.method) for cell in cells):
        group = [c for c in cells if (c.epsilon, c.method) == (epsilon, method) and c.name in done]
        if not group:
            continue
        scores = [100 * done[c.name]["accuracy"] for c in group]
        pairs = [
            difference(done[c.name], done[f"{base}_eps{epsilon:g}_seed{c.seed}"])
            for c in group
            if method != base and f"{base}_eps{epsilon:g}_seed{c.seed}" in done
        ]
        by_seed = ", ".join(f"{100 * d:+.2f} ± {100 * e:.2f}" for d, e in pairs)
        mean = f"{100 * statistics.mean(d for d, _ in pairs):+.2f}" if pairs else ""
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        minutes = statistics.mean(done[c.name]["cpu_minutes"] for c in group)
        lines.append(
            f"| {method} | {epsilon:g} | {len(group)} | {statistics.mean(scores):.2f}{spread} | {by_seed} | {mean}"
            f" | {group[0].settings['learning_rate']:g} | {minutes:.1f} |"
        )
    tried = {
        method: {
            c.settings["learning_rate"]: done[c.name] for c in search(plan) if c.method == method and c.name in done
        }
        for method in plan["methods"]
    }
    best = {name: max(runs.values(), key=lambda run: run["accuracy"]) for name, runs in tried.items() if runs}
    lines += ["", plan.get("reading", "").strip(), "", "Search (accuracy on the records held out for it):", ""]
    for method, chosen in best.items():
        scores = ", ".join(f"{rate:g}: {100 * run['accuracy']:.1f}" for rate, run in tried[method].items())
        apart, error = difference(chosen, best[base]) if base in best else (0.0, 0.0)
        paired = f"; the best minus that of {base}: {100 * apart:+.1f} ± {100 * error:.1f}" if method != base else ""
        lines.append(f"- {method}: {scores}{paired}")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file of the comparison")
    parser.add_argument("--only", choices=["search", "table"], help="one part of it")
    parser.add_argument("--methods", nargs="+", help="only these")
    parser.add_argument("--limit", type=int, help="stop after this many runs")
    options = parser.parse_args(argv)
    plan = yaml.safe_load(Path(options.config).read_text())
    results, folder = Path(plan["results"]), Path(plan["runs"])
    data, count = None, 0
    while True:
        done = finished(plan)  # runs may go on in other processes
        cells = search(plan) if options.only != "table" else []
        cells += table_of(plan, done) if options.only != "search" else []
        missing = [
            cell
            for cell in cells
            if cell.name not in done
            and (not options.methods or cell.method in options.methods)
            and not running(folder / f"{cell.name}.pid")
        ]
        if done:
            results.with_suffix(".json").write_text(json.dumps(list(done.values()), indent=1) + "\n")
            results.with_suffix(".md").write_text(markdown(plan, options.config, done))
        if not missing or count == options.limit:
            return 0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{missing[0].name}.pid").write_text(str(os.getpid()))
        data, count = data or corpus(plan, Path(plan.get("corpus", folder))), count + 1
        result = run(plan, missing[0], data, folder)
        print(f"{result['name']}: {100 * result['accuracy']:.2f} % in {result['cpu_minutes']} CPU minutes", flush=True)
        (folder / f"{result['name']}.json").write_text(json.dumps(result))
        (folder / f"{result['name']}.pid").unlink()
        gc.collect()


if __name__ == "__main__":
    raise SystemExit(main())
