"""Epsilon and attack rates by a single accountant, to compare accountants with each other and with golden values."""

from collections.abc import Iterable

import numpy as np

from hf_private.accounting import accountants, budget
from hf_private.accounting.accountants import Losses, Settings
from hf_private.accounting.events import Event
from hf_private.accounting.prv import compose
from hf_private.accounting.risk import _on_a_grid
from hf_private.accounting.tradeoff import Profile, hockey_stick


def epsilon_of(
    events: Iterable[Event], delta: float, accountant: str = "prv", eps_error: float | None = None
) -> float:
    """Upper bound of epsilon by one accountant alone (by the others if it fails)."""
    return budget._upper(accountant, budget.settings_of(events), delta, eps_error)


def prv_losses(settings: Settings, delta: float, eps_error: float) -> Losses:
    """PRV's composed losses of removing a record: right up to `eps_error`, except for a mass of delta / 1000."""
    composed = compose(settings, delta, eps_error, accountants._domain(settings, delta, eps_error))
    return Losses(np.asarray(composed.domain.ts(), float), np.asarray(composed.pmf, float), 0.0)


def prv_profile(settings: Settings, delta: float) -> tuple[Profile, float]:
    """A second opinion on the profile, and epsilon at `delta`: another code path than PLD's.

    From removals alone, since sup_S P(S) - e^-eps Q(S) = 1 - e^-eps (1 - add(eps)). The losses are right up to
    `width`, except for a mass of `error` (Theorem 5.5 of arXiv:2106.02848), and that bounds the divergence at
    epsilons of either sign. For additions the bound stays above `width`; RDP's is better from there.
    """
    error, width = delta / 1000, accountants.default_eps_error(settings, delta)
    losses, curve = prv_losses(settings, delta, width), accountants.composed_rdp(settings)

    def both(eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        remove = hockey_stick(*losses, eps - width) + error
        at_negative = hockey_stick(*losses, -eps - width) + error
        return remove, np.minimum(1 - np.exp(eps) * (1 - at_negative), accountants.rdp_to_delta(curve, eps))

    return _on_a_grid(both, delta, float(losses.values[-1]))
