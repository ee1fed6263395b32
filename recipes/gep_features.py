"""DP-SGD, B-GEP and GEP on a linear classifier over frozen features, as in appendix A of the GEP paper. Takes minutes.

    python recipes/gep_features.py                      # the table in recipes/results/gep_features.md
    python recipes/gep_features.py --runs 1 --epsilons 2
    python recipes/gep_features.py --ablations          # Figure 6, Tables 5 and 6: results/gep_ablations.md

Private records are the handwritten digits (8 x 8) of scikit-learn. The features come from a small network trained on
public numerals, which are drawn with fonts. Anchors are other drawn numerals ("drawn"), or handwritten digits that are
used neither for training nor for testing and count as public ("held out", as in the paper). Both get random labels at
every step.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hf_private.accounting.budget import calibrate
from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.method import Full, Method
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.sampling import PoissonSampler
from hf_private.mechanism.step import Mechanism
from hf_private.methods.gep.config import AnchorConfig
from hf_private.methods.gep.public_data import AnchorBooks
from hf_private.methods.subspace import public_generator

RESULTS = Path(__file__).parent / "results" / "gep_features"
TRAIN, HELD_OUT, BATCH, STEPS, DELTA = 1200, 300, 300, 80, 1e-5
FEATURES, K, CLIP_NORM = 512, 70, 1.0  # p = 5,130 and k about sqrt(p), as in the paper
LEARNING_RATES = (0.01, 0.03, 0.1, 0.3, 1.0)  # for all methods; no best rate should lie at an end of the range
REFRESH = 4
FONTS = ("DejaVu Sans", "DejaVu Sans Mono", "DejaVu Serif", "STIXGeneral", "cmr10", "cmss10", "cmtt10")


def drawn_numerals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Public numerals in several fonts, sizes and places: images (n, 1, 8, 8) with values in [0, 1], labels (n,)."""
    draw, images = np.random.default_rng(seed), []
    fonts = [font_manager.findfont(name) for name in FONTS]  # part of matplotlib
    labels = draw.integers(10, size=count)
    for label in labels:
        image = Image.new("L", (32, 32))
        font = ImageFont.truetype(fonts[draw.integers(len(fonts))], int(draw.integers(24, 36)))
        place = (16 + int(draw.integers(-3, 4)), 16 + int(draw.integers(-2, 3)))
        ImageDraw.Draw(image).text(place, str(label), int(draw.integers(160, 256)), font=font, anchor="mm")
        image = image.rotate(float(draw.uniform(-15, 15)))
        images.append(np.asarray(image.resize((8, 8), Image.Resampling.BOX)))
    return torch.tensor(np.stack(images), dtype=torch.float32).unsqueeze(1) / 255, torch.tensor(labels)


def pretrained_features() -> nn.Module:
    """A small convolutional network, trained on public numerals, without its last layer."""
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 16, FEATURES), nn.ReLU(),
    )  # fmt: skip
    model = nn.Sequential(body, nn.Linear(FEATURES, 10))
    images, labels = drawn_numerals(6000, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(8):
        for batch in torch.randperm(len(images)).split(100):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch] + 0.1 * torch.randn(len(batch), 1, 8, 8)), labels[batch]).backward()
            optimizer.step()
    return body.eval()


@torch.no_grad()
def features(body: nn.Module, images: Tensor) -> Tensor:
    """Features (n, d) of norm 1."""
    return F.normalize(body(images), dim=1)


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


class Anchors(NamedTuple):
    """A row of a table: GEP or B-GEP, and its public records. With their `own` labels, or random ones."""

    kind: str
    source: str
    k: int = K
    m: int = HELD_OUT
    own: bool = False


def make_method(row: Anchors | None, model: nn.Module, data: dict[str, Tensor], seed: int) -> Method:
    """The method of a row; random labels are drawn at every refresh."""
    if row is None:
        return Full()
    public, labels = data[row.source][: row.m], data[f"{row.source} labels"][: row.m]
    config = AnchorConfig(k=row.k, num_anchors=row.m, groups=[".*"], refresh=REFRESH, residual=row.kind == "GEP")
    method = config.build(model, seed=seed)

    def batches(step: int) -> list[dict[str, Tensor]]:
        drawn = torch.randint(10, (len(public),), generator=public_generator("anchors", seed, step))
        return [{"x": public, "y": labels if row.own else drawn}]

    method.books = AnchorBooks(model, losses, batches, seed)
    return method


METHODS: dict[str, Anchors | None] = {"DP-SGD": None} | {
    f"{kind}, {source} anchors": Anchors(kind, source) for source in ("drawn", "held out") for kind in ("B-GEP", "GEP")
}


def run(
    row: Anchors | None, data: dict[str, Tensor], noise_multiplier: float, learning_rate: float, seed: int
) -> float:
    """Accuracy in percent of one private run."""
    model = nn.Linear(FEATURES, 10)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    sampler = PoissonSampler(TRAIN, BATCH)
    mechanism = Mechanism(
        model,
        losses,
        method=make_method(row, model, data, seed),
        clipping=Clipping(clip_norm=CLIP_NORM),
        noise=NoiseSource(),
        noise_multiplier=noise_multiplier,
        sample_rate=sampler.sample_rate,
        expected_batch_size=BATCH,
        charge=lambda event: None,  # the noise is calibrated for all steps
    )
    optimizer = torch.optim.Adam(trainable(model).values(), learning_rate)
    for step in range(STEPS):
        drawn = torch.from_numpy(sampler.draw(step))
        mechanism.step([{"x": data["x"][drawn], "y": data["y"][drawn]}] if len(drawn) else [])
        optimizer.step()
    return 100 * (model(data["test_x"]).argmax(1) == data["test_y"]).float().mean().item()


def load() -> dict[str, Tensor]:
    """Features of private, test and public records, with the same split in every run."""
    body, digits = pretrained_features(), load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = features(body, torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16)[order]
    y = torch.tensor(digits.target)[order]
    drawn, drawn_labels = drawn_numerals(HELD_OUT, seed=1)
    return {
        "x": x[:TRAIN],
        "y": y[:TRAIN],
        "test_x": x[TRAIN + HELD_OUT :],
        "test_y": y[TRAIN + HELD_OUT :],
        "held out": x[TRAIN : TRAIN + HELD_OUT],
        "held out labels": y[TRAIN : TRAIN + HELD_OUT],
        "drawn": features(body, drawn),
        "drawn labels": drawn_labels,
    }


def ablations(data: dict[str, Tensor], epsilon: float, runs: int) -> None:
    """B-GEP and GEP over k (Figure 6), labels and source (Table 5) and the number of anchors (Table 6)."""
    sigma = calibrate(epsilon, DELTA, BATCH / TRAIN, STEPS)
    variants: dict[str, dict[str, Any]] = {f"k = {k}": {"k": k} for k in (10, 30, 70, 150)}
    variants |= {f"m = {m}, k = 70": {"m": m} for m in (75, 150)}  # k = 70 above has m = 300
    variants |= {"held out, own labels": {"own": True}, "drawn, random labels": {"source": "drawn"}}
    lines = ["| anchors | B-GEP | GEP |", "| --- | --- | --- |"]
    for name, changed in variants.items():
        cells = []
        for kind in ("B-GEP", "GEP"):
            row = Anchors(**{"kind": kind, "source": "held out", **changed})
            found = [[run(row, data, sigma, rate, seed) for seed in range(runs)] for rate in (0.03, 0.1)]
            best = max(found, key=np.mean)
            cells.append(f"{np.mean(best):.1f} (± {np.std(best):.1f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    text = "# GEP over k, labels and the number of anchors\n\n`python recipes/gep_features.py --ablations`: as in"
    text += f" [gep_features.md](gep_features.md), at epsilon {epsilon:g}, held out anchors with random labels, m ="
    text += (
        f" {HELD_OUT}, unless the row says otherwise. Test accuracy in percent, mean and standard deviation of {runs}"
    )
    text += " runs, at the better of the rates 0.03 and 0.1.\n\n" + "\n".join(lines) + "\n"
    RESULTS.with_name("gep_ablations.md").write_text(text)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ablations", action="store_true", help="vary the anchors, at epsilon 1")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(argv)
    start, data, rows = time.perf_counter(), load(), []
    if options.ablations:
        ablations(data, 1.0, options.runs)
        return
    multipliers = {e: calibrate(e, DELTA, BATCH / TRAIN, STEPS) for e in options.epsilons}
    for epsilon, noise_multiplier in multipliers.items():
        for name, method in METHODS.items():
            for rate in LEARNING_RATES:
                found = [run(method, data, noise_multiplier, rate, seed) for seed in range(options.runs)]
                row = {"epsilon": epsilon, "method": name, "learning_rate": rate, "accuracy": np.mean(found).item()}
                rows.append(row | {"deviation": np.std(found).item(), "noise_multiplier": noise_multiplier})
            best = max(rows[-len(LEARNING_RATES) :], key=lambda row: row["accuracy"])
            print(f"epsilon {epsilon}: {name:25} {best['accuracy']:.1f} +- {best['deviation']:.1f}", flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    settings = {"n": TRAIN, "expected_batch_size": BATCH, "steps": STEPS, "delta": DELTA, "clip_norm": CLIP_NORM}
    settings |= {"p": 10 * (FEATURES + 1), "k": K, "num_anchors": HELD_OUT, "refresh": REFRESH, "runs": options.runs}
    RESULTS.with_suffix(".json").write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    print(table(rows, list(multipliers)), f"\n{time.perf_counter() - start:.0f} s")


def table(rows: list[dict], epsilons: list) -> str:
    """The best learning rate of each method, as Markdown."""
    lines = [
        "| method | " + " | ".join(f"epsilon = {e}" for e in epsilons) + " |",
        "| --- " * (len(epsilons) + 1) + "|",
    ]
    for name in METHODS:
        of = {e: [row for row in rows if (row["epsilon"], row["method"]) == (e, name)] for e in epsilons}
        best = [max(of[e], key=lambda row: row["accuracy"]) for e in epsilons]
        lines.append(f"| {name} | " + " | ".join(f"{b['accuracy']:.1f} (± {b['deviation']:.1f})" for b in best) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
