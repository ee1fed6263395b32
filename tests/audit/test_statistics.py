"""The attacks' arithmetic: golden values, and bounds that hold as often as they say."""

import numpy as np
import pytest
from scipy import stats

from hf_private.audit import statistics as audit


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "epsilon"),
    [
        (1000, 100, 100, 1e-5, 3.465376),
        (1000, 100, 95, 1e-5, 2.165176),
        (1000, 200, 180, 1e-5, 1.796285),
        (1000, 1000, 600, 1e-5, 0.297227),
        (1000, 1000, 500, 1e-5, 0.0),
        (500, 50, 50, 1e-5, 2.770507),
        (200, 40, 40, 1e-5, 2.548240),
        (2000, 200, 200, 1e-5, 4.139242),
        (5000, 500, 500, 1e-5, 4.977758),
        (1000, 100, 100, 0.0, 3.492965),
    ],
)
def test_one_run_golden_values(canaries: int, guesses: int, correct: int, delta: float, epsilon: float) -> None:
    assert audit.one_run_epsilon(canaries, guesses, correct, delta) == pytest.approx(epsilon, abs=1e-6)


def test_one_run_without_delta_is_a_binomial_tail() -> None:
    """With delta = 0 the bound is the Clopper-Pearson bound of the rate of right guesses, as log odds."""
    low = stats.binomtest(90, 100).proportion_ci(0.90, "exact").low  # one-sided at 95 %
    assert audit.one_run_epsilon(300, 100, 90, 0.0) == pytest.approx(np.log(low / (1 - low)), abs=1e-6)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_a_private_run_is_rarely_accused_and_a_worse_one_often(epsilon: float) -> None:
    """Randomised response at epsilon, the worst case of the theorem; the control answers at three times that."""
    generator, accused = np.random.default_rng(0), {}
    for actual in (epsilon, 3 * epsilon):
        accused[actual] = 0
        for _ in range(200):
            coins = generator.random(400) < 0.5
            truthful = generator.random(400) < 1 / (1 + np.exp(-actual))
            scores = np.where(truthful == coins, 1.0, 0.0) + 1e-3 * generator.random(400)
            accused[actual] += audit.guess_coins(scores, coins, 1e-6).contradicts(epsilon)
    assert accused[epsilon] <= 20  # 5 % of 200 are 10; 20 has probability 0.002
    assert accused[3 * epsilon] > 100


def test_guesses_are_fixed_in_advance_and_split_evenly() -> None:
    coins = np.array([True] * 50 + [False] * 50)
    found = audit.guess_coins(np.arange(100.0)[::-1], coins, 1e-5, guesses=20)
    assert (found.guesses, found.correct, found.highest) == (20, 20, found.epsilon)
    assert audit.guess_coins(np.arange(100.0), coins, 1e-5, guesses=20).correct == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((100, 200, 10, 1e-5), "guesses"),
        ((100, 50, 60, 1e-5), "correct"),
        ((0, 1, 1, 1e-5), "canaries"),
        ((100, 50, 40, 1.0), "delta"),
    ],
)
def test_wrong_counts_are_named(arguments: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=f"`{named}`"):
        audit.one_run_epsilon(*arguments)


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (10, 10), (520, 1000)])
def test_clopper_pearson(successes: int, trials: int) -> None:
    exact = stats.binomtest(successes, trials).proportion_ci(0.95, "exact")
    assert audit.clopper_pearson(successes, trials) == pytest.approx((exact.low, exact.high), abs=1e-12)


def test_auc_and_rates_by_counting() -> None:
    generator = np.random.default_rng(1)
    members, others = generator.integers(0, 9, 40) + 2.0, generator.integers(0, 9, 60) + 0.0
    pairs = members[:, None] - others
    assert audit.auc(members, others) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    wanted = max((members >= t).mean() for t in range(20) if (others >= t).mean() <= 0.1)
    assert audit.tpr_at(members, others, 0.1) == pytest.approx(wanted)
    false, true = audit.roc(members, others)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1) and (np.diff(true) >= 0).all()


def test_equal_scores_are_near_one_half_as_often_as_the_interval_says() -> None:
    """The threshold comes from the other half: with one's own it would find what is not there (the control)."""
    generator, outside, own = np.random.default_rng(2), 0, []
    for seed in range(200):
        members, others = generator.normal(size=(2, 60))
        found = audit.infer_membership(members, others, 1e-5, seed)
        outside += not found.interval[0] <= 0.5 <= found.interval[1]
        thresholds = np.concatenate([members, others])
        own.append(max(((members >= t).mean() + (others < t).mean()) / 2 for t in thresholds))
    assert outside <= 20
    assert np.mean(own) > 0.55


@pytest.mark.parametrize("side", [1, -1])
def test_the_bound_of_epsilon_holds_and_is_not_empty(side: int) -> None:
    """Members score above 0 with e^eps / (1 + e^eps), others with the opposite: epsilon is 2, either way round."""
    generator, bounds = np.random.default_rng(3), []
    for _ in range(100):
        right = generator.random((2, 1000)) < 1 / (1 + np.exp(-2.0))
        members, others = np.where(right[0], 1.0, -1.0), np.where(right[1], -1.0, 1.0)
        bounds.append(audit.infer_membership(members, others, 1e-6, confidence=0.95).epsilon)
    assert np.mean(np.array(bounds) > 2.0) <= 0.1
    assert np.median(bounds) > 1.4


def test_too_few_records_and_broken_losses_are_refused() -> None:
    with pytest.raises(ValueError, match="`members` and `others`"):
        audit.infer_membership(np.zeros(3), np.zeros(9), 1e-5)
    with pytest.raises(ValueError, match="^`others`"):
        audit.infer_membership(np.zeros(9), np.full(9, np.nan), 1e-5)
