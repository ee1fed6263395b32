"""A strict JSON parser, and violations of a JSON Schema as short lines, also for hostile files."""

import json
import math
from collections.abc import Iterator
from reprlib import repr as short
from typing import Any

from jsonschema import Draft202012Validator

LONGEST = 200  # letters of a place in a statement, and of a message; files come from strangers


def parse_json(text: str) -> Any:
    """Parse JSON. A duplicate key is an error: two readers could see two different values.

    >>> parse_json('{"epsilon": 3.0, "epsilon": 0.1}')
    Traceback (most recent call last):
        ...
    ValueError: duplicate key `epsilon` in one object
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key `{key[:80]}` in one object")
        found[key] = value
    return found


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:80]} is not a finite number")
    return value


def violations(value: Any, schema: dict[str, Any]) -> Iterator[str]:
    """Violations of `schema` by `value`.

    >>> list(violations({"delta": 2}, {"properties": {"delta": {"maximum": 1}}, "required": ["delta", "epsilon"]}))
    ['`delta` must have `maximum` 1, got 2', "`the statement`: 'epsilon' is a required property"]
    """
    for error in Draft202012Validator(schema).iter_errors(value):
        keys = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in error.absolute_path)
        where = "".join(keys).removeprefix(".")[:LONGEST] or "the statement"
        if error.validator in ("required", "additionalProperties"):
            yield f"`{where}`: {error.message[:LONGEST]}"
        else:
            limit = short(error.validator_value)
            yield f"`{where}` must have `{error.validator}` {limit}, got {short(error.instance)}"
