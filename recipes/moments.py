"""Where Adam's moments should live under carriers: with the whole weight, or with the carriers' coordinates.

    python recipes/moments.py                         # writes recipes/results/moments.{md,json}, two minutes

Carriers release dL and dR, and DPTrainer hands their gradient of the whole weight to the optimizer, whose moments
therefore outlive the carriers. The alternative keeps moments of dL and dR themselves. When carriers change, those are
reset, or carried over: the first moments are projected on the new carriers, the second ones stay. All of this is
post-processing of noised gradients. The task is that of lsg_grid.py.
"""

import argparse
import copy
import json
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from lsg_grid import BATCH, DELTA, STEPS, TRAIN, digits, losses, pretrained, shown
from torch import Tensor, nn

from hf_private.accounting.budget import calibrate
from hf_private.gradients.bookkeeper import trainable
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.sampling import PoissonSampler
from hf_private.mechanism.step import Mechanism
from hf_private.methods.carriers.lowrank import LowRank
from hf_private.methods.carriers.method import Carriers, Target

RESULTS = Path(__file__).parent / "results" / "moments"
PLACES = ("weight", "coordinates, reset", "coordinates, carried over")
REFRESHES, RATES, RANK = (1, 20, STEPS), (1e-3, 3e-3, 1e-2), 8
LONGER = 3.0  # the rate of coordinates: Adam's steps of r (p + d) numbers are shorter than those of p d
BETAS = (0.9, 0.999)


class InCoordinates(Carriers):
    """Carriers whose `gradient` is Adam's step from moments of dL and dR, to be taken by plain SGD."""

    def __init__(self, targets: dict[str, Target], carry: bool, **settings: Any) -> None:
        super().__init__(targets, **settings)
        self.carry = carry
        self.steps: dict[str, int] = dict.fromkeys(targets, 0)
        self.moments: dict[str, list[dict[str, Tensor]]] = {}

    def begin_step(self, step: int) -> None:
        before = self.carriers
        super().begin_step(step)
        if before and self.carriers is not before:
            for name in list(self.moments):
                self._change(name, before[name], self.carriers[name])

    def _change(self, name: str, before: Any, after: Any) -> None:
        """Move the moments of a weight to new carriers, or forget them."""
        assert isinstance(before, LowRank) and isinstance(after, LowRank)
        if not self.carry:
            self.steps[name] = 0
            del self.moments[name]
            return
        matrix = before.reconstruct(self.moments[name][0])
        self.moments[name][0] = {"L": (matrix @ after.right.t()).t(), "R": after.left.t() @ matrix}

    def gradient(self, name: str, sums: dict[str, Tensor]) -> Tensor:
        if name not in self.targets:
            return super().gradient(name, sums)
        parts = {side: sums[f"{name}:{side}"] for side in "LR"}
        zeros = [{side: torch.zeros_like(part) for side, part in parts.items()} for _ in BETAS]
        moments = self.moments.setdefault(name, zeros)
        self.steps[name] += 1
        step = {}
        for side, part in parts.items():
            for moment, value, beta in zip(moments, (part, part.square()), BETAS, strict=True):
                moment[side] = torch.lerp(value, moment[side], beta)
            first, second = (m[side] / (1 - beta ** self.steps[name]) for m, beta in zip(moments, BETAS, strict=True))
            step[side] = first / (second.sqrt() + 1e-8)
        return self.carriers[name].reconstruct(step)


def run(
    start: nn.Module, data: dict[str, Tensor], place: str, refresh: int, sigma: float, rate: float, seed: int
) -> float:
    """Test accuracy in percent of one private run."""
    model = copy.deepcopy(start)
    targets = {name: Target(RANK) for name in ("0.weight", "2.weight")}
    settings: dict[str, Any] = {"refresh": refresh, "head_scale": 0.3, "seed": seed}
    inside = place != "weight"
    method = InCoordinates(targets, place.endswith("over"), **settings) if inside else Carriers(targets, **settings)
    sampler = PoissonSampler(TRAIN, BATCH)
    mechanism = Mechanism(
        model, losses, method=method, clipping=Clipping(clip_norm=1.0), noise=NoiseSource(), noise_multiplier=sigma,
        sample_rate=sampler.sample_rate, expected_batch_size=BATCH,
        charge=lambda event: None,  # the noise is calibrated for all steps
    )  # fmt: skip
    low_rank = [p for name, p in trainable(model).items() if inside and name in targets]
    rest = [p for name, p in trainable(model).items() if not (inside and name in targets)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(rest, rate)]
    optimizers += [torch.optim.SGD(low_rank, LONGER * rate)] if low_rank else []
    for step in range(STEPS):
        drawn = torch.from_numpy(sampler.draw(step))
        mechanism.step([{"x": data["x"][drawn], "y": data["y"][drawn]}] if len(drawn) else [])
        for optimizer in optimizers:
            optimizer.step()
    return 100 * (model(data["test_x"]).argmax(1) == data["test_y"]).float().mean().item()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    data, model = digits(), pretrained()
    sigma = calibrate(options.epsilon, DELTA, BATCH / TRAIN, STEPS)
    found: dict[str, dict[str, list[float]]] = {}
    for place, refresh in product(PLACES, REFRESHES):
        tried = {
            f"{rate:g}": [run(model, data, place, refresh, sigma, rate, seed) for seed in range(options.runs)]
            for rate in RATES
        }
        found[f"{place} | {refresh}"] = tried
        print(place, refresh, {rate: shown(scores) for rate, scores in tried.items()}, flush=True)
    text = [
        "# Where Adam's moments live",
        "",
        f"`python recipes/moments.py`: the task of [lsg_grid.md](lsg_grid.md), RGP on the weight, r = {RANK}, epsilon"
        f" {options.epsilon:g}, {STEPS} steps, {options.runs} runs. Test accuracy in percent; the best rate in bold,"
        f" chosen by it. In coordinates the rate of the targeted weights is {LONGER:g} times as high.",
        "",
        "| moments of | steps between two refreshes | " + " | ".join(f"rate {rate:g}" for rate in RATES) + " |",
        "| --- " * (len(RATES) + 2) + "|",
    ]
    for name, tried in found.items():
        best = max(tried, key=lambda rate: mean(tried[rate]))
        cells = [f"**{shown(scores)}**" if rate == best else shown(scores) for rate, scores in tried.items()]
        text.append(f"| {name} | " + " | ".join(cells) + " |")
    options.output.with_suffix(".md").write_text("\n".join(text) + "\n")
    options.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
