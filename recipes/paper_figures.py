"""Stable ranks and projection errors along a run: Figures 2, 4, 5 and 7 of GEP, and 2 and 3 of RGP, on two cores.

    python recipes/paper_figures.py                   # writes recipes/results/paper_figures.{md,json}, a minute

A residual network with GroupNorm (wrn10-1, 77 thousand weights) learns scikit-learn's digits without privacy. Before
and during training, the gradients of 400 of the records are formed, by groups of parameters as in GEP: first layer,
three stages, last layer. NOT PRIVATE: what is printed here depends on single records.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diagnostics import principal, projection_residual, stable_rank
from torch import Tensor, nn
from vision import drawn_numerals, load_arrays, make_model

from hf_private.gradients.bookkeeper import BookKeeper, trainable
from hf_private.gradients.method import Full

RESULTS = Path(__file__).parent / "results" / "paper_figures"
KS = (20, 50, 100, 200)
RECORDS, ANCHORS, RANK = 400, 300, 8


def losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits = model(pixel_values=batch["x"]).logits
    return nn.functional.cross_entropy(logits, batch["y"], reduction="none")


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Each record's gradient, (records, numbers), by name of the parameter."""
    method = Full()
    method.attach(trainable(model))
    found: dict[str, list[Tensor]] = {}
    with BookKeeper(model, method) as book:
        for start in range(0, len(x), 50):
            book.backward(losses(model, {"x": x[start : start + 50], "y": y[start : start + 50]}))
            for name, value in book.pop_entries().items():
                found.setdefault(name, []).append(value.dense().flatten(1).float())
    return {name: torch.cat(parts) for name, parts in found.items()}


def grouped(parts: Mapping[str, Tensor], groups: Mapping[str, list[str]]) -> dict[str, Tensor]:
    return {group: torch.cat([parts[name] for name in names], 1) for group, names in groups.items()}


def spectrum(matrix: Tensor) -> float:
    """Stable rank of (records, numbers), from the small Gram matrix."""
    values = torch.linalg.eigvalsh((matrix @ matrix.t()).double())
    return (values.sum() / values[-1]).item()


def basis(anchors: Tensor, k: int) -> Tensor:
    """The first k right singular vectors (k, numbers) of anchor gradients, by their Gram matrix."""
    values, vectors = torch.linalg.eigh((anchors @ anchors.t()).double())
    kept = values > values[-1] * 1e-9
    rows = (vectors[:, kept].t().float() @ anchors) / values[kept].sqrt().float().unsqueeze(1)
    return torch.linalg.qr(rows.flip(0)[:k].t()).Q.t()


def outside(matrix: Tensor, rows: Tensor) -> Tensor:
    """What an orthonormal basis leaves of each record's gradient."""
    return matrix - (matrix @ rows.t()) @ rows


def groups_of(names: list[str]) -> dict[str, list[str]]:
    """Parameters by stage; those that belong to none are left to the last layer."""
    found: dict[str, list[str]] = {}
    for name in names:
        number = next((part for part in name.split(".") if part.isdigit()), None)
        kind = f"stage {int(number) + 1}" if number else ("first layer" if "trunk.conv" in name else "last layer")
        found.setdefault(kind, []).append(name)
    return found


def measure(model: nn.Module, data: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Any]:
    """The numbers of one point of the run."""
    parts = gradients(model, data["x"], data["y"])
    groups = groups_of(list(parts))
    private = grouped(parts, groups)
    total = torch.cat(list(private.values()), 1).mean(0)
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (ANCHORS,), generator=draw)
    sources = {
        "same source, own labels": (data["held_x"], data["held_y"]),
        "same source, random labels": (data["held_x"], labels),
        "drawn, random labels": (data["drawn"], labels),
    }
    found: dict[str, Any] = {
        "stable rank": {group: spectrum(matrix) for group, matrix in private.items()},
        "projection error": {},
        "rest": {},
    }
    numbers = sum(matrix.shape[1] ** 0.5 for matrix in private.values())
    share = {group: matrix.shape[1] ** 0.5 / numbers for group, matrix in private.items()}
    for source, (x, y) in sources.items():
        anchors = grouped(gradients(model, x, y), groups)
        for k in KS:
            left = {
                group: outside(matrix, basis(anchors[group], max(1, round(k * share[group]))))
                for group, matrix in private.items()
            }
            error = torch.cat(list(left.values()), 1).mean(0).norm() / total.norm()
            found["projection error"].setdefault(source, {})[k] = error.item()
            if k == KS[-1] and source.startswith("drawn"):
                found["rest"] = {group: spectrum(matrix) for group, matrix in left.items()}
    for k in KS:
        left = []
        for group, matrix in private.items():
            size = min(matrix.shape[1], max(1, round(k * share[group])))
            left.append(outside(matrix, torch.linalg.qr(torch.randn(matrix.shape[1], size, generator=draw)).Q.t()))
        error = torch.cat(left, 1).mean(0).norm() / total.norm()
        found["projection error"].setdefault("random basis", {})[k] = error.item()
    means = {
        name: parts[name].mean(0).view(p.shape).flatten(1) for name, p in model.named_parameters() if p.dim() == 4
    }
    found["layers"] = {
        name: {
            "stable rank": stable_rank(matrix),
            "self": projection_residual(matrix, *principal(matrix, RANK)),
            "history": projection_residual(matrix, *principal(before[name], RANK)) if before else None,
        }
        for name, matrix in means.items()
    }
    return {**found, "means": means}


def mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


def markdown(points: list[dict[str, Any]]) -> str:
    """The figures as tables, one row for each epoch."""
    groups = list(points[0]["stable rank"])
    sources = list(points[0]["projection error"])
    text = ["# Stable ranks and projection errors along a run", "", "`python recipes/paper_figures.py`: "]
    text[-1] += f"wrn10-1 with GroupNorm on {RECORDS} of the digits, {ANCHORS} anchors, no privacy while it trains."
    text += ["", f"## Stable rank of the {RECORDS} gradients (GEP, Figures 2 and 5)", ""]
    text += ["In brackets: of what is outside of the subspace of drawn anchors, k = 200.", ""]
    text += ["| epochs | accuracy | " + " | ".join(groups) + " |", "| --- " * (len(groups) + 2) + "|"]
    for point in points:
        cells = [f"{point['stable rank'][g]:.1f} ({point['rest'][g]:.1f})" for g in groups]
        text.append(f"| {point['epochs']} | {point['accuracy']:.1%} | " + " | ".join(cells) + " |")
    text += ["", "## Projection error of the mean gradient (GEP, Figures 4 and 7)", ""]
    text += ["| epochs | anchors | " + " | ".join(f"k = {k}" for k in KS) + " |", "| --- " * (len(KS) + 2) + "|"]
    for point in points:
        for source in sources:
            cells = [f"{point['projection error'][source][k]:.2f}" for k in KS]
            text.append(f"| {point['epochs']} | {source} | " + " | ".join(cells) + " |")
    text += ["", f"## Gradients of the convolutions (RGP, Figures 2 and 3; r = {RANK})", ""]
    text += ["Means over the layers; history: carriers from the gradient at the row before.", ""]
    text += ["| epochs | stable rank | self residual | history residual |", "| --- | --- | --- | --- |"]
    for point in points:
        layers = point["layers"].values()
        history = "" if None in (x["history"] for x in layers) else f"{mean(x['history'] for x in layers):.2f}"
        own = [f"{mean(x[name] for x in layers):.2f}" for name in ("stable rank", "self")]
        text.append(f"| {point['epochs']} | {own[0]} | {own[1]} | {history} |")
    return "\n".join(text) + "\n"


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16], help="when to measure")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    images, labels = load_arrays("digits", "train", None)
    test, test_labels = load_arrays("digits", "test", None)
    as_input = lambda a: torch.from_numpy(a).float().unsqueeze(1) / 127.5 - 1  # noqa: E731
    x, y = as_input(images), torch.from_numpy(labels)
    data = {
        "x": x[:RECORDS],
        "y": y[:RECORDS],
        "held_x": as_input(test)[:ANCHORS],
        "held_y": torch.from_numpy(test_labels)[:ANCHORS],
        "drawn": as_input(drawn_numerals(ANCHORS)),
    }
    model = make_model("wrn10-1", 8, 1, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    points: list[dict[str, Any]] = []
    before: Mapping[str, Tensor] = {}
    for epoch in range(max(options.epochs) + 1):
        if epoch in options.epochs:
            with torch.no_grad():
                right = (model(pixel_values=as_input(test)).logits.argmax(1).numpy() == test_labels).mean().item()
            point = {"epochs": epoch, "accuracy": right, **measure(model, data, before)}
            before = point.pop("means")
            points.append(point)
        for chosen in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            losses(model, {"x": x[chosen], "y": y[chosen]}).mean().backward()
            optimizer.step()
    text = markdown(points)
    options.output.with_suffix(".md").write_text(text)
    options.output.with_suffix(".json").write_text(json.dumps(points, indent=1) + "\n")
    print(text)
    return points


if __name__ == "__main__":
    main()
