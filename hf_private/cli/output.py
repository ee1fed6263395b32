"""Output of commands: tables for people, JSON for programs."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON document; infinity becomes the string "inf".

    >>> print_json({"epsilon": float("inf")})
    {
      "epsilon": "inf"
    }
    """
    from hf_private.spending.statement import plain

    print(json.dumps(plain(data), indent=2, allow_nan=False))


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
