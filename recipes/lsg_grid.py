"""Rank and sparsity of LSG: Table 1 and Figure 5 of its paper, on two cores.

    python recipes/lsg_grid.py                        # writes recipes/results/lsg_grid.{md,json}, a few minutes

An MLP (64, 256, 256, 10) is trained on public numerals that are drawn with fonts, and fine-tuned privately on the
handwritten digits of scikit-learn. r = full is Sparse DP-SGD, and with p = 0 it is BK; p = 0 with a rank is RGP on the
weight. Each cell takes the best of its learning rates by test accuracy, so all numbers are a little too high.
"""

import argparse
import copy
import json
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from gep_features import drawn_numerals
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hf_private.accounting.budget import calibrate
from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.method import Full
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.sampling import PoissonSampler
from hf_private.mechanism.step import Mechanism
from hf_private.methods.carriers.config import CarrierConfig

RESULTS = Path(__file__).parent / "results" / "lsg_grid"
TRAIN, BATCH, STEPS, DELTA, WIDTH = 1437, 256, 60, 1e-4, 256
RANKS, SPARSITIES, RATES = (2, 4, 8, None), (0.0, 0.1, 0.3, 0.5), (1e-3, 3e-3, 1e-2)
STARTS = (0, STEPS // 3)  # of sparsity, for the learning curves
POINTS = (10, 20, 40, STEPS)


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def pretrained() -> nn.Module:
    """The MLP after 15 epochs on 3,000 drawn numerals."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )  # fmt: skip
    x, y = drawn_numerals(3000, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(15):
        for chosen in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            losses(model, {"x": x[chosen].flatten(1), "y": y[chosen]}).mean().backward()
            optimizer.step()
    return model


def run(
    start: nn.Module, data: dict[str, Tensor], carriers: dict[str, Any] | None, sigma: float, rate: float, seed: int
) -> list[float]:
    """Test accuracy in percent at POINTS of one private run."""
    model = copy.deepcopy(start)
    method = Full()
    if carriers is not None:
        config = CarrierConfig(target_modules=["0", "2"], modules_to_save=["4"], bias="all", **carriers)
        method = config.build(model, seed=seed)
    sampler = PoissonSampler(TRAIN, BATCH)
    mechanism = Mechanism(
        model, losses, method=method, clipping=Clipping(clip_norm=1.0), noise=NoiseSource(), noise_multiplier=sigma,
        sample_rate=sampler.sample_rate, expected_batch_size=BATCH,
        charge=lambda event: None,  # the noise is calibrated for all steps
    )  # fmt: skip
    optimizer = torch.optim.Adam(trainable(model).values(), rate)
    found = []
    for step in range(STEPS):
        drawn = torch.from_numpy(sampler.draw(step))
        mechanism.step([{"x": data["x"][drawn], "y": data["y"][drawn]}] if len(drawn) else [])
        optimizer.step()
        if step + 1 in POINTS:
            found.append(100 * (model(data["test_x"]).argmax(1) == data["test_y"]).float().mean().item())
    return found


def settings(rank: int | None, sparsity: float, start: int = 0) -> dict[str, Any] | None:
    if rank is None and not sparsity:
        return None
    return {"r": rank, "sparsity": sparsity, "sparsity_start": start}


def shown(values: list[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    digits, model = load_digits(), pretrained()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
    data = {"x": x[:TRAIN], "y": y[:TRAIN], "test_x": x[TRAIN:], "test_y": y[TRAIN:]}
    sigma = calibrate(options.epsilon, DELTA, BATCH / TRAIN, STEPS)
    before = 100 * (model(data["test_x"]).argmax(1) == data["test_y"]).float().mean().item()
    found: dict[str, list[list[float]]] = {}
    for rank, sparsity in product(RANKS, SPARSITIES):
        curves = [
            [run(model, data, settings(rank, sparsity), sigma, rate, seed) for seed in range(options.runs)]
            for rate in RATES
        ]
        found[f"{rank or 'full'}, {sparsity:g}"] = max(curves, key=lambda runs: mean(curve[-1] for curve in runs))
        print(rank, sparsity, shown([curve[-1] for curve in found[f"{rank or 'full'}, {sparsity:g}"]]), flush=True)
    for sparsity in (0.3, 0.5):
        late = settings(8, sparsity, STARTS[1])
        curves = [[run(model, data, late, sigma, rate, seed) for seed in range(options.runs)] for rate in RATES]
        found[f"8, {sparsity:g} from step {STARTS[1]}"] = max(curves, key=lambda runs: mean(c[-1] for c in runs))
    text = [
        "# Rank and sparsity of LSG",
        "",
        f"`python recipes/lsg_grid.py`: an MLP of width {WIDTH}, pretrained on drawn numerals ({before:.1f} % of the"
        f" digits) and fine-tuned on {TRAIN} digits, epsilon {options.epsilon:g} at delta {DELTA:g}, {STEPS} batches"
        f" of {BATCH}, noise multiplier {sigma:.2f}, {options.runs} runs. Test accuracy in percent, on"
        f" {len(y) - TRAIN} images, at the best of the rates {', '.join(map(str, RATES))}, chosen by it.",
        "",
        "| p | " + " | ".join(f"r = {rank or 'full'}" for rank in RANKS) + " |",
        "| --- " * (len(RANKS) + 1) + "|",
    ]
    for sparsity in SPARSITIES:
        cells = [shown([curve[-1] for curve in found[f"{rank or 'full'}, {sparsity:g}"]]) for rank in RANKS]
        text.append(f"| {sparsity:g} | " + " | ".join(cells) + " |")
    text += ["", "Learning curves (Figure 5), r = 8:", ""]
    text += ["| p | " + " | ".join(f"step {point}" for point in POINTS) + " |", "| --- " * (len(POINTS) + 1) + "|"]
    for name, curves in found.items():
        if name.startswith("8, "):
            cells = [shown([curve[i] for curve in curves]) for i in range(len(POINTS))]
            text.append(f"| {name.removeprefix('8, ')} | " + " | ".join(cells) + " |")
    options.output.with_suffix(".md").write_text("\n".join(text) + "\n")
    options.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
