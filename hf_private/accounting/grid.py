"""What the accountants share: the privacy loss of a release, the grid that PRV needs, and what fails."""

import math

import numpy as np

MAX_POINTS = 6_000_000  # about 340 bytes each: 2 GB


class AccountantError(RuntimeError):
    """An accountant cannot bound the epsilon of these events; another accountant may."""


def privacy_loss(x: np.ndarray, q: float, sigma: float) -> np.ndarray:
    """log of the ratio of (1 - q) N(0, s^2) + q N(1, s^2) to N(0, s^2), at x."""
    u = (2 * x - 1) / (2 * sigma**2)
    return u if q == 1 else np.logaddexp(math.log1p(-q), math.log(q) + u)


def grid_points(total_steps: int, delta: float, eps_error: float, domain: float) -> float:
    """Points of the grid on [-domain, domain] whose mesh certifies `eps_error` (Theorem 5.5)."""
    return 2 * domain / mesh(total_steps, delta, eps_error)


def mesh(total_steps: int, delta: float, eps_error: float) -> float:
    """The mesh of a grid that certifies `eps_error`."""
    return eps_error / math.sqrt(total_steps / 2 * math.log(12 / (delta / 1000)))
