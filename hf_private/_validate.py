"""Argument checks that all packages share.

Each check takes its arguments by keyword, so that the message can name them:

>>> positive(clip_norm=-1)
Traceback (most recent call last):
    ...
ValueError: `clip_norm` must be > 0, got -1.
"""

import math
from collections.abc import Collection
from numbers import Real
from typing import Any


def _number(name: str, value: Any, wanted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise ValueError(f"`{name}` must be a number {wanted}, got {value!r}.")
    return float(value)


def positive(**values: Any) -> None:
    """Require numbers greater than 0 (infinity is allowed)."""
    for name, value in values.items():
        if _number(name, value, "> 0") <= 0:
            raise ValueError(f"`{name}` must be > 0, got {value!r}.")


def non_negative(**values: Any) -> None:
    """Require numbers of at least 0 (infinity is allowed)."""
    for name, value in values.items():
        if _number(name, value, ">= 0") < 0:
            raise ValueError(f"`{name}` must be >= 0, got {value!r}.")


def probability(**values: Any) -> None:
    """Require numbers strictly between 0 and 1."""
    for name, value in values.items():
        if not 0 < _number(name, value, "between 0 and 1") < 1:
            raise ValueError(f"`{name}` must be between 0 and 1, got {value!r}.")


def integer_at_least(lower: int, **values: Any) -> None:
    """Require whole numbers of at least `lower`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < lower:
            raise ValueError(f"`{name}` must be a whole number >= {lower}, got {value!r}.")


def one_of(allowed: Collection[Any], **values: Any) -> None:
    """Require one of the allowed values."""
    for name, value in values.items():
        if value not in allowed:
            raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
