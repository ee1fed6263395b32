"""Output of commands: tables for people, JSON for programs."""

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def _plain(value: Any) -> Any:
    """Replace infinity, which JSON cannot express, by the string "inf"."""
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON document.

    >>> print_json({"epsilon": float("inf")})
    {
      "epsilon": "inf"
    }
    """
    print(json.dumps(_plain(data), indent=2, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table. Columns that hold numbers only are right-aligned."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    cells = [[str(cell) for cell in row] for row in rows]
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        numeric = all(row[index][:1].isdigit() for row in cells if row[index])
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 119  # rich would assume 80 columns for a file
    Console(markup=False, highlight=False, width=width).print(table)
