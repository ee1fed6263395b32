"""Statistics of attacks: lower bounds of epsilon from the success of an attack, with a stated confidence.

An attack never proves privacy. A lower bound above the claimed epsilon shows that the claim is wrong; a lower bound
below it shows nothing. The attacks themselves are in mia.py (losses of a saved model), canaries.py (a training run
with canaries) and step.py (one step).

Higher scores mean "more likely a member of the training set".
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import stats

from hf_private._validate import integer_at_least, probability

Halves = tuple[np.ndarray, np.ndarray]  # scores of members and of non-members

CONFIDENCE = 0.95
HIGHEST = 50.0  # no audit of realistic size certifies an epsilon above this


# ---- one training run with canaries, each included by a fair coin


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Largest probability that `correct` or more of `guesses` coins are guessed in an (epsilon, delta)-private run.

    Steinke, Nasr and Jagielski (2023): each guess is right with probability at most e^eps / (1 + e^eps),
    and delta adds at most 2 m delta max_i (f(v - i) - f(v)) / i for m canaries.

    >>> round(one_run_p_value(canaries=1000, guesses=100, correct=100, epsilon=3.465376, delta=1e-5), 4)
    0.05
    """
    right = 1 / (1 + math.exp(-epsilon))
    at_least = stats.binom.sf(np.arange(correct, -1, -1) - 1, guesses, right)  # f(v), f(v - 1), ..., f(0)
    steps = (at_least[1:] - at_least[0]) / np.arange(1, correct + 1)
    return float(at_least[0] + 2 * canaries * delta * max(steps, default=0.0))


@lru_cache(maxsize=1024)
def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """Lower bound of epsilon from one run: the largest epsilon that makes this many right guesses too unlikely.

    Args:
        canaries: number m of coins.
        guesses: number r of guesses, fixed before anyone sees the scores.
        correct: number v of right guesses.

    >>> round(one_run_epsilon(canaries=1000, guesses=100, correct=95, delta=1e-5), 4)
    2.1652
    """
    integer_at_least(1, canaries=canaries, guesses=guesses)
    integer_at_least(0, correct=correct)
    probability(confidence=confidence)
    if not correct <= guesses <= canaries:
        raise ValueError(f"`correct` <= `guesses` <= `canaries` must hold, got {correct}, {guesses}, {canaries}.")
    if not 0 <= delta < 1:
        raise ValueError(f"`delta` must be >= 0 and < 1, got {delta}.")
    alpha = 1 - confidence
    low, high = 0.0, HIGHEST
    if one_run_p_value(canaries, guesses, correct, low, delta) > alpha:
        return 0.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        if one_run_p_value(canaries, guesses, correct, middle, delta) <= alpha:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class OneRun:
    """Result of guessing the coins of one run; `highest` is the bound if all of the guesses were right."""

    canaries: int
    guesses: int
    correct: int
    epsilon: float
    highest: float
    delta: float
    confidence: float = CONFIDENCE

    def contradicts(self, claimed: float) -> bool:
        """Whether the bound refutes the claimed epsilon, at the stated confidence."""
        return self.epsilon > claimed


def guess_coins(
    scores: np.ndarray, included: np.ndarray, delta: float, guesses: int | None = None, confidence: float = CONFIDENCE
) -> OneRun:
    """Guess "in" for the highest scores (m,) and "out" for the lowest, and count how often the coins (m,) agree.

    `guesses` is a fifth of the canaries by default, half of them "in". Never choose it from the outcome.

    >>> coins = np.arange(1000) % 2 == 0
    >>> round(guess_coins(coins.astype(float), coins, delta=1e-5).epsilon, 2)
    4.17
    """
    scores = np.asarray(scores, dtype=float)
    included = np.asarray(included, dtype=bool)
    m = len(scores)
    half = max(1, (m // 5 if guesses is None else guesses) // 2)
    r = 2 * half
    if scores.shape != (m,) or included.shape != (m,) or r > m or np.isnan(scores).any():
        raise ValueError(
            f"`scores` and `included` must hold one number and one coin for each of at least {r} canaries, got shapes"
            f" {scores.shape} and {included.shape}."
        )
    order = np.argsort(scores, kind="stable")
    correct = int((~included[order[:half]]).sum() + included[order[-half:]].sum())
    return OneRun(
        canaries=m,
        guesses=r,
        correct=correct,
        epsilon=one_run_epsilon(m, r, correct, delta, confidence),
        highest=one_run_epsilon(m, r, r, delta, confidence),
        delta=delta,
        confidence=confidence,
    )


# ---- membership inference on a saved model


@dataclass(frozen=True)
class Membership:
    """How well a threshold on a score separates members from non-members, on records not used to choose it.

    `success` is the share of right answers on equally many members and non-members (0.5: guessing), `interval` its
    Clopper-Pearson interval. `epsilon` is a lower bound of epsilon under three assumptions: both sets come from one
    distribution, membership was decided at random, and the rates of this model are those of its training procedure,
    which the guarantee is about. A single model cannot show the last one, so this is strong evidence, whereas
    `guess_coins` is a test at the stated confidence.
    """

    records: int  # of each kind, in the evaluated half
    success: float
    interval: tuple[float, float]
    auc: float
    tpr_at_1_percent: float
    tpr_at_01_percent: float
    epsilon: float
    delta: float
    confidence: float = CONFIDENCE


def clopper_pearson(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Exact two-sided interval of a probability.

    >>> [round(bound, 4) for bound in clopper_pearson(50, 100)]
    [0.3983, 0.6017]
    """
    tail = (1 - confidence) / 2
    low = stats.beta.ppf(tail, successes, trials - successes + 1) if successes else 0.0
    high = stats.beta.ppf(1 - tail, successes + 1, trials - successes) if successes < trials else 1.0
    return float(low), float(high)


def roc(members: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rates of "a score of at least t is a member", for every t; from (0, 0) to (1, 1)."""
    thresholds = np.unique(np.concatenate([members, others]))[::-1]

    def rates(scores: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], 1 - np.searchsorted(np.sort(scores), thresholds) / len(scores)])

    return rates(others), rates(members)


def auc(members: np.ndarray, others: np.ndarray) -> float:
    """Probability that a member scores above a non-member; ties count half.

    >>> auc(np.array([2.0, 3.0]), np.array([1.0, 2.0]))
    0.875
    """
    ranks = stats.rankdata(np.concatenate([members, others]))
    n = len(members)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * len(others)))


def tpr_at(members: np.ndarray, others: np.ndarray, fpr: float) -> float:
    """Largest true positive rate at a false positive rate of at most `fpr`."""
    false, true = roc(members, others)
    return float(true[false <= fpr].max())


def infer_membership(
    members: np.ndarray, others: np.ndarray, delta: float, seed: int = 0, confidence: float = CONFIDENCE
) -> Membership:
    """Attack with a threshold on a score, as in section 5.3 of RGP: choose it on one half, evaluate on the other.

    The larger set is subsampled at random (`seed`) to the size of the smaller, so that guessing is right half of the
    time.

    >>> found = infer_membership(np.arange(100.0) + 60, np.arange(100.0), delta=1e-5)
    >>> found.success > 0.7, found.interval[0] > 0.5
    (True, True)
    """
    size = min(len(members), len(others)) // 2
    if size < 2:
        raise ValueError(
            f"`members` and `others` must hold at least 4 records each, got {len(members)} and {len(others)}."
        )
    for name, scores in (("members", members), ("others", others)):
        if not np.isfinite(scores).all():
            raise ValueError(
                f"`{name}` must have finite scores: the model's loss is not finite on one of the records."
            )
    generator = np.random.default_rng(seed)
    members = generator.permutation(np.asarray(members, dtype=float))
    others = generator.permutation(np.asarray(others, dtype=float))
    choose_in, try_in = members[:size], members[size : 2 * size]
    choose_out, try_out = others[:size], others[size : 2 * size]
    threshold = _best_threshold(choose_in, choose_out)
    right = int((try_in >= threshold).sum() + (try_out < threshold).sum())
    return Membership(
        records=size,
        success=right / (2 * size),
        interval=clopper_pearson(right, 2 * size, confidence),
        auc=auc(try_in, try_out),
        tpr_at_1_percent=tpr_at(try_in, try_out, 0.01),
        tpr_at_01_percent=tpr_at(try_in, try_out, 0.001),
        epsilon=_epsilon((choose_in, choose_out), (try_in, try_out), delta, confidence),
        delta=delta,
        confidence=confidence,
    )


def _best_threshold(members: np.ndarray, others: np.ndarray) -> float:
    """The threshold with the most right answers."""
    thresholds = np.unique(np.concatenate([members, others]))
    right = len(members) - np.searchsorted(np.sort(members), thresholds) + np.searchsorted(np.sort(others), thresholds)
    return float(thresholds[right.argmax()])


def _epsilon(choose: Halves, evaluate: Halves, delta: float, confidence: float) -> float:
    """ln((TPR - delta) / FPR) or its mirror image, at the side and threshold that are best on the first half."""
    thresholds = np.unique(np.concatenate(choose))
    bounds = _bounds(thresholds, choose, delta, confidence)  # (sides, thresholds)
    side, best = np.unravel_index(bounds.argmax(), bounds.shape)
    return max(0.0, float(_bounds(thresholds[best : best + 1], evaluate, delta, confidence)[side, 0]))


def _bounds(thresholds: np.ndarray, halves: Halves, delta: float, confidence: float) -> np.ndarray:
    """Lower bounds of epsilon (2, thresholds) from calling scores of at least t members, or lower scores non-members.

    Both rates are at the pessimistic ends of their intervals, which share the error.
    """
    members, others = halves
    n = len(members)
    tail = (1 - confidence) / 2
    below_in = np.searchsorted(np.sort(members), thresholds)
    below_out = np.searchsorted(np.sort(others), thresholds)
    right = np.stack([n - below_in, below_out])
    wrong = np.stack([n - below_out, below_in])
    low = np.where(right == 0, 0.0, stats.beta.ppf(tail, np.maximum(right, 1), n - right + 1))
    high = np.where(wrong == n, 1.0, stats.beta.ppf(1 - tail, wrong + 1, np.maximum(n - wrong, 1)))
    return np.log(np.maximum(low - delta, 1e-300) / high)
