"""Measure the sensitivity of a private step for every text architecture that DPTrainer accepts.

    python recipes/sensitivity.py                          # all of them, in float32 and bf16; goes on where it stopped
    python recipes/sensitivity.py --only bert gpt2 fnet    # some
    python recipes/sensitivity.py --shard 0 2              # the first of two processes; both write to one file
    python recipes/sensitivity.py --stale                  # also rows that other code has measured

All takes about 10 CPU minutes. Each row notes a hash of the code that it depends on, and the table says how many rows
are of other code than the present one.

For each model, one logical step is computed without noise on twelve records, and again without one of them. The
distance of the two sums must not exceed the clip norm. A model is

- *accepted* if DPTrainer trains it and this ratio is at most 1.001;
- *coupled* if the ratio is larger: a record changes what others contribute, and the claimed epsilon is wrong;
- *refused* if DPTrainer refuses it, with the parameter or the argument and a remedy;
- *crashed* if another error comes out of DPTrainer;
- *not built* if there is no tiny model or no batch of made-up records for it, or the plain model fails on this batch,
  in this precision.

Parameters that take no part in the loss are frozen, as the error message of DPTrainer advises. Dropout is 0. A model
that draws random numbers in training all the same (a router that samples its experts) is measured in evaluation mode:
which numbers a record gets depends on its place in the batch, whatever the other records are. The table goes to
recipes/results/sensitivity.md; the exit code is 1 if any model is coupled.
"""

import argparse
import contextlib
import functools
import gc
import hashlib
import io
import json
import logging
import signal
import tempfile
import traceback
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
from hf_private.gradients.bookkeeper import UncoveredError
from hf_private.gradients.selfcheck import SelfCheckError
from hf_private.gradients.tensors import full_precision
from hf_private.tasks.heads import IGNORE_INDEX, Head, head_of
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.micro_batches import LogicalCollator
from hf_private.tasks.synthetic import synthetic_batch

RESULTS = Path(__file__).parent / "results"
LIBRARY = Path(__file__).parents[1] / "hf_private"
MEASURED = ("gradients", "mechanism", "tasks", "trainer")  # packages on which a row depends
TEXT_HEADS = ("classification", "masked-lm", "seq2seq-lm", "causal-lm")
RECORDS, MICRO_BATCH, LENGTH = 12, 6, 9
CLIP_NORM = 1e-3  # below every record's norm: a record that changes another's direction shows at full size
ALLOWED = 1.001
PRECISIONS = ("float32", "bf16")
MADE_UP = "`public_examples`"  # the remedy where no batch can be made up
RESULT_NAMES = ("accepted", "refused", "coupled", "crashed", "not built", "not finished")


def varied(model: nn.Module) -> list[dict[str, Tensor]]:
    """Records of different lengths and content, without padding; the first is the longest."""
    batch = with_decoder_inputs(model, synthetic_batch(model, RECORDS, LENGTH))
    lengths = batch["attention_mask"].sum(1).tolist()
    records = []
    for n, length in enumerate(lengths):
        record = {name: rows[n] for name, rows in batch.items()}
        for name in ("input_ids", "attention_mask", "token_type_ids", "labels"):
            aligned = name in record and record[name].shape == batch["input_ids"][n].shape
            if aligned and not (name == "labels" and bool((record[name][length:] != IGNORE_INDEX).any())):
                record[name] = record[name][:length]
        if "decoder_input_ids" in record:
            record["decoder_input_ids"] = record["decoder_input_ids"][: len(record["labels"])]
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

    def __init__(self, sets: dict[str, list[dict[str, Tensor]]]) -> None:
        self.sets = sets
        self.trainer: DPTrainer | None = None
        self.ratios: dict[str, float] = {}
        self.random = False  # whether two passes in training mode differ

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None and self.trainer.model is not None
        for kind, records in self.sets.items():
            everything, again = self.sums(records), self.sums(records, seed=1)
            if any(not torch.equal(everything[block], again[block]) for block in everything):
                self.random = True
                self.trainer.model.eval()
                everything = self.sums(records)
            for left_out in (0, 1, RECORDS - 1):
                fewer = self.sums([record for n, record in enumerate(records) if n != left_out])
                square = sum((everything[block] - fewer[block]).double().square().sum() for block in everything)
                self.ratios[kind] = max(self.ratios.get(kind, 0.0), float(square) ** 0.5 / CLIP_NORM)
        control.should_training_stop = True

    def sums(self, records: list[dict[str, Tensor]], seed: int = 0) -> dict[str, Tensor]:
        assert self.trainer is not None and self.trainer._mechanism is not None
        micro_batches = LogicalCollator(collate, MICRO_BATCH)(list(records)).micro_batches
        torch.manual_seed(seed)
        with full_precision(self.trainer.args.device):
            return self.trainer._mechanism._clipped_sums(micro_batches)


class TimeLimit(BaseException):
    """A model takes too long. Not an `Exception`, so that it is not counted as a refusal."""


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TimeLimit` after so many seconds of CPU time."""

    def stop(*_: Any) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def measure_in_time(model_type: str, head: str, seconds: int) -> list[dict[str, Any]]:
    """The rows of a model, one for each precision; one that takes longer than `seconds` is not finished."""
    rows: list[dict[str, Any]] = []
    try:
        with time_limit(seconds):
            for row in measure(model_type, head):
                rows.append(row)
    except TimeLimit:
        late = {"result": "not finished", "why": f"took more than {seconds} s"}
        rows += [_row(model_type, head, precision) | late for precision in PRECISIONS[len(rows) :]]
    return rows


@functools.cache
def code() -> str:
    """Hash of the code that is measured, and of this file."""
    files = sorted(path for package in MEASURED for path in (LIBRARY / package).rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in (*files, Path(__file__)))).hexdigest()[:12]


def _row(model_type: str, head: str, precision: str) -> dict[str, Any]:
    return {"type": model_type, "head": head, "precision": precision, "code": code()}


def measure(model_type: str, head: str) -> Iterator[dict[str, Any]]:
    """The rows of a model, one for each precision."""
    try:
        model = tiny_model(model_type, head).float()
        sets = {"varied": varied(model), "near equal": near_equal(model)}
        unused = unused_parameters(model, collate(sets["varied"][:3]))
    except Exception as error:  # whatever a config that was never meant to be small may raise
        result = "refused" if is_refusal(error) else "not built"
        for precision in PRECISIONS:
            yield _row(model_type, head, precision) | {"result": result, "why": _short(error)}
        return
    for precision in PRECISIONS:
        row, bf16 = _row(model_type, head, precision), precision == "bf16"
        try:
            model = tiny_model(model_type, head).float()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                unused_parameters(model, collate(sets["varied"][:3]))
        except Exception as error:
            yield row | {"result": "not built", "why": f"the plain model in {precision}: {_short(error)}"}
            continue
        try:
            for name, p in model.named_parameters():
                p.requires_grad_(p.requires_grad and name not in unused)
            with tempfile.TemporaryDirectory() as folder:
                row |= ratios(model, sets, bf16, folder)
        except Exception as error:
            yield row | {"result": "refused" if is_refusal(error) else "crashed", "why": _short(error)}
            continue
        yield row | {"result": "accepted" if max(row[kind] for kind in sets) <= ALLOWED else "coupled"}


def is_refusal(error: Exception) -> bool:
    """Whether hf_private itself refuses a model or a batch, and not for want of a made-up batch."""
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = frames[-1][0].f_globals["__name__"].startswith("hf_private.")
    return ours and isinstance(error, (ValueError, SelfCheckError, UncoveredError)) and MADE_UP not in str(error)


def unused_parameters(model: nn.Module, batch: dict[str, Tensor]) -> set[str]:
    """What the loss does not reach: poolers, heads and towers for another task."""
    model.train()  # dropout is 0; some models have no other mode with gradients (Reformer)
    PerSampleLoss(model)(model, batch).sum().backward()
    unused = {name for name, p in model.named_parameters() if p.grad is None}
    for p in model.parameters():
        p.grad = None
    return unused


def with_decoder_inputs(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch, with decoder inputs for models that do not make them from labels."""
    if head_of(model) is not Head.SEQ2SEQ_LM or hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return batch
    labels = batch["labels"].masked_fill(batch["labels"] == IGNORE_INDEX, 0)
    return batch | {"decoder_input_ids": torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], 1)}


class ZooTrainer(DPTrainer):
    """Gives the self-check decoder inputs, too."""

    def public_batch(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return with_decoder_inputs(self.model, super().public_batch(*args, **kwargs))


def ratios(model: nn.Module, sets: dict[str, list[dict[str, Tensor]]], bf16: bool, folder: str) -> dict[str, Any]:
    """The sensitivity on each set of records, in units of the clip norm, and whether it is that of evaluation mode."""
    args = TrainingArguments(
        folder,
        max_steps=1,
        per_device_train_batch_size=MICRO_BATCH,
        bf16=bf16,
        use_cpu=True,
        remove_unused_columns=False,  # Trainer would remove the masks of models that name none (FNet)
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    callback = Measurement(sets)
    callback.trainer = ZooTrainer(
        model,
        args,
        dp_config=DPConfig(noise_multiplier=1.0, clip_norm=CLIP_NORM),
        train_dataset=sets["varied"],
        data_collator=collate,
        callbacks=[callback],
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        callback.trainer.train()
    return {**callback.ratios, **({"mode": "evaluation"} if callback.random else {})}


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


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
    stale = sum(row.get("code") != code() for row in rows)
    if stale:
        lines += ["", f"{stale} of {len(rows)} rows were measured with other code than the present one."]
    lines += [
        "",
        f"Sensitivity is in units of the clip norm, at most {ALLOWED} allowed; the larger of two sets of records.",
    ]
    lines += ["", "| type | head | precision | result | sensitivity, or why not |", "| --- | --- | --- | --- | --- |"]
    for row in sorted(rows, key=lambda row: (row["type"], row["head"], row["precision"])):
        ratio = max(row.get("varied", 0.0), row.get("near equal", 0.0))
        figure = f"{ratio:.4f}" + (" (evaluation mode)" if "mode" in row else "")
        said = figure if row["result"] in ("accepted", "coupled") else row["why"].replace("|", "/")
        lines.append(f"| {row['type']} | {row['head']} | {row['precision']} | {row['result']} | {said} |")
    return "\n".join(lines) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    """The last row of each model and precision in a file of JSON lines."""
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines]
    return list({(row["type"], row["head"], row["precision"]): row for row in rows}.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="model types, all by default")
    parser.add_argument("--heads", nargs="*", default=list(TEXT_HEADS), choices=TEXT_HEADS)
    parser.add_argument("--shard", nargs=2, type=int, default=(0, 1), metavar=("I", "N"), help="every N-th from I")
    parser.add_argument("--timeout", type=int, default=120, help="CPU seconds for one model")
    parser.add_argument("--again", nargs="*", default=[], choices=RESULT_NAMES, help="measure rows with these results")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--stale", action="store_true", help="measure again what other code has measured")
    parser.add_argument("--output", default="sensitivity", help="name of the results in recipes/results")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    path = RESULTS / f"{args.output}.jsonl"
    if args.fresh:
        path.unlink(missing_ok=True)
    again = {"not finished", *args.again}
    kept = [row for row in read(path) if row["result"] not in again]
    done = {(row["type"], row["head"]) for row in kept if not args.stale or row.get("code") == code()}
    pairs = [(t, head) for head in args.heads for t in sorted(HEADS[head]) if not args.only or t in args.only]
    mine, of = args.shard
    gc.freeze()  # Trainer collects garbage at each start, and the imported libraries are many objects
    for model_type, head in tqdm(pairs[mine::of], desc="models", mininterval=10):
        if (model_type, head) not in done:
            rows = measure_in_time(model_type, head, args.timeout)
            with path.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    rows = read(path)
    path.with_suffix(".md").write_text(table(rows))
    coupled = [row for row in rows if row["result"] == "coupled"]
    for row in coupled:
        print(f"COUPLED: {row}")
    print(f"{len(rows)} rows, {len(coupled)} coupled: {path.with_suffix('.md')}")
    return 1 if coupled else 0


if __name__ == "__main__":
    raise SystemExit(main())
