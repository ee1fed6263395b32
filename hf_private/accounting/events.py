"""Events: how the mechanism, the ledger and the accountants describe private steps."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hf_private._validate import integer_at_least, non_negative, positive


@dataclass(frozen=True)
class Event:
    """One or more identical private steps: a Poisson sample, and the Gaussian releases made on that same sample.

    Args:
        sample_rate: probability q that a record is in the sample; 1.0 is the full batch.
        releases: noise multiplier (noise std / sensitivity) of each release. Several releases on one sample act as
            one with 1/s^2 = sum of 1/s_i^2; counting them as separate steps would under-report epsilon.
        steps: number of such steps.
        sampling: only "poisson" has a finite epsilon.

    >>> round(Event(0.01, (2**0.5, 2**0.5)).noise_multiplier, 6)
    1.0
    """

    sample_rate: float
    releases: tuple[float, ...]
    steps: int = 1
    sampling: str = "poisson"

    def __post_init__(self) -> None:
        positive(sample_rate=self.sample_rate)
        if self.sample_rate > 1:
            raise ValueError(f"`sample_rate` must be in (0, 1], got {self.sample_rate!r}.")
        if isinstance(self.releases, str) or not isinstance(self.releases, Iterable):
            raise ValueError(f"`releases` must be a tuple of noise multipliers, got {self.releases!r}.")
        releases = tuple(self.releases)
        non_negative(**{f"releases[{i}]": sigma for i, sigma in enumerate(releases)})
        if not releases or math.inf in releases:
            raise ValueError(f"`releases` must hold at least one noise multiplier, all finite, got {releases!r}.")
        if not isinstance(self.sampling, str):
            raise ValueError(f"`sampling` must be a string, got {self.sampling!r}.")
        steps = int(self.steps) if isinstance(self.steps, np.integer) else self.steps
        integer_at_least(0, steps=steps)
        # Plain Python numbers: JSON and the accountants need them.
        object.__setattr__(self, "sample_rate", float(self.sample_rate))
        object.__setattr__(self, "releases", tuple(map(float, releases)))
        object.__setattr__(self, "steps", steps)

    @property
    def noise_multiplier(self) -> float:
        """The multiplier of one release that is equivalent to all of them; 0.0 if one of them has no noise."""
        if len(self.releases) == 1 or 0 in self.releases:
            return min(self.releases)
        return 1 / math.hypot(*(1 / sigma for sigma in self.releases))

    def to_dict(self) -> dict[str, Any]:
        """JSON form, read back by `from_dict`."""
        return {**asdict(self), "releases": list(self.releases)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Event":
        """Read what `to_dict` wrote. Unknown or missing keys are errors."""
        keys = set(cls.__dataclass_fields__)
        if not isinstance(data, dict) or data.keys() != keys:
            raise ValueError(f"An event must be a dict with the keys {', '.join(sorted(keys))}, got {data!r}.")
        return cls(**data)


def compact(events: Iterable[Event]) -> tuple[Event, ...]:
    """Merge events that differ only in their number of steps.

    >>> compact([Event(0.1, (1.0,)), Event(0.1, (1.0,), steps=4)])
    (Event(sample_rate=0.1, releases=(1.0,), steps=5, sampling='poisson'),)
    """
    steps: dict[tuple, int] = {}
    for event in events:
        key = (event.sample_rate, event.releases, event.sampling)
        steps[key] = steps.get(key, 0) + event.steps
    return tuple(Event(rate, releases, n, sampling) for (rate, releases, sampling), n in steps.items())
