"""The two unit samplings side by side, for given numbers of records per unit. Nothing but these numbers is read.

Both draw the same share q and look at the same expected number of records in a step:

    units      each unit with probability q, its mean gradient clipped; priced as one record
    records    each of the k eligible records of a unit with probability q, each clipped; priced as a group of k

Which one has less noise for its signal depends on how alike the gradients of a unit's records are. If they are equal,
k of them add up to k clipped gradients, while their mean is clipped to one. If they have little in common but a small
part that all records share, which is what there is to learn, the rest averages out before the mean is clipped: it then
keeps sqrt(k) times as much of that part as a clipped record does.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_private._validate import integer_at_least

from .budget import calibrate


@dataclass(frozen=True)
class UnitPlan:
    """One way to draw at equal epsilon.

    Attributes:
        sampling: "units" or "records".
        k: `records_per_unit`.
        batch: `expected_batch_size`, in units or in records.
        rows: Expected number of records in a step, which is what it costs to compute.
        noise_multiplier: What keeps the budget.
        alike: Noise over signal per noised number, if the gradients of a unit's records are equal.
        unlike: The same, if they share only a small part.
    """

    sampling: str
    k: int
    batch: int
    rows: float
    noise_multiplier: float
    alike: float
    unlike: float


def compare_samplings(
    counts: Iterable[int],
    batch: int,
    steps: int,
    epsilon: float,
    delta: float,
    ks: Sequence[int] = (1, 2, 4, 8),
    accountant: str = "prv",
) -> list[UnitPlan]:
    """Both samplings for each k.

    Args:
        counts: Number of records of each unit.
        batch: Expected number of units in a step, where units are drawn; the share q is the same where records are.

    >>> one, other = compare_samplings([3, 1, 2, 2] * 100, 40, 100, 8.0, 1e-5, ks=[1], accountant="rdp")
    >>> one.noise_multiplier == other.noise_multiplier  # a single record of each unit: the same mechanism
    True
    """
    sizes = Counter(counts)
    for size in sizes:
        integer_at_least(1, counts=size)
    num_units = sum(sizes.values())
    q = batch / num_units
    drawn_records = max(1, round(q * sum(size * number for size, number in sizes.items())))
    found = []
    one = calibrate(epsilon, delta, q, steps, accountant=accountant)
    for k in ks:
        rows = q * sum(min(size, k) * number for size, number in sizes.items())
        roots = q * sum(math.sqrt(min(size, k)) * number for size, number in sizes.items())
        found.append(UnitPlan("units", k, batch, rows, one, one / batch, one / roots))
        sigma = one if k == 1 else calibrate(epsilon, delta, q, steps, accountant=accountant, records_per_unit=k)
        found.append(UnitPlan("records", k, drawn_records, rows, sigma, sigma / rows, sigma / rows))
    return found
