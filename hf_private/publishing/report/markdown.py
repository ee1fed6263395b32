"""A report as Markdown."""

import html
import re
from collections.abc import Iterable

from .answers import TO_FILL_IN
from .content import PRIVATE, Report, Section


def to_markdown(report: Report) -> str:
    """The whole report but for its pictures."""
    reasons = "".join(f"\n> - {escape(reason)}" for reason in report.reasons)
    banner = f"> **{escape(report.headline)}**{reasons}"
    if report.status != PRIVATE:
        banner = f"> [!CAUTION]\n{banner}"
    figures = _table(("", "", ""), report.figures)
    parts = [f"# Privacy report: {escape(report.name)}", f"Date: {escape(report.date)}", banner, figures]
    for number, section in enumerate(report.sections, start=1):
        parts += [f"## {number}. {section.title}", *_body(section)]
    return "\n\n".join(parts) + "\n"


def _body(section: Section) -> list[str]:
    parts = [escape(text) for text in section.paragraphs]
    if section.answers:
        rows = []
        for one in section.answers:
            text = f"{one.text} {TO_FILL_IN}" if one.open else one.text
            rows.append((one.component, one.question, text))
        parts.append(_table(("component", "question", "answer"), rows))
    if section.rows:
        parts.append(_table(section.columns, section.rows))
    if section.bullets:
        parts.append("\n".join(f"- {escape(text)}" for text in section.bullets))
    return parts


def escape(text: str) -> str:
    """Text of a statement, which anyone may have written, as one line without markup.

    >>> escape("a|b <script>\\nx")
    'a/b &lt;script&gt; x'
    """
    line = html.escape(" ".join(str(text).split()).replace("|", "/"), quote=False)
    return re.sub(r"([\\`\[\]*])", r"\\\1", line)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *(tuple(map(escape, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
