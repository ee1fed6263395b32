"""How often each code occurs in private records, with noise, charged to the ledger of the run that follows.

Guarantee: one unit of privacy (a record, or all records of a person) adds counts whose squares sum to at most 1, so
Gaussian noise of standard deviation s is one release with noise multiplier s on the full batch. It is in the ledger
before a count is looked at, and the budget of the run in the same folder covers both.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_private import DPConfig
from hf_private.mechanism.noise import NoiseSource
from hf_private.spending.spending import Spending
from hf_private.spending.stated_unit import group_size

NAME = "counts of codes"


def exact_counts(found: Sequence[Hashable], listed: Sequence[Hashable], units: Sequence[Hashable]) -> torch.Tensor:
    """Each unit's frequencies of the listed codes, added up. Other codes count for nothing.

    >>> exact_counts(["a", "b", "b", "z"], listed=["a", "b"], units=[1, 1, 2, 3])
    tensor([0.5000, 1.5000], dtype=torch.float64)
    """
    sizes: dict[Hashable, int] = {}
    for unit in units:
        sizes[unit] = sizes.get(unit, 0) + 1
    place = {code: n for n, code in enumerate(listed)}
    total = torch.zeros(len(listed), dtype=torch.float64)
    for code, unit in zip(found, units, strict=True):
        if code in place:
            total[place[code]] += 1 / sizes[unit]
    return total


def noised_counts(
    found: Sequence[Hashable],
    listed: Sequence[Hashable],
    noise: float,
    folder: str,
    config: DPConfig,
    units: Sequence[Hashable] | None = None,
    key: bytes | None = None,
) -> list[float]:
    """Charge one release to the ledger in `folder`, and draw it: counts of the `listed` codes, none below 0.

    Args:
        found: The code of each record.
        listed: The codes to count: a public list.
        noise: Standard deviation of the noise.
        config: Of the run that follows: its budget, and its unit.
        units: Whose each record is; default: each is a unit of its own.
        key: For tests. The release is then NOT PRIVATE.
    """
    source = NoiseSource("secure", key)
    spending = Spending(
        folder, config.target_delta, target_epsilon=config.target_epsilon, target_risk=config.target_risk,
        accountant=config.accountant, records_per_unit=group_size(config.to_dict()),
    )  # fmt: skip
    units = range(len(found)) if units is None else units
    number = len(set(units)) if config.draws_units else len(found)
    settings: dict[str, Any] = {
        **config.to_dict(),
        "method": {"name": NAME},
        "reproducible": source.reproducible,
        "expected_batch_size": number,  # all of them
        "num_units" if config.draws_units else "num_records": number,
    }
    with spending.open(1.0, 1, lambda sigma: (sigma,), noise, settings=settings) as run:
        run.charge(replace(run.plan.event, steps=1))
        counts = exact_counts(found, listed, units)
        source.add_(0, {NAME: counts}, {NAME: noise})
    return counts.clamp(min=0).tolist()
