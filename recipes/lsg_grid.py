"""Rank and sparsity of LSG: Table 1, Figure 5 and section 4.4 (random masks) of its paper, on two cores.

    python recipes/lsg_grid.py                        # writes recipes/results/lsg_grid.{md,json}, a few minutes

An MLP (64, 128, 128, 10) is trained on public numerals that are drawn with fonts, and fine-tuned privately on the
handwritten digits of scikit-learn. r = full is Sparse DP-SGD on the elements with large |W|, and with p = 0 it is BK;
p = 0 with a rank is RGP on the weight. Each cell takes the best of its learning rates by test accuracy, so all numbers
are a little too high.
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
from hf_private.gradients.method import Full, Method
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.sampling import PoissonSampler
from hf_private.mechanism.step import Mechanism
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.methods.carriers.lowrank import Elements, LowRank, kept
from hf_private.methods.carriers.method import Carriers, Target

RESULTS = Path(__file__).parent / "results" / "lsg_grid"
TRAIN, BATCH, STEPS, DELTA, WIDTH = 1437, 256, 60, 1e-4, 128
RANKS, SPARSITIES, RATES = (2, 4, 8, None), (0.0, 0.1, 0.3, 0.5), (3e-3, 1e-2, 3e-2)
START = STEPS // 3  # of sparsity, for the learning curves
POINTS = (10, 20, 40, STEPS)


class RandomMasks(Carriers):
    """LSG and Sparse DP-SGD with neurons, or elements, that are drawn at random at every refresh (section 4.4)."""

    def _low_rank(self, name: str, left: Tensor, right: Tensor) -> LowRank:
        rows, columns = (self._drawn(size) for size in self.parameters[name].shape)
        return LowRank(left, right, kept=(rows, columns))

    def _masked(self, weight: Tensor, sparsity: float) -> Elements:
        return Elements(self._drawn(weight.numel()), weight.shape)

    def _drawn(self, size: int) -> Tensor:
        return torch.randperm(size)[: kept(size, self.sparsity)].sort().values


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def pretrained(width: int = WIDTH) -> nn.Module:
    """The MLP after 15 epochs on 3,000 drawn numerals."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )  # fmt: skip
    x, y = drawn_numerals(3000, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(15):
        for chosen in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            losses(model, {"x": x[chosen].flatten(1), "y": y[chosen]}).mean().backward()
            optimizer.step()
    return model


def digits() -> dict[str, Tensor]:
    """Handwritten digits as vectors, with the same split in every run."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]
    return {"x": x[:TRAIN], "y": y[:TRAIN], "test_x": x[TRAIN:], "test_y": y[TRAIN:]}


def make_method(model: nn.Module, carriers: dict[str, Any] | None, seed: int) -> Method:
    """BK without `carriers`; with `random`, the masks are random."""
    if carriers is None:
        return Full()
    if carriers.get("random"):
        targets = {name: Target(carriers["r"]) for name in ("0.weight", "2.weight")}
        usual = CarrierConfig()
        return RandomMasks(
            targets, sparsity=carriers["sparsity"], mask="neurons" if carriers["r"] else "elements",
            refresh=usual.refresh, head_scale=usual.head_scale, seed=seed,
        )  # fmt: skip
    config = CarrierConfig(target_modules=["0", "2"], modules_to_save=["4"], bias="all", **carriers)
    return config.build(model, seed=seed)


def run(
    start: nn.Module, data: dict[str, Tensor], carriers: dict[str, Any] | None, sigma: float, rate: float, seed: int
) -> list[float]:
    """Test accuracy in percent at POINTS of one private run."""
    model = copy.deepcopy(start)
    sampler = PoissonSampler(TRAIN, BATCH)
    mechanism = Mechanism(
        model, losses, method=make_method(model, carriers, seed), clipping=Clipping(clip_norm=1.0),
        noise=NoiseSource(), noise_multiplier=sigma,
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
    return {"r": rank, "sparsity": sparsity, "sparsity_start": start, "mask": "neurons" if rank else "elements"}


def shown(values: list[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    data, model = digits(), pretrained()
    sigma = calibrate(options.epsilon, DELTA, BATCH / TRAIN, STEPS)
    before = 100 * (model(data["test_x"]).argmax(1) == data["test_y"]).float().mean().item()
    cells = {f"{rank or 'full'}, {p:g}": settings(rank, p) for rank, p in product(RANKS, SPARSITIES)}
    cells |= {f"8, {p:g} from step {START}": settings(8, p, START) for p in SPARSITIES[2:]}
    cells |= {f"{rank or 'full'}, 0.3 random": {"r": rank, "sparsity": 0.3, "random": True} for rank in (8, None)}
    found: dict[str, list[list[float]]] = {}
    for name, carriers in cells.items():
        curves = [[run(model, data, carriers, sigma, rate, seed) for seed in range(options.runs)] for rate in RATES]
        found[name] = max(curves, key=lambda runs: mean(curve[-1] for curve in runs))
        print(name, shown([curve[-1] for curve in found[name]]), flush=True)
    text = [
        "# Rank and sparsity of LSG",
        "",
        f"`python recipes/lsg_grid.py`: an MLP of width {WIDTH}, pretrained on drawn numerals ({before:.1f} % of the"
        f" digits) and fine-tuned on {TRAIN} digits, epsilon {options.epsilon:g} at delta {DELTA:g}, {STEPS} batches"
        f" of {BATCH}, noise multiplier {sigma:.2f}, {options.runs} runs. Test accuracy in percent, on"
        f" {len(data['test_y'])} images, at the best of the rates {', '.join(map(str, RATES))}, chosen by it.",
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
    text += ["", "Masks at p = 0.3 (section 4.4), by the size of W or drawn anew every 20 steps:", ""]
    text += ["| r | by size | random |", "| --- | --- | --- |"]
    for rank in ("8", "full"):
        pair = (shown([curve[-1] for curve in found[f"{rank}, 0.3{kind}"]]) for kind in ("", " random"))
        text.append(f"| {rank} | " + " | ".join(pair) + " |")
    options.output.with_suffix(".md").write_text("\n".join(text) + "\n")
    options.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
