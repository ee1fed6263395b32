"""Where carriers win: predicted from residual and noise at the first weights, and then measured.

    python recipes/regime.py --width 1024 --epsilon 1 --only prediction        # seconds
    python recipes/regime.py --width 1024 --epsilon 1         # writes recipes/results/regime_digits.{md,json}

The task is that of lsg_grid.py: an MLP, pretrained on drawn numerals, is fine-tuned privately on handwritten digits.
Public carriers come from 300 other drawn numerals with random labels. The prediction reads the gradients of private
records, which a user would replace by public ones; its formula is in prediction.py. Each setting is kept in the .json,
so that several calls fill one table.
"""

import argparse
import copy
import json
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from diagnostics import projection_residual
from gep_features import drawn_numerals
from lsg_grid import BATCH, DELTA, STEPS, TRAIN, digits, losses, pretrained, shown
from prediction import Regime, noise_to_signal
from torch import Tensor, nn

from hf_private.accounting.budget import calibrate
from hf_private.gradients.bookkeeper import BookKeeper, trainable
from hf_private.gradients.method import Full, Method
from hf_private.gradients.persample import sq_norms
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.sampling import PoissonSampler
from hf_private.mechanism.step import Mechanism
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.methods.carriers.lowrank import LowRank
from hf_private.methods.carriers.method import Carriers
from hf_private.methods.gep.public_data import AnchorBooks
from hf_private.methods.subspace import public_generator

RESULTS = Path(__file__).parent / "results" / "regime_digits"
METHODS = {"BK": None, "RGP, weight": "weight", "RGP, public": "public", "RGP, random": "random"}
RATES, RANK, CLIP = (1e-3, 3e-3, 1e-2, 3e-2), 8, Clipping("flat", 1.0)


def make_method(model: nn.Module, source: str | None, numerals: Tensor, seed: int = 0) -> Method:
    """BK without a `source`; public records get random labels at every refresh."""
    if source is None:
        return Full()
    settings: dict[str, Any] = {"target_modules": ["0", "2"], "modules_to_save": ["4"], "bias": "all"}
    method = CarrierConfig(r=RANK, source=source, **settings).build(model, seed=seed)
    assert isinstance(method, Carriers)

    def batches(step: int) -> list[dict[str, Tensor]]:
        labels = torch.randint(10, (len(numerals),), generator=public_generator("labels", seed, step))
        return [{"x": numerals, "y": labels}]

    method.books = AnchorBooks(model, losses, batches, seed)
    return method


def clipped_mean(model: nn.Module, method: Method, data: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """Mean of the clipped gradients of the private records by block, and the mean clip factor."""
    sums: dict[str, Tensor] = {}
    method.attach(trainable(model))
    method.begin_step(0)
    with BookKeeper(model, method) as book:
        book.backward(losses(model, {"x": data["x"], "y": data["y"]}))
        entries = book.pop_entries()
        factors = CLIP.factors(method.scaled_sq_norms(sq_norms(entries)), method.blocks)
        method.add_clipped_sums(entries, CLIP, sums)
    return {block: total / len(data["x"]) for block, total in sums.items()}, next(iter(factors.values())).mean().item()


def predict(model: nn.Module, data: dict[str, Tensor], numerals: Tensor, sigma: float) -> dict[str, dict[str, float]]:
    """Kept share, what is needed, and the cosine of the mean of all noised gradients with the true one, by method."""
    full, factor = clipped_mean(copy.deepcopy(model), Full(), data)
    found: dict[str, dict[str, float]] = {}
    for name, source in METHODS.items():
        if source is None:
            continue
        method = make_method(copy.deepcopy(model), source, numerals)
        assert isinstance(method, Carriers)
        _, own = clipped_mean(method.books.model, method, data)  # type: ignore[union-attr]
        energy = {target: full[target].norm().item() ** 2 for target in method.targets}
        missed = 0.0
        for target in method.targets:
            carriers = method.carriers[target]
            assert isinstance(carriers, LowRank)
            missed += projection_residual(full[target], carriers.left, carriers.right) ** 2 * energy[target]
        numbers = sum(full[target].numel() for target in method.targets)
        noised = sum(RANK * sum(full[target].shape) for target in method.targets)
        x = noise_to_signal(sigma, CLIP.clip_norm, BATCH, numbers, sum(energy.values()) ** 0.5) / STEPS
        regime = Regime(x, noised / numbers, max(own / factor, 1.0))
        kept = 1 - missed / sum(energy.values())
        found[name] = {"kept": kept, "needed": regime.needed, "cosine": regime.carriers(kept), "BK": regime.full()}
    return found


def run(
    start: nn.Module,
    data: dict[str, Tensor],
    source: str | None,
    numerals: Tensor,
    sigma: float,
    rate: float,
    seed: int,
) -> float:
    """Test accuracy in percent of one private run."""
    model = copy.deepcopy(start)
    sampler = PoissonSampler(TRAIN, BATCH)
    mechanism = Mechanism(
        model, losses, method=make_method(model, source, numerals, seed), clipping=CLIP, noise=NoiseSource("fast"),
        noise_multiplier=sigma, sample_rate=sampler.sample_rate, expected_batch_size=BATCH,
        charge=lambda event: None,  # the noise is calibrated for all steps
    )  # fmt: skip
    optimizer = torch.optim.Adam(trainable(model).values(), rate)
    for step in range(STEPS):
        drawn = torch.from_numpy(sampler.draw(step))
        mechanism.step([{"x": data["x"][drawn], "y": data["y"][drawn]}] if len(drawn) else [])
        optimizer.step()
    return 100 * (model(data["test_x"]).argmax(1) == data["test_y"]).float().mean().item()


def table(found: dict[str, Any]) -> str:
    lines = [
        "# Where carriers win: digits",
        "",
        "`python recipes/regime.py --width WIDTH --epsilon EPSILON`: an MLP (64, width, width, 10), pretrained on"
        f" drawn numerals, fine-tuned on {TRAIN} digits; {STEPS} batches of {BATCH}, delta {DELTA:g}, rank {RANK}. The"
        " cosine is predicted before the runs, for the mean of all noised gradients with the true one. Accuracy in"
        " percent on"
        " 360 test images, mean and standard deviation of the runs at the best of the rates"
        f" {', '.join(f'{rate:g}' for rate in RATES)} (in brackets), chosen by it.",
        "",
        "| width, epsilon | method | kept | needed | predicted cosine | accuracy |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for setting, result in sorted(found.items()):
        for name in METHODS:
            cells = ["", "", f"{next(iter(result['prediction'].values()))['BK']:.2f}"]
            if name in result["prediction"]:
                cells = [f"{result['prediction'][name][key]:.2f}" for key in ("kept", "needed", "cosine")]
            tried = result["runs"].get(name, {})
            best = max(tried, key=lambda rate: mean(tried[rate])) if tried else None
            cells.append("" if best is None else f"{shown(tried[best])} ({best})")
            lines.append(f"| {setting} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=["prediction"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    data, model = digits(), pretrained(options.width)
    numerals = drawn_numerals(300, seed=1)[0].flatten(1)
    sigma = calibrate(options.epsilon, DELTA, BATCH / TRAIN, STEPS)
    file = options.output.with_suffix(".json")
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    result = found.setdefault(f"{options.width}, {options.epsilon:g}", {"runs": {}})
    result["noise_multiplier"] = sigma
    result["prediction"] = result.get("prediction") or predict(model, data, numerals, sigma)
    if options.only is None:
        for name in options.methods:
            result["runs"][name] = {
                f"{rate:g}": [
                    run(model, data, METHODS[name], numerals, sigma, rate, seed) for seed in range(options.runs)
                ]
                for rate in RATES
            }
    file.write_text(json.dumps(found, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
