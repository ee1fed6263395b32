"""Noise that is correlated over steps (banded matrix factorisation): a design with its accounting, and a prototype.

    python recipes/correlated.py            # how much noise the sums of gradients have, by bands and setting

**Mechanism.** Let C be lower triangular with b bands (C[t, s] = 0 for s > t and s <= t - b) and columns of norm 1.
Step t releases g_t + sigma R (C^-1 z)_t, with g_t the clipped sum, R the clip norm and z_t fresh noise of standard
deviation 1. That is post-processing of C g + sigma R z, by C^-1. What a run has added up by step t is then noised
by a sum of anti-correlated terms, which is smaller than that of DP-SGD at the same sigma. b = 1 is DP-SGD.

**Sampling.** Each record belongs to one of b groups, by a draw of its own from a secret key. Step t is a Poisson
draw from group t mod b, at rate b B / N, so that the expected batch is B. A record takes part at most every b
steps, where its columns of C have no row in common: what it adds to C g at one of its steps has norm R at most, and
does not meet what it adds at another.

**Accounting.** So a run of T steps costs what ceil(T / b) steps of DP-SGD at rate b B / N cost (Choquette-Choo et
al. 2023, arXiv:2306.08153): `event`. The rate, and with it sigma, grows with b, and the correlation gains less and
less: b has a best value, often a small one. That later gradients depend on earlier releases is covered, because C
is lower triangular and the noise Gaussian.

**Noise.** y = C^-1 z is computed by y_t = (z_t - sum_k C[t, t - k] y_(t - k)) / C[t, t]: b - 1 buffers, each as
large as what is trained. Banded *inverses* (y_t is a sum of the last z, which the key, the step and the name
replay) need no buffers. Their C is dense, so columns of one record meet, and this accounting does not hold: they
get no such amplification.

**What a run must do.** Each `train()` draws a new key, new groups and a new C, and is accounted for as a new phase.
A resumed run has lost its buffers, so it is a new phase, too. Empty draws count as steps. With units, groups are of
units. This is not offered to users: `DPTrainer` draws and accounts for Poisson samples only.

**What the figures say.** They are of plain sums of gradients with the learning rate's schedule as weights. Adam
divides by a second moment to which the noise of single steps adds, and that noise is larger than DP-SGD's.
"""

import argparse
import math
import shlex
import sys
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from hf_private.accounting.budget import calibrate
from hf_private.accounting.events import Event
from hf_private.mechanism.noise import NoiseSource
from hf_private.randomness import Key

RESULTS = Path(__file__).parent / "results" / "correlated"
SETTINGS = {  # name -> records, expected batch, steps, delta: three epochs, one, and 40
    "sst2": (67_349, 1000, 202, 1e-5),
    "e2e": (42_061, 256, 165, 8e-6),
    "digits": (1_437, 256, 225, 1e-4),
}


def event(records: int, batch: int, steps: int, bands: int, noise_multiplier: float) -> Event:
    """What a run with so many bands costs.

    >>> event(1000, 50, steps=10, bands=4, noise_multiplier=1.0)
    Event(sample_rate=0.2, releases=(1.0,), steps=3, sampling='poisson')
    """
    if bands * batch > records:
        raise ValueError(
            f"`bands` must be at most {records // batch}, got {bands}: a group of {records} / {bands} records cannot"
            f" give batches of {batch}."
        )
    return Event(bands * batch / records, (noise_multiplier,), math.ceil(steps / bands))


def strategy(column: Tensor, steps: int) -> Tensor:
    """C from the first column (b,) of a Toeplitz matrix, each column divided by its norm."""
    c = torch.zeros(steps, steps, dtype=torch.float64)
    for k, value in enumerate(column):
        c = c + value * torch.diag(torch.ones(steps - k, dtype=torch.float64), -k)
    return c / c.norm(dim=0)


def error(c: Tensor, rates: Tensor) -> Tensor:
    """Noise on the sum over t of `rates[t]` times the gradient of step t, for fresh noise of standard deviation 1: its
    root mean square over the steps."""
    noise = torch.linalg.solve_triangular(c, torch.eye(len(c), dtype=c.dtype), upper=False)
    return (rates.unsqueeze(1) * noise).cumsum(0).square().sum(1).mean().sqrt()


def best_strategy(bands: int, rates: Tensor) -> Tensor:
    """The C of this form with the least `error`."""
    steps = len(rates)
    start = [math.comb(2 * k, k) / 4**k for k in range(1, bands)]  # the square root of the matrix of sums

    def loss(column: np.ndarray) -> tuple[float, np.ndarray]:
        rest = torch.tensor(column, requires_grad=True)
        value = error(strategy(torch.cat([torch.ones(1, dtype=torch.float64), rest]), steps), rates)
        value.backward()
        return value.item(), rest.grad.numpy()

    column = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 50}).x if start else np.zeros(0)
    return strategy(torch.cat([torch.ones(1, dtype=torch.float64), torch.from_numpy(column)]), steps)


class BandedNoise(NoiseSource):
    """Noise y = C^-1 z for steps 0, 1, ... of one run; z is the fresh noise of `NoiseSource`.

    Guarantee: only with draws from `CyclicGroups` with as many groups as C has bands.

    Args:
        strategy: C, lower triangular with columns of norm 1.
        bands: b, from which on C's diagonals are 0.
    """

    def __init__(self, strategy: Tensor, bands: int, kind: str = "secure", key: Key | bytes | None = None) -> None:
        super().__init__(kind, key)
        outside = strategy.triu(1).abs().max() + strategy.tril(-bands).abs().max()
        if outside > 0 or not torch.allclose(strategy.norm(dim=0), torch.ones(len(strategy), dtype=strategy.dtype)):
            raise ValueError(f"`strategy` must be lower triangular, with {bands} bands and columns of norm 1.")
        self.strategy, self.bands = strategy, bands
        self._earlier: list[dict[str, Tensor]] = []  # y of the last steps, newest first

    def add_(
        self, step: int, sums: dict[str, Tensor], stds: dict[str, float], offsets: dict[str, int] | None = None
    ) -> None:
        if step != self._last_step + 1 or step >= len(self.strategy):
            raise ValueError(f"`step` must be {self._last_step + 1} of {len(self.strategy)}, got {step}.")
        y = {name: torch.zeros_like(x) for name, x in sums.items()}
        super().add_(step, y, stds, offsets)
        row = self.strategy[step]
        for name, x in sums.items():
            for k, before in enumerate(self._earlier, start=1):
                y[name].sub_(before[name], alpha=float(row[step - k]))
            x.add_(y[name].div_(float(row[step])))
        self._earlier = [y, *self._earlier][: self.bands - 1]


class CyclicGroups:
    """Poisson draws of step t from group t mod b: a record takes part at most every b steps.

    Each record's group is a draw of its own, so a record that is added or removed changes no other record's.
    """

    def __init__(self, records: int, batch: int, bands: int, key: Key | bytes | None = None) -> None:
        self.rate = event(records, batch, 1, bands, 1.0).sample_rate
        self.bands = bands
        self._key = Key.of(key)
        self.group = np.minimum(self._uniform("group", 0, records) * bands // 1, bands - 1)

    def _uniform(self, name: str, step: int, count: int) -> np.ndarray:
        return self._key.stream(name, step).uniforms(0, count + count % 2)[:count].numpy()

    def draw(self, step: int) -> np.ndarray:
        """The records of a step."""
        drawn = self._uniform("draw", step, len(self.group)) <= self.rate
        return np.flatnonzero(drawn & (self.group == step % self.bands))


def table(settings: dict[str, tuple[int, int, int, float]], epsilons: list[float], bands: list[int]) -> str:
    """Noise on the sums, by bands, relative to that of DP-SGD."""
    lines = [
        "# Correlated noise: what it would gain", "",
        "Noise on the sum of the gradients up to a step, root mean square over the steps, as a multiple of that of"
        " DP-SGD (one band) at the same epsilon. `constant` and `linear` are schedules of the learning rate. In"
        " brackets: the noise multiplier.", "",
        "| setting | epsilon | rate | " + " | ".join(f"{b} bands" for b in bands) + " |",
        "| --- | --- | --- |" + " --- |" * len(bands),
    ]  # fmt: skip
    for name, (records, batch, steps, delta) in settings.items():
        schedules = {
            "constant": torch.ones(steps, dtype=torch.float64),
            "linear": 1 - torch.arange(steps, dtype=torch.float64) / steps,
        }
        possible = [b for b in bands if b * batch <= records]
        errors = {
            (kind, b): float(error(best_strategy(b, rates), rates))
            for kind, rates in schedules.items()
            for b in possible
        }
        for epsilon in epsilons:
            sigma = {}
            for b in possible:
                cost = event(records, batch, steps, b, 1.0)
                sigma[b] = calibrate(epsilon, delta, cost.sample_rate, cost.steps, accountant="pld")
            for kind in schedules:
                first = sigma[1] * errors[kind, 1]
                cells = [f"{sigma[b] * errors[kind, b] / first:.2f} ({sigma[b]:.2f})" for b in possible]
                cells += [""] * (len(bands) - len(possible))
                lines.append(f"| {name} | {epsilon:g} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[8.0, 3.0])
    parser.add_argument("--bands", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    chosen = {name: SETTINGS[name] for name in options.settings}
    text = table(chosen, options.epsilons, options.bands) + f"\n`python recipes/correlated.py {shlex.join(given)}`\n"
    options.results.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
