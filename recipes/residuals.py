"""Measure how much of the gradient carriers miss, by source, before any budget is spent on a run.

    python recipes/residuals.py                                         # a tiny BERT on made-up records, seconds
    HF_PRIVATE_DATA=path/to/data python recipes/residuals.py --config recipes/configs/sst2_minilm.yaml \\
        --noise_multiplier 0.54 --expected_batch_size 1000 --max_train_records 4000 --output recipes/results/residuals

For each source a short run takes private steps and measures, on a probe of the training records, the relative residual
of the gradient outside of the carriers in use (Eq. 5 of RGP, over all targeted weights), and what prediction.py makes
of it. `self` are the best carriers of rank r, those of the gradient itself, which are not private. Noise is real, but
residuals are not private: use public records, or records whose privacy you give up. A `batch_share` of the batch with
the same share of the noise has the same noise on the mean, and is faster.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from diagnostics import principal, projection_residual, stable_rank
from prediction import Regime, noise_to_signal
from torch import Tensor, nn

from hf_private.gradients.bookkeeper import BookKeeper, trainable
from hf_private.gradients.method import Method
from hf_private.gradients.persample import sq_norms
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.methods.carriers.lowrank import LowRank
from hf_private.methods.carriers.method import SOURCES, Carriers
from hf_private.methods.gep.public_data import AnchorBooks
from hf_private.methods.registry import resolve_method
from hf_private.tasks.losses import PerSampleLoss

Batch = Mapping[str, Tensor]
COLUMNS = ("source", "residual", "kept", "needed", "cosine", "cosine of BK", "better")


class Task(NamedTuple):
    """A model, made anew at every call; batches of records by their numbers; how many there are; public batches."""

    model: Callable[[], nn.Module]
    batch: Callable[[list[int]], Batch]
    records: int
    public: list[Batch]
    targets: dict[str, Any]


def tiny() -> Task:
    """A small BERT on made-up records."""
    from powersgd import made_up_records
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=4, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    rows = made_up_records(1024)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return BertForSequenceClassification(config)

    def batch(chosen: list[int]) -> Batch:
        return {name: torch.tensor([rows[i][name] for i in chosen]) for name in ("input_ids", "labels")}

    return Task(model, batch, 768, [batch(list(range(i, i + 64))) for i in range(768, 1024, 64)], {})


def glue(config: str, max_train_records: int) -> Task:
    """The task of a config of glue.py. Public records are the generated sentences, with random labels."""
    from glue import GlueOptions, load_anchors, load_data, load_model
    from options import parse
    from transformers import DataCollatorWithPadding

    argv = ["--config", config, "--method", "rgp", "--max_train_records", str(max_train_records), "--output_dir", "x"]
    options, dp_config, _ = parse(GlueOptions, None, argv)
    _, tokenizer = load_model(options, 0)
    records, _ = load_data(options, tokenizer)
    options.method = "gep"
    public = load_anchors(options, tokenizer).select(range(256))
    collator = DataCollatorWithPadding(tokenizer)
    random = torch.randint(2, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = []
    for start in range(0, 256, 32):
        rows = [public[i] | {"labels": random[i]} for i in range(start, start + 32)]
        batches.append(dict(collator(rows)))
    return Task(
        lambda: load_model(options, 0)[0],
        lambda chosen: dict(collator([records[i] for i in chosen])),
        len(records),
        batches,
        {"exclude_modules": dp_config.carriers.exclude_modules},
    )


def measure(task: Task, source: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row of the table: residual and prediction, averaged over the second half of a short private run."""
    model = task.model()
    settings = {"r": options.r, "refresh": options.refresh, "warmup_steps": options.refresh, **task.targets}
    config = CarrierConfig(source="weight" if source == "self" else source, **settings)
    method = resolve_method(config, model)
    loss = PerSampleLoss(model)
    method.books = AnchorBooks(model, loss, lambda step: task.public)
    size = max(1, round(options.expected_batch_size * options.batch_share))
    mechanism = Mechanism(
        model, loss, method=method, clipping=Clipping("flat", options.clip_norm), noise=NoiseSource("fast"),
        noise_multiplier=options.noise_multiplier * options.batch_share, sample_rate=size / task.records,
        expected_batch_size=size, charge=lambda event: None,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=options.learning_rate, weight_decay=0.0)
    draws = torch.Generator().manual_seed(0)
    found = []
    for step in range(options.steps):
        chosen = torch.randperm(task.records, generator=draws)[:size].tolist()
        mechanism.step(_micro_batches(task, chosen))
        optimizer.step()
        if step >= options.steps // 2 and step % 5 == 4:
            probe = torch.randperm(task.records, generator=draws)[: options.probe].tolist()
            found.append(_probe(model, loss, method, task, probe, options, source == "self"))
    measured = ("residual", "kept", "needed", "carriers", "full", "stable_rank")
    row = {name: mean(one[name] for one in found) for name in measured}
    regime = Regime(*(mean(one[name] for one in found) for name in ("x", "f", "gain")))
    return {"source": source, **row, "better": regime.verdict(row["kept"]), **vars(regime)}


def _micro_batches(task: Task, chosen: list[int], rows: int = 32) -> Iterator[Batch]:
    for start in range(0, len(chosen), rows):
        yield task.batch(chosen[start : start + rows])


def _clipped_mean(
    model: nn.Module, loss: PerSampleLoss, method: Method | None, task: Task, probe: list[int], clip_norm: float
) -> tuple[dict[str, Tensor], float]:
    """Mean of the clipped gradients of a probe by block, and the mean clip factor."""
    sums: dict[str, Tensor] = {}
    factors: list[float] = []
    clip = Clipping("flat", clip_norm)
    with BookKeeper(model, method) as book:
        for batch in _micro_batches(task, probe):
            book.backward(loss(model, batch))
            entries = book.pop_entries()
            norms = book.method.scaled_sq_norms(sq_norms(entries))
            factors += clip.factors(norms)[next(iter(norms))].tolist()
            book.method.add_clipped_sums(entries, clip, sums)
    return {block: total / len(probe) for block, total in sums.items()}, mean(factors)


def _probe(
    model: nn.Module, loss: PerSampleLoss, method: Carriers, task: Task, probe: list[int],
    options: argparse.Namespace, by_svd: bool,
) -> dict[str, float]:  # fmt: skip
    full, factor = _clipped_mean(model, loss, FullAttached(model), task, probe, options.clip_norm)
    _, own = _clipped_mean(model, loss, method, task, probe, options.clip_norm)
    missed = signal = 0.0
    numbers = noised = 0
    for name, target in method.targets.items():
        carriers, g = method.carriers[name], full[name].flatten(1)
        assert isinstance(carriers, LowRank) and target.rank
        left, right = principal(g, target.rank) if by_svd else (carriers.left, carriers.right)
        energy = g.norm().item() ** 2
        missed += projection_residual(g, left, right) ** 2 * energy
        signal += energy
        numbers += g.numel()
        noised += target.rank * sum(g.shape)
    kept = 1 - missed / signal
    x = noise_to_signal(options.noise_multiplier, options.clip_norm, options.expected_batch_size, numbers, signal**0.5)
    regime = Regime(x, noised / numbers, max(own / factor, 1.0))
    ranks = [stable_rank(full[name]) for name in method.targets] if by_svd else []
    return {
        "stable_rank": mean(ranks) if ranks else 0.0,
        "residual": (missed / signal) ** 0.5,
        "kept": kept,
        "needed": regime.needed,
        "carriers": regime.carriers(kept),
        "full": regime.full(),
        "x": x,
        "f": regime.dimensions,
        "gain": regime.gain,
    }


class FullAttached(Method):
    """BK on the trainable parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.attach(trainable(model))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"]
    for row in rows:
        cells = [f"{row[name]:.2f}" for name in ("residual", "kept", "needed", "carriers", "full")]
        lines.append("| " + " | ".join((row["source"], *cells, row["better"])) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--config", help="a config of glue.py; default: a tiny model on made-up records")
    parser.add_argument("--r", type=int, default=8)
    parser.add_argument("--refresh", type=int, default=CarrierConfig().refresh)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--noise_multiplier", type=float, default=1.0)
    parser.add_argument("--clip_norm", type=float, default=1.0)
    parser.add_argument("--expected_batch_size", type=int, default=128)
    parser.add_argument("--batch_share", type=float, default=1.0)
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    parser.add_argument("--probe", type=int, default=128, help="records that residuals are measured on")
    parser.add_argument("--max_train_records", type=int, default=4000)
    parser.add_argument("--sources", nargs="+", default=[*SOURCES, "self"], choices=[*SOURCES, "self"])
    parser.add_argument("--output", help="write the table to OUTPUT.md and OUTPUT.json")
    options = parser.parse_args(argv)
    task = glue(options.config, options.max_train_records) if options.config else tiny()
    rows = [measure(task, source, options) for source in options.sources]
    first = rows[0]
    regime = (
        f"Noise-to-signal of BK on the targeted weights: {first['noise_to_signal']:.3g}. Carriers noise"
        f" {first['dimensions']:.1%} of its numbers, and keep {first['gain']:.2f} times as much of the clip norm."
    )
    if rows[-1]["stable_rank"]:
        regime += f" Mean stable rank of the gradients (Figure 2 of RGP): {rows[-1]['stable_rank']:.1f}."
    print(table(rows), regime, sep="\n\n")
    if options.output:
        command = shlex.join(["python", "recipes/residuals.py", *(sys.argv[1:] if argv is None else argv)])
        text = f"# Residuals by source of the carriers\n\n`{command}`\n\n{table(rows)}\n\n{regime}\n"
        Path(f"{options.output}.md").write_text(text)
        Path(f"{options.output}.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
