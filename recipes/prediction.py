"""When do carriers beat the full gradient? A prediction from residual and noise, before a run.

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

import math
from dataclasses import dataclass


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
