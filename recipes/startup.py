"""Measure what a run costs before its first step: CPU seconds of the import, and of the start by part.

    OMP_NUM_THREADS=1 python recipes/startup.py
    OMP_NUM_THREADS=1 python recipes/startup.py --repeats 1 --records 5000 --batch 64 --epochs 5   # another plan

BERT-base with random weights on made-up records. Trainer and DPTrainer take turns, each in a process of its own; the
least CPU time of each figure counts. Results go to recipes/results/startup.{md,json}.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

RESULTS = Path(__file__).parent / "results" / "startup"
TOKENS = 32
IMPORTS = {"Trainer": "from transformers import Trainer", "DPTrainer": "from hf_private import DPConfig, DPTrainer"}
WITHOUT = ("self-check", "pass over the dataset")  # what the aim leaves out
AIMS = {"import": 0.5, "start": 1.0}  # above Trainer's; without WITHOUT


def imported(name: str) -> dict[str, float]:
    """CPU seconds of an import."""
    began = time.process_time()
    exec(IMPORTS[name])
    return {"import": time.process_time() - began}


class Parts:
    """CPU seconds of functions while they run, by part; those of an inner one count for it alone."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = 0.0

    def _switch(self) -> None:
        now = time.process_time()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def timed(self, part: str, function: Callable) -> Callable:
        """The function, whose time goes to a part."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._open.pop()

        return run


def started(name: str, records: int, batch: int, epochs: int) -> dict[str, float]:
    """CPU seconds from the construction of a trainer to its first step, by part."""
    import torch
    import transformers as hf

    from hf_private import DPConfig, DPTrainer
    from hf_private.spending.spending import Spending
    from hf_private.trainer import data_guards, provenance, setup

    class FirstStep(Exception):
        pass

    class Stop(hf.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            raise FirstStep

    torch.set_num_threads(1)
    model = hf.BertForSequenceClassification(hf.BertConfig())
    ids = torch.randint(1, 30000, (records, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(TOKENS, dtype=torch.long)
    data = [{"input_ids": row, "attention_mask": mask, "labels": n % 2} for n, row in enumerate(ids)]
    parts = Parts()
    places = [
        ("self-check", setup, "self_check"),
        ("pass over the dataset", data_guards, "check_dataset"),
        ("pass over the dataset", data_guards, "_check_repeats"),
        ("calibration of the noise", Spending, "_plan"),
        ("fingerprints of the weights", provenance, "Fingerprints"),
        ("two records are tried", setup, "try_records"),
        ("collator is checked", data_guards, "check_collator"),
    ]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        common: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
        args = hf.TrainingArguments(folder, num_train_epochs=epochs, per_device_train_batch_size=32, **common)
        for part, place, attribute in places:
            stack.enter_context(mock.patch.object(place, attribute, parts.timed(part, getattr(place, attribute))))

        def start() -> None:
            private = {"dp_config": DPConfig(target_epsilon=8.0, expected_batch_size=batch)}
            kind: Any = DPTrainer if name == "DPTrainer" else hf.Trainer
            own = private if name == "DPTrainer" else {}
            try:
                kind(model, args, train_dataset=data, callbacks=[Stop()], **own).train()
            except FirstStep:
                return
            raise RuntimeError("A run must begin with a step.")

        began = time.process_time()
        parts.timed("the rest", start)()
    return dict(parts.seconds) | {"total": sum(parts.seconds.values()), "all": time.process_time() - began}


def fastest(runs: list[dict[str, float]]) -> dict[str, float]:
    """The least of each figure."""
    return {part: min(run.get(part, 0.0) for run in runs) for part in runs[-1]}


def table(found: dict[str, Any]) -> str:
    plain, private = found["Trainer"], found["DPTrainer"]
    counted = sum(seconds for part, seconds in private.items() if part not in (*WITHOUT, "total", "all", "import"))
    lines = [
        "# Before the first step",
        "",
        f"CPU seconds, one thread, BERT-base, {found['records']:,} records of {TOKENS} tokens, batches of"
        f" {found['batch']}, {found['epochs']} epochs, epsilon 8; least of {found['repeats']} processes.",
        "",
        "| | Trainer | DPTrainer |",
        "|---|---|---|",
        f"| import | {plain['import']:.2f} | {private['import']:.2f} |",
    ]
    parts = [part for part in private if part not in ("import", "total", "all")]
    for part in sorted(parts, key=lambda part: -private[part]):
        shown = f"{plain[part]:.2f}" if part in plain else ""
        lines.append(f"| {part} | {shown} | {private[part]:.2f} |")
    lines += [
        "",
        f"Import above Trainer's: {private['import'] - plain['import']:.2f} (aim: at most {AIMS['import']}).",
        f"Start without {' and '.join(WITHOUT)}: {counted:.2f} (aim: at most {AIMS['start']:.0f}); Trainer's"
        f" {plain['total']:.2f}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # a measurement and a name: in a process of its own
    args = parser.parse_args()
    if args.one:
        what, name = args.one
        found = imported(name) if what == "import" else started(name, args.records, args.batch, args.epochs)
        print(json.dumps(found))
        return
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in IMPORTS}
    plan = ["--records", str(args.records), "--batch", str(args.batch), "--epochs", str(args.epochs)]
    for _ in range(args.repeats):
        for name, done in runs.items():
            found = {}
            for what in ("import", "start"):
                command = [sys.executable, __file__, "--one", what, name, *plan]
                out = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                found |= json.loads(out.stdout.splitlines()[-1])
            done.append(found)
    result = {name: fastest(done) for name, done in runs.items()}
    result |= {name: getattr(args, name) for name in ("records", "batch", "epochs", "repeats")}
    args.results.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    text = table(result) + "\n`OMP_NUM_THREADS=1 python recipes/startup.py`\n"
    args.results.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
