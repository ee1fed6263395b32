"""Privacy loss distributions of dp-accounting. Importing this takes 0.4 s (scipy.stats), so others do it late."""

import math
from typing import Any

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as package
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy.stats import binom

__all__ = ["PrivacyLossDistribution", "identity", "one_step"]

identity = package.identity


class GaussianOnGrid(GaussianPrivacyLoss):
    """The package's privacy loss of one Poisson-subsampled Gaussian release.

    The package inverts the loss for one point of the grid after the other, in Python; here numpy does it for all.
    """

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        """The hockey-stick divergence at each epsilon (points,), by the package's formula."""
        if np.ndim(epsilon) == 0 or self.sampling_prob == 1:
            return super().get_delta_for_epsilon(epsilon)
        adds = self.adjacency_type == AdjacencyType.ADD
        epsilons = np.asarray(epsilon, float)
        exponents = -epsilons if adds else epsilons
        edge = math.log1p(-self.sampling_prob)  # beyond it lies no loss: delta is 0, or 1 - exp(epsilon)
        deltas = np.zeros_like(epsilons) if adds else -np.expm1(epsilons)
        inside = exponents > edge
        x = self._cutoffs(exponents[inside], adds, edge)
        deltas[inside] = self.mu_upper_cdf(x) - np.exp(epsilons[inside] + self.mu_lower_log_cdf(x))
        return np.clip(deltas, 0, 1)

    def _cutoffs(self, exponents: np.ndarray, adds: bool, edge: float) -> np.ndarray:
        """Where the loss is +-`exponents`: without subsampling it is +-log(1 + (exp(exponents) - 1) / q) there."""
        q = self.sampling_prob
        shifted = exponents + np.log(1 / q)
        at_edge = np.isclose(exponents, edge, rtol=1e-9, atol=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = shifted + np.log1p(-np.exp(np.log(1 / q - 1) - shifted))
        logs = np.where(at_edge, -np.inf, np.where(exponents == 0, 0.0, logs))
        losses: Any = -logs if adds else logs  # the package annotates numbers
        x: Any = self._inverse_privacy_loss_without_subsampling_remove(losses)
        return x + self.sensitivity if adds else x


def one_step(q: float, sigma: float, interval: float, records: int) -> PrivacyLossDistribution:
    """Privacy loss of one step when a person's `records` records, each sampled independently, are added or removed."""
    if records > 1:
        sampled = np.arange(records + 1)
        probabilities = binom.pmf(sampled, records, q)
        return package.from_mixture_gaussian_mechanism(
            sigma, list(sampled), list(probabilities / probabilities.sum()), value_discretization_interval=interval
        )

    def single(adjacency_type: AdjacencyType) -> Any:
        return package._create_pld_pmf_from_monotone_privacy_loss(
            GaussianOnGrid(sigma, sampling_prob=q, adjacency_type=adjacency_type),
            value_discretization_interval=interval,
            use_connect_dots=True,
        )

    return package._pld_for_subsampled_mechanism(single, q)
