"""A reader of JSON Schema, as much of it as privacy_schema.json uses: the package needs no other library to check."""

import math
import re
from collections.abc import Iterator
from typing import Any

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}


def violations(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """Where and how `value` breaks `schema`.

    >>> list(violations({"delta": 2}, {"properties": {"delta": {"maximum": 1}}, "required": ["delta", "epsilon"]}))
    ['`epsilon` is missing', '`delta` must be <= 1, got 2']
    """
    name = f"`{where or 'the record'}`"
    if "anyOf" in schema and all(any(True for _ in violations(value, option, where)) for option in schema["anyOf"]):
        yield f"{name} has no allowed form, got {value!r}"
    if "const" in schema and not _same(value, schema["const"]):
        yield f"{name} must be {schema['const']!r}, got {value!r}"
    if "enum" in schema and not any(_same(value, allowed) for allowed in schema["enum"]):
        yield f"{name} must be one of {schema['enum']}, got {value!r}"
    if "type" in schema and not _is(value, schema["type"]):
        yield f"{name} must be of type {schema['type']}, got {value!r}"
        return
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from _out_of_range(value, schema, name)
    elif isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{name} must match {schema['pattern']}, got {value!r}"
    elif isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{name} must have at least {schema['minItems']} items, got {len(value)}"
        for index, item in enumerate(value):
            yield from violations(item, schema.get("items", {}), f"{where}[{index}]")
    elif isinstance(value, dict):
        yield from _in_object(value, schema, where)


def _in_object(value: dict[str, Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    known, more, dot = schema.get("properties", {}), schema.get("additionalProperties", True), "." if where else ""
    for key in schema.get("required", ()):
        if key not in value:
            yield f"`{where}{dot}{key}` is missing"
    for key, item in value.items():
        if key not in known and more is False:
            yield f"`{where}{dot}{key}` is unknown"
        elif key in known or isinstance(more, dict):
            yield from violations(item, known.get(key, more), f"{where}{dot}{key}")


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)  # in Python, True == 1


def _is(value: Any, types: str | list[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in ([types] if isinstance(types, str) else types)
    if isinstance(value, float) and not math.isfinite(value):
        return False
    names = [types] if isinstance(types, str) else types
    return any(isinstance(value, TYPES[name]) for name in names)


def _out_of_range(value: float, schema: dict[str, Any], name: str) -> Iterator[str]:
    bounds = (
        ("minimum", ">=", lambda bound: value >= bound),
        ("maximum", "<=", lambda bound: value <= bound),
        ("exclusiveMinimum", ">", lambda bound: value > bound),
        ("exclusiveMaximum", "<", lambda bound: value < bound),
    )
    for key, sign, holds in bounds:
        if key in schema and not holds(schema[key]):
            yield f"{name} must be {sign} {schema[key]}, got {value!r}"
