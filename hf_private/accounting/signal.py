"""How loud the noise of a step is, before anything is trained.

The noise on a step's update has the norm sigma C sqrt(d) / B for d noised numbers, clip norm C and expected batch size
B. The mean of clipped gradients has at most the norm C. Their ratio, sigma sqrt(d) / B, needs no data. sigma / B, the
noise-batch ratio, is a variable of the scaling laws in arXiv:2501.18914.

A ratio above 1 does no harm by itself: private fine-tuning of pretrained models tends not to suffer from their number
of parameters (arXiv:2110.05679), possibly because few directions hold most of the gradient (arXiv:2207.00160).
"""

import math
from dataclasses import dataclass

from hf_private._validate import integer_at_least, non_negative, positive

TOLERATED = 3.0  # noise is felt from about here on: read off our own tables (recipes/results)
# One run of ours at this ratio (5,000 records of SST-2, epsilon 8) learned nothing. The largest ratio in our tables is
# 4.8: digits, 8 points below the same run at 2.3. Larger pretrained models may stand more: this warns, and no more.
HOPELESS = 7.0


@dataclass(frozen=True)
class NoiseToSignal:
    """Norm of the noise over the largest norm of the mean clipped gradient.

    >>> noise_to_signal(0.54, 5_500_000, 1000).hopeless
    False
    """

    ratio: float
    noised: int
    batch: float

    @property
    def hopeless(self) -> bool:
        """Whether a run of ours with as much noise learned nothing."""
        return self.ratio >= HOPELESS

    @property
    def warning(self) -> str | None:
        """What to say before a run that may learn nothing; None if there is no reason to."""
        if not self.hopeless:
            return None
        return (
            f"{self} The run may learn nothing. Train fewer numbers (the head only, a LoRA, or `carriers`), raise"
            f" `expected_batch_size` (now {self.batch:g}), or use more records or a larger budget."
            " `hf-private plan` compares these."
        )

    def __str__(self) -> str:
        if self.ratio < 1:
            meaning = "the noise is smaller than the largest possible signal"
        elif self.ratio < TOLERATED:
            meaning = "usual for private fine-tuning"
        elif not self.hopeless:
            meaning = "much: expect to lose accuracy to the noise"
        else:
            meaning = "too much"
        return f"Noise to signal: {self.ratio:.2f} on {self.noised:,} numbers per step ({meaning})."


def noise_to_signal(noise_multiplier: float, noised: int, batch: float) -> NoiseToSignal:
    """Compare the noise of a step with its signal.

    Args:
        noise_multiplier: the effective one, that the accountant sees.
        noised: numbers that get noise in a step: trainable parameters, or what carriers make of them.
        batch: expected batch size, in records or people.

    >>> print(noise_to_signal(0.54, 5_500_000, 1000))
    Noise to signal: 1.27 on 5,500,000 numbers per step (usual for private fine-tuning).
    """
    non_negative(noise_multiplier=noise_multiplier)
    integer_at_least(0, noised=noised)
    positive(batch=batch)
    return NoiseToSignal(noise_multiplier * math.sqrt(noised) / batch, noised, batch)
