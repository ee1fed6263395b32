"""What torch.compile gains on a CPU where it could be used beside per-record gradients. DPTrainer refuses it.

    OMP_NUM_THREADS=1 python recipes/compile.py     # needs a C++ compiler; a few minutes

MiniLM-L6 with random weights, 16 records of 32 tokens, one thread, float32. In each case the eager and the compiled
step take turns in one process; the least CPU time of each counts. Compiling is timed apart: it is the first step's.
Results go to recipes/results/compile.{md,json}.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engines import make_batch, minilm
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.tasks.losses import PerSampleLoss

RESULTS = Path(__file__).parent / "results" / "compile"
Step = Callable[[], None]


def private(model: nn.Module, batch: Any) -> Step:
    """Passes, norms and clipped sums of BK."""
    loss = PerSampleLoss(model)
    batch = loss.checked(model, batch)

    def step() -> None:
        with BookKeeper(model) as book:
            book.backward(loss(model, batch))
            book.weighted_sum((0.5 / book.norms()).clamp(max=1))

    return step


def plain(model: nn.Module, batch: Any) -> Step:
    """Forward and backward pass of the mean loss."""
    loss = PerSampleLoss(model)
    batch = loss.checked(model, batch)

    def step() -> None:
        model.zero_grad()
        loss(model, batch).mean().backward()

    return step


def freeze(model: Any) -> None:
    """Train the classifier and the last layer only."""
    trained = (model.bert.encoder.layer[-1], model.bert.pooler, model.classifier)
    model.requires_grad_(False)
    for module in trained:
        module.requires_grad_(True)


def nothing(model: Any) -> None:
    """Leave the model as it is."""


def compile_frozen(model: Any) -> None:
    for layer in model.bert.encoder.layer[:-1]:
        layer.compile(dynamic=False)


def compile_without_parameters(model: Any) -> None:
    """Attention after its projections, and activations."""
    attention = torch.compile(ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation], dynamic=False)
    ALL_ATTENTION_FUNCTIONS.register("compiled", attention)
    model.config._attn_implementation = "compiled"
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn.compile(dynamic=False)


def compile_whole(model: Any) -> None:
    model.compile(dynamic=False)


CASES: dict[str, tuple[Callable[[nn.Module, Any], Step], Callable[[Any], None], Callable[[Any], None]]] = {
    "last layer trained by BK; the five frozen layers compiled": (private, freeze, compile_frozen),
    "all trained by BK; attention and activations compiled": (private, nothing, compile_without_parameters),
    "all trained by BK; the whole model compiled": (private, nothing, compile_whole),
    "plain training; the whole model compiled": (plain, nothing, compile_whole),
}


def seconds(step: Step) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def measured(case: str, rounds: int) -> dict[str, Any]:
    """CPU seconds of an eager and a compiled step, and what compiling took, or why it fails."""
    make, prepare, compiles = CASES[case]
    torch.manual_seed(0)
    torch.compiler.reset()
    first = minilm().train()
    prepare(first)
    second = copy.deepcopy(first)
    batch = make_batch(first, "minilm", 16, 32)
    compiles(second)
    eager, compiled = make(first, batch), make(second, batch)
    eager()
    began = time.perf_counter()
    try:
        compiled()
        compiled()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"}
    compiling = time.perf_counter() - began
    times = [(seconds(eager), seconds(compiled)) for _ in range(rounds)]
    found = [min(column) for column in zip(*times, strict=True)]
    return {"eager": found[0], "compiled": found[1], "speed": found[0] / found[1], "compiling": compiling}


def table(found: dict[str, Any]) -> str:
    lines = [
        "# torch.compile on a CPU",
        "",
        "MiniLM-L6, 16 records of 32 tokens, one thread, float32. Speed is relative to the same step in eager mode.",
        "",
        "| case | eager, ms | compiled, ms | speed | compiling, s of wall time |",
        "|---|---|---|---|---|",
    ]
    for case, row in found.items():
        if "error" in row:
            lines.append(f"| {case} | | | fails: `{row['error']}` | |")
        else:
            eager, compiled = 1000 * row["eager"], 1000 * row["compiled"]
            lines.append(f"| {case} | {eager:.0f} | {compiled:.0f} | {row['speed']:.2f} | {row['compiling']:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = RESULTS.with_suffix(".json")
    found = json.loads(record.read_text()) if record.is_file() else {}
    for case in [list(CASES)[number] for number in args.cases]:
        found[case] = measured(case, args.rounds)
        record.write_text(json.dumps(found, indent=1) + "\n")
        print(case, found[case], flush=True)
    found = {case: found[case] for case in CASES if case in found}
    RESULTS.with_suffix(".md").write_text(table(found) + "\n`OMP_NUM_THREADS=1 python recipes/compile.py`\n")
    print(table(found))


if __name__ == "__main__":
    main()
