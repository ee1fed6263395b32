"""Predict from residual and noise whether carriers beat the full gradient, before a run.

    python recipes/prediction.py recipes/results/residuals.json --measured_at 0.54 1000 --noise 2.43 500 --steps 30

A step is as good as its direction. Let g be the mean clipped gradient of the targeted weights, to which BK adds noise
of standard deviation nu = sigma C / B on pd numbers. The expected squared cosine of the step with g is

    BK         1 / (1 + x),                           x = nu^2 pd / |g|^2, the noise-to-signal ratio
    carriers   kept^2 G^2 / (kept G^2 + x f),         f = r (p + d) / pd

where kept = 1 - residual^2 is the share of |g|^2 inside the carriers, and G >= 1 says how much more of the clip norm
they leave to what they keep (mean clip factor with carriers, divided by that of BK). So carriers need

    kept > 1          without noise: nothing replaces what they leave out
    kept > sqrt(f)/G  where noise dominates: 0.2 for width 384 and r = 8, 0.15 for width 768

Random carriers keep f, which is less than sqrt(f): they can only gain by G. Averaging over steps (momentum, Adam)
divides x by their number as long as the gradient stays, which favours BK. Carriers of other directions at every
refresh make up for some of what each leaves out, which favours carriers. Neither is in the formula, nor is Adam's
rescaling: take the verdict as a sign, and a difference of a tenth as none.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Regime:
    """Noise and dimensions of a run, for the targeted weights.

    Args:
        noise_to_signal: x = (sigma C / B)^2 pd / |g|^2, see `noise_to_signal`.
        dimensions: f = noised numbers with carriers, divided by those of the full gradient.
        gain: G, the mean clip factor with carriers divided by that of the full gradient.

    >>> regime = Regime(noise_to_signal=30.0, dimensions=0.04)
    >>> round(regime.needed, 2), regime.verdict(kept=0.06), regime.verdict(kept=0.9)
    (0.21, 'full gradient', 'carriers')
    """

    noise_to_signal: float
    dimensions: float
    gain: float = 1.0

    def full(self) -> float:
        """Expected cosine of BK's step with the gradient."""
        return 1 / math.sqrt(1 + self.noise_to_signal)

    def carriers(self, kept: float) -> float:
        """The same for carriers that keep this share of the gradient's squared norm."""
        released = kept * self.gain**2
        return kept * self.gain / math.sqrt(released + self.noise_to_signal * self.dimensions) if kept else 0.0

    @property
    def needed(self) -> float:
        """The share from which on carriers beat the full gradient; above 1: none does."""
        x, g = self.noise_to_signal, self.gain**2
        return (g + math.sqrt(g * g + 4 * g * (1 + x) * x * self.dimensions)) / (2 * g * (1 + x))

    def verdict(self, kept: float) -> str:
        """Which one has the better step; "even" within a tenth."""
        ratio = self.carriers(kept) / self.full()
        if 0.9 <= ratio <= 1.1:
            return "even"
        return "carriers" if ratio > 1 else "full gradient"


def noise_to_signal(
    noise_multiplier: float, clip_norm: float, expected_batch_size: float, numbers: int, signal: float
) -> float:
    """Energy of BK's noise on the mean gradient of `numbers` elements, relative to its squared norm `signal`^2.

    >>> noise_to_signal(1.0, 1.0, 100, numbers=10_000, signal=0.5)
    4.0
    """
    return (noise_multiplier * clip_norm / expected_batch_size) ** 2 * numbers / signal**2


def at_other_noise(rows: list[dict], measured: tuple[float, float], noise: tuple[float, float], steps: int = 1) -> str:
    """A table of what residuals.py measured, for another noise multiplier and batch size.

    Each source was measured along a run of its own, so noise to signal and gain are the medians over all of them.
    `steps` averages the noise over that many, as if the gradient kept its direction: what a whole run could reach.
    """
    ratio = (noise[0] / noise[1]) / (measured[0] / measured[1])
    x = ratio**2 / steps * median(row["noise_to_signal"] for row in rows)
    gain = median(row["gain"] for row in rows)
    lines = ["| source | kept | needed | cosine | cosine of BK | ratio |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        regime = Regime(x, row["dimensions"], gain)
        carriers, full = regime.carriers(row["kept"]), regime.full()
        cells = (row["kept"], regime.needed, carriers, full, carriers / full)
        lines.append(f"| {row['source']} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("residuals", type=Path, help="the .json of residuals.py")
    pair = {"type": float, "nargs": 2, "metavar": ("SIGMA", "BATCH"), "required": True}
    parser.add_argument("--measured_at", **pair, help="noise multiplier and batch size of that measurement")
    parser.add_argument("--noise", **pair, help="those of the run that is planned")
    parser.add_argument("--steps", type=int, default=1, help="average the noise over the steps of a run")
    options = parser.parse_args(argv)
    rows = json.loads(options.residuals.read_text())
    print(at_other_noise(rows, options.measured_at, options.noise, options.steps))


if __name__ == "__main__":
    main()
