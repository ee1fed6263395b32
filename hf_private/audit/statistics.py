"""The arithmetic of attacks: how sure can one be, from what an attack achieved, that privacy was lost?

An attack never proves privacy. It gives a *lower* bound of epsilon that holds with some confidence: above the claimed
epsilon it shows that the claim is wrong, below it shows nothing. Running the attacks is done elsewhere: audit_mia.py
(losses of a finished model), audit_canaries.py (a training run with canaries), audit_step.py (one step).

Scores are higher for what looks like a member of the training set.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import stats

from hf_private._validate import integer_at_least, probability

CONFIDENCE = 0.95
HIGHEST = 50.0  # no audit of finite size certifies an epsilon above this


# ---- one training run with canaries, each in it by a fair coin


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Largest probability that an (epsilon, delta)-private run lets `correct` of `guesses` coins be guessed.

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
    """Lower bound of epsilon from one run: the largest one that would make so many right guesses too unlikely.

    Args:
        canaries: number m of coins that were tossed.
        guesses: number r of canaries that were guessed, fixed before anybody saw the scores.
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
    alpha, low, high = 1 - confidence, 0.0, HIGHEST
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
    """What guessing the coins of one run gave; `highest` is what the same number of guesses, all right, would give."""

    canaries: int
    guesses: int
    correct: int
    epsilon: float
    highest: float
    delta: float
    confidence: float = CONFIDENCE

    def contradicts(self, claimed: float) -> bool:
        """Whether the claimed epsilon is refuted, at the stated confidence."""
        return self.epsilon > claimed


def guess_coins(
    scores: np.ndarray, included: np.ndarray, delta: float, guesses: int | None = None, confidence: float = CONFIDENCE
) -> OneRun:
    """Guess "in" for the highest scores (m,), "out" for the lowest, and see how often the coins `included` (m,) agree.

    `guesses`, half of them each way, is a fifth of the canaries unless it is given: never choose it by the outcome.

    >>> coins = np.arange(1000) % 2 == 0
    >>> round(guess_coins(coins.astype(float), coins, delta=1e-5).epsilon, 2)
    4.17
    """
    scores, included = np.asarray(scores, dtype=float), np.asarray(included, dtype=bool)
    m = len(scores)
    half = max(1, (m // 5 if guesses is None else guesses) // 2)
    if scores.shape != (m,) or included.shape != (m,) or 2 * half > m or np.isnan(scores).any():
        raise ValueError(
            f"`scores` and `included` must be one number and one coin for each of at least {2 * half} canaries, got"
            f" shapes {scores.shape} and {included.shape}."
        )
    order = np.argsort(scores, kind="stable")
    correct = int((~included[order[:half]]).sum() + included[order[-half:]].sum())
    r = 2 * half
    bounds = (one_run_epsilon(m, r, v, delta, confidence) for v in (correct, r))
    return OneRun(m, r, correct, *bounds, delta, confidence)


# ---- membership inference on a finished model


@dataclass(frozen=True)
class Membership:
    """How well a threshold on a score tells members from non-members, on records that did not choose it.

    `success` is the share of right answers on equally many of both (0.5: guessing), `interval` its Clopper-Pearson
    interval. `epsilon` is a lower bound of epsilon if both were drawn alike, membership was decided at random, and the
    rates of this one model are those of its training procedure, about which the guarantee is. The last cannot be known
    from one model: it is strong evidence, where `guess_coins` is a test at the stated confidence.
    """

    records: int  # of each kind, in the half that was evaluated
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
    rates = [1 - np.searchsorted(np.sort(x), thresholds, side="left") / len(x) for x in (others, members)]
    return np.concatenate([[0.0], rates[0]]), np.concatenate([[0.0], rates[1]])


def auc(members: np.ndarray, others: np.ndarray) -> float:
    """Probability that a member scores above another record; ties count half.

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
    """Attack by a threshold on a score, as in RGP, section 5.3: chosen on one half of the records, tried on the other.

    The larger of both sets is thinned out at random (`seed`) to the size of the smaller, so that guessing is right
    half of the time.

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
            raise ValueError(f"`{name}` must have finite scores: the model's loss is not finite on one of them.")
    generator = np.random.default_rng(seed)
    chosen = [generator.permutation(np.asarray(scores, dtype=float))[: 2 * size] for scores in (members, others)]
    (choose_in, try_in), (choose_out, try_out) = ((scores[:size], scores[size:]) for scores in chosen)
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
    """The threshold that is right most often."""
    thresholds = np.unique(np.concatenate([members, others]))
    right = len(members) - np.searchsorted(np.sort(members), thresholds) + np.searchsorted(np.sort(others), thresholds)
    return float(thresholds[right.argmax()])


def _epsilon(choose: tuple, evaluate: tuple, delta: float, confidence: float) -> float:
    """ln((TPR - delta) / FPR) or its mirror image, at the side and threshold that looked best on the first half."""
    thresholds = np.unique(np.concatenate(choose))
    bounds = _bounds(thresholds, *choose, delta, confidence)  # (sides, thresholds)
    side, best = np.unravel_index(bounds.argmax(), bounds.shape)
    return max(0.0, float(_bounds(thresholds[best : best + 1], *evaluate, delta, confidence)[side, 0]))


def _bounds(
    thresholds: np.ndarray, members: np.ndarray, others: np.ndarray, delta: float, confidence: float
) -> np.ndarray:
    """Lower bounds of epsilon (2, thresholds) from calling scores of at least t members, or lower ones others: both
    rates at the pessimistic ends of their intervals, which share the error."""
    n, tail = len(members), (1 - confidence) / 2
    below_in, below_out = (np.searchsorted(np.sort(scores), thresholds) for scores in (members, others))
    right = np.stack([n - below_in, below_out])
    wrong = np.stack([n - below_out, below_in])
    low = np.where(right == 0, 0.0, stats.beta.ppf(tail, np.maximum(right, 1), n - right + 1))
    high = np.where(wrong == n, 1.0, stats.beta.ppf(1 - tail, wrong + 1, np.maximum(n - wrong, 1)))
    return np.log(np.maximum(low - delta, 1e-300) / high)
