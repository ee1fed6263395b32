"""Measure the sensitivity of a private step for every text architecture that DPTrainer accepts.

    python recipes/sensitivity.py                          # all of them, in float32 and bf16; goes on where it stopped
    python recipes/sensitivity.py --only bert gpt2 fnet    # some

For each model, one logical step is computed without noise on twelve records, and again without one of them. The
distance of the two sums must not exceed the clip norm. A model is *refused* if DPTrainer raises an error, *accepted*
if the ratio is at most 1.001, and *coupled* otherwise: then a record changes what others contribute, and the claimed
epsilon is wrong. The table goes to recipes/results/sensitivity.md; the exit code is 1 if any model is coupled.
"""

import argparse
import contextlib
import io
import json
import logging
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from architectures import HEADS, tiny_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import TrainerCallback, TrainingArguments

from hf_private import DPConfig, DPTrainer
from hf_private.gradients.tensors import full_precision
from hf_private.tasks.heads import IGNORE_INDEX
from hf_private.tasks.micro_batches import LogicalCollator
from hf_private.tasks.synthetic import synthetic_batch

RESULTS = Path(__file__).parent / "results"
TEXT_HEADS = ("classification", "masked-lm", "seq2seq-lm", "causal-lm")
RECORDS, MICRO_BATCH, LENGTH = 12, 6, 9
CLIP_NORM = 1e-3  # below every record's norm: a record that changes another's direction shows at full size
ALLOWED = 1.001
RESULT_NAMES = ("accepted", "refused", "coupled", "not built", "not finished")


def varied(model: nn.Module) -> list[dict[str, Tensor]]:
    """Records of different lengths and content, without padding; the first is the longest."""
    batch = synthetic_batch(model, RECORDS, LENGTH)
    lengths = batch["attention_mask"].sum(1).tolist()
    records = []
    for n, length in enumerate(lengths):
        record = {name: rows[n] for name, rows in batch.items()}
        for name in ("input_ids", "attention_mask", "token_type_ids", "labels"):
            aligned = name in record and record[name].shape == batch["input_ids"][n].shape
            if aligned and not (name == "labels" and bool((record[name][length:] != IGNORE_INDEX).any())):
                record[name] = record[name][:length]
        records.append(record)
    return records


def collate(records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad on the right to the longest record of the micro-batch, and mask."""
    batch = {}
    for name in records[0]:
        filler = {"labels": IGNORE_INDEX}.get(name, 0)  # 0 is the padding token of the tiny models
        rows = [record[name] for record in records]
        batch[name] = pad_sequence(rows, True, filler) if rows[0].dim() else torch.stack(rows)
    return batch


def near_equal(model: nn.Module) -> list[dict[str, Tensor]]:
    """The same record again and again, with one other token each, and one record that differs from all."""
    records = varied(model)
    alike = []
    for n in range(RECORDS - 1):
        record = {name: row.clone() for name, row in records[1].items()}
        record["input_ids"][0] = records[n]["input_ids"][0]
        alike.append(record)
    return [*alike, records[0]]


class Measurement(TrainerCallback):
    """Computes sums with and without one record when the first step begins, by the trainer's own mechanism."""

    def __init__(self, records: list[dict[str, Tensor]]) -> None:
        self.records = records
        self.trainer: DPTrainer | None = None
        self.ratio = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        everything = self.sums(self.records)
        for left_out in (0, 1, RECORDS - 1):
            rest = [record for n, record in enumerate(self.records) if n != left_out]
            fewer = self.sums(rest)
            square = sum((everything[block] - fewer[block]).double().square().sum() for block in everything)
            self.ratio = max(self.ratio, float(square) ** 0.5 / CLIP_NORM)
        control.should_training_stop = True

    def sums(self, records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        assert self.trainer is not None and self.trainer._mechanism is not None
        micro_batches = LogicalCollator(collate, MICRO_BATCH)(list(records)).micro_batches
        torch.manual_seed(0)
        with full_precision(self.trainer.args.device):
            return self.trainer._mechanism._clipped_sums(micro_batches)


class TimeLimit(BaseException):
    """A model takes too long. Not an `Exception`, so that it is not counted as a refusal."""


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TimeLimit` after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def measure_in_time(model_type: str, head: str, bf16: bool, seconds: int) -> dict[str, Any]:
    """One row of the table; a model that takes longer than `seconds` is not finished."""
    try:
        with time_limit(seconds):
            return measure(model_type, head, bf16)
    except TimeLimit:
        row = {"type": model_type, "head": head, "precision": "bf16" if bf16 else "float32"}
        return row | {"result": "not finished", "why": f"took more than {seconds} s"}


def measure(model_type: str, head: str, bf16: bool) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"type": model_type, "head": head, "precision": "bf16" if bf16 else "float32"}
    try:
        tiny_model(model_type, head)
    except Exception as error:  # whatever a config that was never meant to be small may raise
        return row | {"result": "not built", "why": _short(error)}
    for kind, make in (("varied", varied), ("near equal", near_equal)):
        try:
            model = tiny_model(model_type, head)
            records = make(model)
            with tempfile.TemporaryDirectory() as folder:
                row[kind] = _ratio(model, records, bf16, folder)
        except Exception as error:
            return row | {"result": "refused", "why": _short(error)}
    worst = max(row["varied"], row["near equal"])
    return row | {"result": "accepted" if worst <= ALLOWED else "coupled"}


def _ratio(model: nn.Module, records: list[dict[str, Tensor]], bf16: bool, folder: str) -> float:
    args = TrainingArguments(
        folder,
        max_steps=1,
        per_device_train_batch_size=MICRO_BATCH,
        bf16=bf16,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    callback = Measurement(records)
    config = DPConfig(noise_multiplier=1.0, clip_norm=CLIP_NORM)
    trainer = DPTrainer(
        model,
        args,
        dp_config=config,
        train_dataset=records,
        data_collator=collate,
        callbacks=[callback],
    )
    callback.trainer = trainer
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return callback.ratio


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def table(rows: list[dict[str, Any]]) -> str:
    """Counts, then every model."""
    lines = ["`python recipes/sensitivity.py`", "", f"| precision | {' | '.join(RESULT_NAMES)} |"]
    lines += ["| --- " * (len(RESULT_NAMES) + 1) + "|"]
    for precision in ("float32", "bf16"):
        results = [row["result"] for row in rows if row["precision"] == precision]
        counts = [str(results.count(name)) for name in RESULT_NAMES]
        lines.append(f"| {precision} | {' | '.join(counts)} |")
    listed = 2 * sum(len(HEADS[head]) for head in TEXT_HEADS)
    if len(rows) < listed:
        lines += ["", f"Partial: {len(rows)} of {listed} rows were measured; the others are missing, not accepted."]
    lines += [
        "",
        f"Sensitivity is in units of the clip norm, at most {ALLOWED} allowed; the larger of two sets of records.",
    ]
    lines += ["", "| type | head | precision | result | sensitivity, or why not |", "| --- | --- | --- | --- | --- |"]
    for row in sorted(rows, key=lambda row: (row["type"], row["head"], row["precision"])):
        ratio = max(row.get("varied", 0.0), row.get("near equal", 0.0))
        said = f"{ratio:.4f}" if row["result"] in ("accepted", "coupled") else row["why"].replace("|", "/")
        lines.append(f"| {row['type']} | {row['head']} | {row['precision']} | {row['result']} | {said} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="model types, all by default")
    parser.add_argument("--heads", nargs="*", default=list(TEXT_HEADS), choices=TEXT_HEADS)
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one model")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--output", default="sensitivity", help="name of the results in recipes/results")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    path = RESULTS / f"{args.output}.json"
    rows = [] if args.fresh or not path.is_file() else json.loads(path.read_text())
    rows = [row for row in rows if row["result"] != "not finished"]
    done = {(row["type"], row["head"], row["precision"]) for row in rows}
    pairs = [(t, head) for head in args.heads for t in sorted(HEADS[head]) if not args.only or t in args.only]
    for model_type, head in tqdm(pairs, desc="models"):
        for bf16 in (False, True):
            if (model_type, head, "bf16" if bf16 else "float32") not in done:
                rows.append(measure_in_time(model_type, head, bf16, args.timeout))
                path.write_text(json.dumps(rows, indent=1) + "\n")
                path.with_suffix(".md").write_text(table(rows))
    coupled = [row for row in rows if row["result"] == "coupled"]
    for row in coupled:
        print(f"COUPLED: {row}")
    print(f"{len(rows)} models, {len(coupled)} coupled: {path.with_suffix('.md')}")
    return 1 if coupled else 0


if __name__ == "__main__":
    raise SystemExit(main())
