"""A strict JSON parser, and a reader of JSON Schema, as much of it as privacy_schema.json uses."""

import json
import math
import re
from collections.abc import Callable, Iterator
from reprlib import repr as short
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


def parse_json(text: str) -> Any:
    """Parse JSON. A key that stands twice is an error: two readers could see two different values.

    >>> parse_json('{"epsilon": 3.0, "epsilon": 0.1}')
    Traceback (most recent call last):
        ...
    ValueError: the key `epsilon` stands twice in one object
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key `{key[:80]}` stands twice in one object")
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def violations(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """Where and how `value` breaks `schema`.

    >>> list(violations({"delta": 2}, {"properties": {"delta": {"maximum": 1}}, "required": ["delta", "epsilon"]}))
    ['`epsilon` is missing', '`delta` must be <= 1, got 2']
    """
    name = f"`{where or 'the statement'}`"
    got = f"got {short(value)}"
    if "anyOf" in schema and all(any(True for _ in violations(value, option, where)) for option in schema["anyOf"]):
        yield f"{name} has no allowed form, {got}"
    if "const" in schema and not _same(value, schema["const"]):
        yield f"{name} must be {schema['const']!r}, {got}"
    if "enum" in schema and not any(_same(value, allowed) for allowed in schema["enum"]):
        yield f"{name} must be one of {schema['enum']}, {got}"
    if "type" in schema and not _is(value, schema["type"]):
        yield f"{name} must be of type {schema['type']}, {got}"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _out_of_range(value, schema, name)
    elif isinstance(value, str):
        if len(value) > schema.get("maxLength", math.inf):
            yield f"{name} must have at most {schema['maxLength']} letters, {got}"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{name} must match {schema['pattern']}, {got}"
    elif isinstance(value, list):
        yield from _in_array(value, schema, where)
    elif isinstance(value, dict):
        yield from _in_object(value, schema, where)


def _in_array(value: list[Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    if len(value) < schema.get("minItems", 0):
        yield f"`{where}` must have at least {schema['minItems']} items, got {len(value)}"
    if len(value) > schema.get("maxItems", math.inf):
        yield f"`{where}` must have at most {schema['maxItems']} items, got {len(value)}"
    for index, item in enumerate(value):
        yield from violations(item, schema.get("items", {}), f"{where}[{index}]")


def _in_object(value: dict[str, Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    known, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    prefix = f"{where}." if where else ""
    for key in schema.get("required", ()):
        if key not in value:
            yield f"`{prefix}{key}` is missing"
    if len(value) > schema.get("maxProperties", math.inf):
        yield f"`{where}` must have at most {schema['maxProperties']} keys, got {len(value)}"
    for key, item in value.items():
        path = f"{prefix}{key[:80]}"
        yield from violations(key, schema.get("propertyNames", {}), f"{path} (its name)")
        if key not in known and more is False:
            yield f"`{path}` is unknown"
        elif key in known or isinstance(more, dict):
            yield from violations(item, known.get(key, more), path)


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)  # in Python, True == 1


def _is(value: Any, types: str | list[str]) -> bool:
    names = [types] if isinstance(types, str) else types
    if isinstance(value, bool):
        return "boolean" in names
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return any(isinstance(value, TYPES[name]) for name in names)


def _out_of_range(value: float, schema: dict[str, Any], name: str) -> Iterator[str]:
    bounds: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
        ("minimum", ">=", lambda bound: value >= bound),
        ("maximum", "<=", lambda bound: value <= bound),
        ("exclusiveMinimum", ">", lambda bound: value > bound),
        ("exclusiveMaximum", "<", lambda bound: value < bound),
    )
    for key, sign, holds in bounds:
        if key in schema and not holds(schema[key]):
            yield f"{name} must be {sign} {schema[key]}, got {short(value)}"
