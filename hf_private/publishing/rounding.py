"""Numbers of a report or a picture as text. A risk is rounded up: it must never look smaller than it is."""

import math


def percent(share: float) -> str:
    """A share, rounded up to one decimal, or to two below 1 %.

    >>> percent(0.65145), percent(0.00011)
    ('65.2 %', '0.02 %')
    """
    digits = 1 if share >= 0.01 else 2
    return f"{math.ceil(share * 10 ** (digits + 2)) / 10**digits:.{digits}f} %"


def decimals(value: float, digits: int) -> str:
    """A number, rounded up to `digits` decimals.

    >>> decimals(7.99991, 2), decimals(1.2, 4)
    ('8.00', '1.2000')
    """
    return f"{math.ceil(value * 10**digits) / 10**digits:.{digits}f}"
