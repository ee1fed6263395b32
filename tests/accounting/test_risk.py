"""Bounds on attackers against closed forms, numerical integration, another accountant and real attacks."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy.stats import beta, binom, norm

from hf_private.accounting import accountants
from hf_private.accounting.composition import SHAPES, _gamma
from hf_private.accounting.events import Event
from hf_private.accounting.risk import FALSE_ALARMS, Risk, _rdp, risk
from hf_private.accounting.tradeoff import Profile, gaussian_profile, hockey_stick
from tests.support.budget import prv_losses, prv_profile
from tests.support.golden import Q

PRIORS = (0.01, 0.1, 0.5, 0.8, 0.99)
RUN = Event(0.014848, (0.539915,), 204)  # SST-2, batches of 1000, 3 epochs, epsilon 8


# ---- oracle: two densities on a grid, and the attack that orders outcomes by their likelihood ratio


class Densities:
    """P(outcome) with and Q(outcome) without the record, on cells of a fine grid."""

    def __init__(self, with_record: np.ndarray, without: np.ndarray) -> None:
        p, q = with_record.ravel() + 1e-300, without.ravel() + 1e-300
        order = np.argsort(-p / q)
        self.p, self.q = p[order], q[order]
        self.curve = np.append(0, self.q.cumsum()), np.append(0, self.p.cumsum())
        assert self.p.sum() == pytest.approx(1, abs=1e-6) and self.q.sum() == pytest.approx(1, abs=1e-6)

    @property
    def advantage(self) -> float:
        return float(np.maximum(self.p - self.q, 0).sum())

    def found(self, alarms: float) -> float:
        return float(np.interp(alarms, *self.curve))

    def bayes(self, prior: float) -> float:
        return float(np.maximum(prior * self.p, (1 - prior) * self.q).sum())

    def delta(self, eps: float) -> float:
        remove, add = self.p - math.exp(eps) * self.q, self.q - math.exp(eps) * self.p
        return float(max(np.maximum(remove, 0).sum(), np.maximum(add, 0).sum()))


def cells(sigma: float, shifts: int, points: int) -> np.ndarray:
    """Probabilities of the cells of a grid under N(shift, sigma^2), for shifts 0..shifts: (shifts + 1, points)."""
    edges = np.linspace(-9 * sigma, shifts + 9 * sigma, points + 1)
    return np.diff(norm.cdf(edges[None], np.arange(shifts + 1)[:, None], sigma), axis=1)


def one_step(q: float, sigma: float, points: int, records: int = 1) -> tuple[np.ndarray, np.ndarray]:
    masses = cells(sigma, records, points)
    return binom.pmf(np.arange(records + 1), records, q) @ masses, masses[0]


def product(*steps: tuple[np.ndarray, np.ndarray]) -> Densities:
    (p, q), (p2, q2) = steps
    return Densities(np.outer(p, p2), np.outer(q, q2))


def one_sample_two_releases(q: float, first: float, second: float, points: int) -> Densities:
    absent, present = cells(first, 1, points)
    absent2, present2 = cells(second, 1, points)
    without = np.outer(absent, absent2)
    return Densities((1 - q) * without + q * np.outer(present, present2), without)


SMALL = {
    "one step": (lambda: Densities(*one_step(0.2, 0.7, 40_000)), [Event(0.2, (0.7,))], 1),
    "two steps": (lambda: product(*[one_step(0.1, 0.6, 600)] * 2), [Event(0.1, (0.6,), 2)], 1),
    "two phases": (
        lambda: product(one_step(0.3, 0.8, 600), one_step(0.05, 0.5, 600)),
        [Event(0.3, (0.8,)), Event(0.05, (0.5,))],
        1,
    ),
    "two releases on one sample": (
        lambda: one_sample_two_releases(0.15, 1.0, 1.4, 600),
        [Event(0.15, (1.0, 1.4))],
        1,
    ),
    "three records": (lambda: Densities(*one_step(0.2, 0.9, 40_000, 3)), [Event(0.2, (0.9,))], 3),
    "two records, two steps": (
        lambda: product(*[one_step(0.1, 0.8, 600, 2)] * 2),
        [Event(0.1, (0.8,), 2)],
        2,
    ),
}


@pytest.mark.parametrize("case", SMALL)
def test_bounds_are_tight_where_densities_can_be_integrated(case: str) -> None:
    densities, events, records = SMALL[case]
    exact, bound = densities(), risk(events, 1e-5, records)
    assert bound.accountant == "pld"

    def just_above(bound: float, exact: float) -> bool:
        return exact - 1e-6 <= bound <= exact + 1e-3  # an integral on a grid may miss a millionth

    assert just_above(bound.advantage, exact.advantage)
    assert just_above(bound.accuracy, (1 + exact.advantage) / 2)
    for rate, found in (*bound.tpr.items(), *bound.curve):
        assert just_above(found, exact.found(rate)), rate
    for prior in PRIORS:
        assert just_above(bound.bayes_accuracy(prior), exact.bayes(prior)), prior
    epsilons = np.linspace(0, bound.mu_up_to_epsilon, 100)
    deltas = np.array([exact.delta(eps) for eps in epsilons])
    assert np.all(gaussian_profile(bound.mu, epsilons) >= deltas - 1e-6)
    assert np.any(gaussian_profile(0.99 * bound.mu, epsilons) < deltas), "a mu that is 1 % smaller would do too"


@pytest.mark.parametrize(("sigma", "steps"), [(5.0, 1), (1.0, 1), (0.4, 1), (20.0, 100)])
def test_gaussian_has_closed_forms(sigma: float, steps: int) -> None:
    mu, bound = math.sqrt(steps) / sigma, risk([Event(1.0, (sigma,), steps)], 1e-5)
    exact = {
        "advantage": (bound.advantage, 2 * norm.cdf(mu / 2) - 1),
        "mu": (bound.mu, mu),
        **{rate: (found, norm.cdf(norm.ppf(rate) + mu)) for rate, found in bound.tpr.items()},
    }
    for name, (value, closed) in exact.items():
        assert closed <= value <= closed + 1e-4, name


def test_golden_run() -> None:
    bound = risk([RUN], 1e-5)
    assert bound.advantage == pytest.approx(0.30298, abs=1e-5)
    assert bound.tpr[0.01] == pytest.approx(0.10264, abs=1e-5)
    assert bound.mu == pytest.approx(1.6642, abs=1e-3)
    assert bound.mu_up_to_epsilon == pytest.approx(7.990, abs=2e-3)
    assert bound.gaussian == f"mu 1.67 (for epsilon from 0 to {bound.mu_up_to_epsilon:.3f})"
    assert "65.2 %" in str(bound) and "10.3 %" in str(bound)


# ---- a second opinion


@pytest.mark.parametrize("events", [[RUN], [Event(Q, (1.25,), 680)], [Event(Q, (1.5,), 40), Event(0.1, (2.0,), 50)]])
def test_prv_and_pld_agree(events: list[Event]) -> None:
    settings = tuple((e.sample_rate, e.noise_multiplier, e.steps) for e in events)
    pld = risk(events, 1e-5)
    prv, _ = prv_profile(settings, 1e-5)
    rdp, _ = _rdp(settings, 1e-5, 1)
    assert pld.accountant == "pld"
    for mine, second, loose in zip(pld.tpr.values(), prv.found(FALSE_ALARMS), rdp.found(FALSE_ALARMS), strict=True):
        assert mine < second < mine + 0.01, "PRV adds its certified error"
        assert second < loose
    assert pld.advantage < prv.advantage < min(pld.advantage + 0.01, rdp.advantage)
    removals = Profile(prv.epsilons, prv.remove, prv.remove)
    assert pld.mu <= removals.mu(pld.mu_up_to_epsilon) <= pld.mu * 1.02
    for prior in PRIORS:
        assert -1e-12 < prv.bayes_accuracy(prior) - pld.bayes_accuracy(prior) < 0.01

    width = accountants.default_eps_error(settings, 1e-5)
    losses = prv_losses(settings, 1e-5, width)
    for eps in (0.0, 0.5, 2.0):
        lower = hockey_stick(*losses, np.array([eps + width]))[0] - 1e-8
        assert lower <= np.interp(math.exp(eps), np.exp(pld.profile.epsilons), pld.profile.remove)


def test_the_profile_is_dp_accountings() -> None:
    """The losses are read from private attributes of dp-accounting: its own public answer must follow from them."""
    profile = risk([RUN], 1e-5).profile
    official = accountants.loss_distribution(((0.014848, 0.539915, 204),))
    for i in range(0, len(profile.epsilons), 500):
        eps, remove, add = profile.epsilons[i], profile.remove[i], profile.add[i]
        assert max(remove, add) == pytest.approx(official.get_delta_for_epsilon(float(eps)), abs=2e-12)


# ---- attacks that are carried out


def log_ratio(x: np.ndarray, q: float, sigma: float) -> np.ndarray:
    return accountants.privacy_loss(x, q, sigma).sum(axis=0)


def beats(bound: Risk, q: float, charged: float, added: float, steps: int) -> bool:
    """Whether a likelihood-ratio attack, with 99.9 % confidence, does better than `bound` allows."""
    rng, n = np.random.default_rng(7), 60_000

    def scores(member: bool) -> np.ndarray:
        signal = rng.random((steps, n)) < q if member else 0.0
        return log_ratio(signal + added * rng.standard_normal((steps, n)), q, charged)

    calibration, members, others = scores(False), scores(True), scores(False)
    for rate in (0.5, *FALSE_ALARMS):  # thresholds do not depend on what they are evaluated on
        threshold = np.quantile(calibration, 1 - rate)
        found, alarms = int((members > threshold).sum()), int((others > threshold).sum())
        lower = beta.ppf(0.0005, found, n - found + 1)
        upper = beta.ppf(0.9995, alarms + 1, n - alarms)
        if lower > bound.profile.found([upper])[0] or lower - upper > bound.advantage:
            return True
    return False


@pytest.mark.parametrize(("q", "sigma", "steps"), [(0.1, 0.7, 20), (0.3, 1.5, 30)])
def test_no_attack_beats_the_bounds(q: float, sigma: float, steps: int) -> None:
    bound = risk([Event(q, (sigma,), steps)], 1e-5)
    assert not beats(bound, q, sigma, sigma, steps)
    assert beats(bound, q, sigma, 0.8 * sigma, steps), "too little noise must be noticed"


# ---- tuning


def test_a_fixed_number_of_runs_is_composed() -> None:
    assert risk([RUN], 1e-5, runs=3) == risk([RUN, RUN, RUN], 1e-5)


@pytest.mark.parametrize("law", ["geometric", "logarithmic"])
def test_best_of_a_random_number_of_runs(law: str) -> None:
    """The oracle: each run releases x ~ N(member, sigma^2), and the largest is published."""
    sigma, mean = 2.0, 3.0
    bound = risk([Event(1.0, (sigma,))], 1e-5, runs=mean, law=law)
    x = np.linspace(-20, 20, 20_001)

    def largest(member: float) -> np.ndarray:
        """CDF of the maximum: E[F(x)^K], summed over K."""
        gamma, k = _gamma(SHAPES[law], mean), np.arange(1, 400)
        chances = gamma * (1 - gamma) ** (k - 1) if law == "geometric" else (1 - gamma) ** k / k
        chances /= chances.sum()
        assert (chances * k).sum() == pytest.approx(mean, rel=1e-3)
        return (chances[:, None] * norm.cdf(x, member, sigma)[None] ** k[:, None]).sum(axis=0)

    exact = Densities(np.diff(largest(1.0)), np.diff(largest(0.0)))
    assert exact.advantage <= bound.advantage < 1
    for rate, found in bound.tpr.items():
        assert exact.found(rate) <= found
    assert bound.accountant == "rdp" and law in bound.note
    assert bound.advantage > risk([Event(1.0, (sigma,))], 1e-5).advantage


def test_tuning_of_a_persons_records_is_bounded_too() -> None:
    one, two = (risk([Event(0.1, (2.0,), 10)], 1e-5, k, runs=2.0, law="geometric").advantage for k in (1, 2))
    assert one < two < 1


# ---- limits


def test_without_noise_everything_is_known() -> None:
    for events in ([Event(0.1, (0.0,))], [RUN, Event(0.1, (1.0,), sampling="shuffled")], [Event(0.1, (1.0, 0.0))]):
        bound = risk(events, 1e-5)
        assert (bound.advantage, bound.accuracy, bound.mu) == (1.0, 1.0, math.inf)
        assert set(bound.tpr.values()) == {1.0} and bound.bayes_accuracy(0.01) == 1.0
        assert bound.note and json.dumps(bound.to_dict(), allow_nan=False)


def test_without_steps_there_is_only_chance() -> None:
    for events in ([], [Event(0.1, (0.0,), steps=0)]):
        bound = risk(events, 1e-5)
        assert (bound.advantage, bound.accuracy, bound.mu) == (0.0, 0.5, 0.0)
        assert bound.tpr == {rate: rate for rate in FALSE_ALARMS}
        assert bound.bayes_accuracy(0.2) == 0.8
        assert json.dumps(bound.to_dict(), allow_nan=False)


def test_without_a_target_delta_there_is_no_mu() -> None:
    bound, same = risk([RUN], None), risk([RUN], 1e-5)
    assert bound.mu is None and bound.mu_up_to_epsilon is None and "mu 1" not in bound.gaussian
    assert bound.advantage == same.advantage
    assert bound.tpr[0.01] == pytest.approx(same.tpr[0.01], abs=1e-5)


def test_a_target_delta_above_the_advantage_leaves_one_point() -> None:
    bound = risk([Event(1.0, (100.0,))], 0.1)
    assert bound.mu_up_to_epsilon == 0 and bound.mu == pytest.approx(0.01, rel=1e-4)


def test_more_steps_and_less_noise_never_lower_a_bound() -> None:
    bounds = [risk([Event(0.05, (sigma,), steps)], 1e-5) for steps, sigma in ((10, 1.0), (100, 1.0), (100, 0.7))]
    for less, more in itertools.pairwise(bounds):
        assert less.advantage < more.advantage and less.mu < more.mu
        assert all(less.tpr[rate] < more.tpr[rate] for rate in FALSE_ALARMS)
        assert all(a[1] <= b[1] for a, b in zip(less.curve, more.curve, strict=True))


def test_where_pld_fails_rdp_bounds_and_the_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise accountants.AccountantError("needs a grid")

    exact = risk([Event(0.07, (1.1,), 12)], 1e-5)
    monkeypatch.setattr(accountants, "pld_losses", fail)
    bound = risk([Event(0.07, (1.1,), 13)], 1e-5)
    assert bound.accountant == "rdp" and "needs a grid" in bound.note
    assert exact.advantage < bound.advantage < 1
    hopeless = risk([Event(0.5, (0.01,), 1000)], 1e-5)
    assert hopeless.advantage == pytest.approx(1) and hopeless.mu == math.inf


def test_displays_round_up() -> None:
    bound = risk([RUN], 1e-5)
    shown = bound.to_dict()
    assert bound.advantage <= shown["advantage"] < bound.advantage + 1e-4
    assert bound.mu <= shown["mu"] < bound.mu + 1e-4
    assert bound.tpr[0.001] <= shown["tpr_at_fpr"]["0.001"] < bound.tpr[0.001] + 1e-4
    assert shown["mu_up_to_epsilon"] == bound.mu_up_to_epsilon
    percent = float(str(bound).split(" %")[0].split()[-1])
    assert 100 * bound.accuracy <= percent < 100 * bound.accuracy + 0.1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"target_delta": 1.5}, "target_delta"),
        ({"records_per_unit": 0}, "records_per_unit"),
        ({"law": "lucky"}, "law"),
        ({"runs": 2.5}, "runs"),
        ({"runs": 1.0, "law": "geometric"}, "runs"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        risk([RUN], **{"target_delta": 1e-5, **arguments})
    with pytest.raises(ValueError, match="`prior`"):
        risk([RUN], 1e-5).bayes_accuracy(0.0)
