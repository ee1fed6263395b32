"""Tables that Jupyter shows for the last value of a cell (`_repr_html_`).

>>> table("Budget", [("epsilon", "8.0"), ("note", "a < b")])
'<table><caption>Budget</caption><tr><th>epsilon</th><td>8.0</td></tr><tr><th>note</th><td>a &lt; b</td></tr></table>'
"""

from collections.abc import Iterable
from html import escape


def table(caption: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Rows of a heading and its values. All text is escaped: that of a statement may come from a stranger."""
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for name, *values in rows
    )
    return f"<table><caption>{escape(caption)}</caption>{body}</table>"
