"""The rules by which `plan` compares settings. They are rules of thumb: constants are read off our own tables.

**Noise to signal** is explained in accounting/signal.py.

**Usefulness** lies between 0 and 1. It is the share of the gradient that the method keeps, times what the noise leaves
of it, times a factor for the number of steps. It orders plans for one task. It does not predict accuracy.
"""

import math
from dataclasses import dataclass
from typing import Any

from hf_private.accounting.signal import TOLERATED

# Share of the full gradient's effect that a method keeps. BK is 1 by definition. LoRA and the carriers are fitted to
# the order of methods in recipes/results (SST-2, E2E, digits), so that agreement with these tables is no independent
# confirmation. A new head alone does better if it reads what the encoder was trained to give. On 5,000 records of
# SST-2, epsilon 8, MiniLM and other training records to score it on: 82 % on the mean of the tokens and 75 % on the
# first one, where the majority class has 55 %. MEAN_HEAD stands for the former: above a LoRA where records are few,
# below it and BK where noise is small (67,349 records).
KEPT = {"BK": 1.0, "LoRA": 0.8, "RGP": 0.4, "LSG": 0.38, "head only": 0.3}
MEAN_HEAD = 0.75
# Half of what training can reach is reached after this many steps. In the E2E recipe 42 steps are too few even without
# noise; the tables use 165 to 240. On 5,000 records of SST-2, LoRA had 75.6 % after 140 of 400 steps and 71.9 % at the
# end (recipes/results/advice_first.json), so that more steps are worth little.
HALF_TRAINED = 20
# With AdamW, the best in recipes/results, where noise to signal is below 1 for most methods. Each step of AdamW is as
# large as its learning rate, noise or not, so that it must be smaller where there is more noise. By how much is a
# guess. A head alone needs a larger one: in recipes/results/units.md accuracy rises up to 0.1; on the 5,000 records
# above 0.03 is within a point of the best of 0.01, 0.03 and 0.1 on either feature, and 0.01 is 6 below on the first.
LEARNING_RATES = {"BK": 4e-3, "LoRA": 8e-3, "RGP": 4e-3, "LSG": 4e-3, "head only": 3e-2}
LEVEL = 0.05  # plans whose usefulness differs by less, relatively, are level
SOURCES = (
    "noise-batch ratio and batch size: variables of the scaling laws for BERT pretraining in arXiv:2501.18914",
    "private fine-tuning of pretrained models tends not to suffer from their size (arXiv:2110.05679), possibly because"
    " few principal components hold most of the gradient (arXiv:2207.00160)",
    "how much noise is tolerated, and how many steps are enough: read off our tables and one run on 5,000 records",
    "share of the gradient that each method keeps: fitted to our tables (recipes/results: sst2_minilm, e2e_tiny,"
    " digits); head only to short runs on 5,000 records",
)


def usefulness(kind: str, noise: float, steps: int, rank: int | None = None, mean: bool = False) -> float:
    """Between 0 and 1: comparable between plans for one task only.

    Args:
        kind: a key of `KEPT`.
        noise: ratio of noise to signal, see accounting/signal.py.
        rank: of LoRA or carriers; `KEPT` is for 8, and a rank matters little (recipes: r = 8, 16, 32 are level).
        mean: whether the head reads the mean of the tokens, which the encoder was trained for.

    >>> usefulness("BK", 1.3, 204) > usefulness("RGP", 0.3, 204)
    True
    """
    kept = MEAN_HEAD if kind == "head only" and mean else KEPT[kind]
    if rank:
        kept *= (min(rank, 16) / 8) ** 0.05
    return kept / math.hypot(1, noise / TOLERATED) * steps / (steps + HALF_TRAINED)


def learning_rate(kind: str, noise: float) -> float:
    """Where to start a search for the learning rate of AdamW: that of our tables, or half of it if noise is louder.

    >>> learning_rate("LoRA", 0.3), learning_rate("LoRA", 1.2)
    (0.008, 0.004)
    """
    return LEARNING_RATES[kind] * (1 if noise <= 1 else 0.5)


def in_words(useful: float) -> str:
    """Value of our tables at such a usefulness."""
    if useful >= 0.6:
        return "good: in our tables 2 to 6 points of accuracy below training without privacy"
    if useful >= 0.2:
        return "fair: in our tables 3 to 21 points of accuracy below training without privacy"
    return "poor: less than anything in our tables; use more records, a larger epsilon or a smaller part of the model"


@dataclass(frozen=True)
class Schedule:
    """How long to train, and the noise that the budget then demands."""

    batch: int
    steps: int
    noise_multiplier: float


def batches(n: int) -> list[int]:
    """Expected batch sizes worth trying: powers of two up to half of the records."""
    return [2**i for i in range(6, 14) if 2**i <= n / 2] or [max(1, n // 2)]


STEPS = (50, 100, 200, 400, 800)


def cheapest_of_the_best(scored: list[tuple[float, float, Any]]) -> tuple[float, float, Any]:
    """Of (usefulness, hours, plan): the cheapest that is level with the best.

    >>> cheapest_of_the_best([(0.70, 1.0, "small"), (0.71, 2.0, "large"), (0.3, 0.1, "tiny")])
    (0.7, 1.0, 'small')
    """
    best = max(useful for useful, *_ in scored)
    return min((one for one in scored if one[0] >= (1 - LEVEL) * best), key=lambda one: (one[1], -one[0]))
