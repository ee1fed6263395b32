"""Count where a private step waits for its device, and what it copies, on an accelerator emulated in Python.

    PYTHONPATH=. python recipes/devices.py                  # this code
    PYTHONPATH=../old python recipes/devices.py --as before # another version of it, for comparison

Counts are those of the second step of three micro-batches, which knows every layout already, and of the stages of a
run of DPTrainer. The first column of the second table is the line that waits or copies, or that calls the library
which does. Results go to recipes/results/devices.{md,json}.
"""

import argparse
import importlib.util
import json
import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as hf

from tests.support.devices import emulated, engine

RESULTS = Path(__file__).parent / "results"
KINDS = ("syncs", "copied_to_host", "copied_to_device", "copied_async", "mixed")
WORDS = dict(
    zip(
        KINDS,
        ("waits", "copies to the host", "copies to the device", "copies there asynchronously", "mixes devices"),
        strict=True,
    )
)


def of_step(case: str) -> dict[str, Any]:
    """Counts of one step of a method, the waits of plain passes, and whether two steps give the CPU's gradients."""
    there, of_steps = engine.gradients(case, "emu")
    counts, plain = of_steps[1], engine.forward_counts(case)
    here = engine.gradients(case, "cpu")[0]
    return {
        "same": all(torch.equal(one, other) for one, other in zip(here, there, strict=True)),
        "waits": Counter(counts.syncs).total(),
        "waits_of_plain": Counter(plain.syncs).total(),
        "copied_to_host": Counter(counts.copied_to_host).total(),
        "copied_to_device": Counter(counts.copied_to_device).total(),
        "copied_async": Counter(getattr(counts, "copied_async", {})).total(),  # none before
        "largest": {line: size for line, size in counts.largest.items() if size > 100},
        "mixed": Counter(counts.mixed).total(),
    }


def of_run() -> dict[str, Any]:
    """Counts by stage, kind and line, of a run of DPTrainer."""
    from tests.support.devices import run

    os.environ["ACCELERATE_TORCH_DEVICE"] = "emu"
    with TemporaryDirectory() as folder:
        stages = run.run(Path(folder), "emu")[1]
    return {stage: {kind: dict(getattr(found, kind)) for kind in KINDS} for stage, found in stages.counts.items()}


def table(found: dict[str, Any]) -> str:
    lines = [
        "One step of three micro-batches, beside the waits of plain forward and backward passes. Before, the loss",
        "checked each batch on the device. The last column compares the gradients of two steps.",
        "",
        "| method | version | waits | copies to the host | copies to the device | asynchronous ones | mixes devices |"
        " waits of plain | as on the CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    same = {None: "", True: "to the bit", False: "**no**"}
    for case in engine.CASES:
        for version in ("before", "after"):
            row = found.get(version, {}).get("steps", {}).get(case)
            if row is not None:
                lines.append(
                    f"| {case} | {version} | {row['waits']} | {row['copied_to_host']} | {row['copied_to_device']}"
                    f" | {row.get('copied_async', 0)} | {row['mixed']} | {row['waits_of_plain']}"
                    f" | {same[row.get('same')]} |"
                )
    large = {line for row in found["after"]["steps"].values() for line in row["largest"]}
    lines += ["", f"More than 100 numbers at once are copied by these lines only: {', '.join(sorted(large))}."]
    lines += [
        "",
        "A run of DPTrainer: two steps, a checkpoint, two steps more, evaluation, model and card. *step* is one step,",
        "*start* is everything before the first (the self-check above all).",
        "",
        "| line | what | start | step | save | evaluate |",
        "|---|---|---|---|---|---|",
    ]
    stages = found["after"]["run"]
    for kind in KINDS:
        for line in sorted({line for stage in stages.values() for line in stage[kind]}):
            counts = (stages[stage][kind].get(line, 0) for stage in ("start", "step", "save", "evaluate"))
            lines.append(f"| {line} | {WORDS[kind]} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as", dest="version", choices=("before", "after"), default="after")
    version = parser.parse_args().version
    hf.logging.set_verbosity_error()
    library = emulated.register()
    record = RESULTS / "devices.json"
    found = json.loads(record.read_text()) if record.is_file() else {}
    found[version] = {"steps": {case: of_step(case) for case in engine.CASES}}
    if importlib.util.find_spec("tests.support.devices.run"):
        found[version]["run"] = of_run()
    record.write_text(json.dumps(found, indent=1))
    if "run" in found.get("after", {}):
        record.with_suffix(".md").write_text(f"`python recipes/devices.py`\n\n{table(found)}\n")
    print(table(found) if "run" in found.get("after", {}) else json.dumps(found, indent=1))
    del library
    emulated.leave()


if __name__ == "__main__":
    main()
