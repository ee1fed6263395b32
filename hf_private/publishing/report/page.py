"""A report as one HTML file that needs nothing else: no scripts, no network, made to be printed."""

from collections.abc import Iterable
from html import escape

from .answers import TO_FILL_IN, Answer
from .content import PRIVATE, Report, Section

# The browser itself is told to load nothing and to run nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """\
:root{color-scheme:light dark;--ink:#1f2933;--soft:#52606d;--paper:#fff;--rule:#d5dbe1;--tint:#f4f6f8;--good:#0b6b4f;
--good-tint:#e6f4ef;--bad:#b00020;--bad-tint:#fdecee;--open:#8a5300;--open-tint:#fff6e5}
@media (prefers-color-scheme:dark){:root{--ink:#e4e8ec;--soft:#a9b4bf;--paper:#14181d;--rule:#38414b;--tint:#1d232a;
--good:#6fd3ae;--good-tint:#12302a;--bad:#ff8a94;--bad-tint:#3d1418;--open:#f2bd6b;--open-tint:#332611}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:1rem/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:54rem;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:1.7rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.5rem 0 .6rem;padding-top:.8rem;border-top:1px solid var(--rule)}
p,ul{margin:.6rem 0}
.date{color:var(--soft);margin:.2rem 0 1.2rem}
.banner{border:1px solid;border-left-width:8px;border-radius:4px;padding:.9rem 1.1rem;margin:0 0 1.2rem}
.banner strong{font-size:1.15rem}
.good{color:var(--good);border-color:var(--good);background:var(--good-tint)}
.bad{color:var(--bad);border-color:var(--bad);background:var(--bad-tint)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));gap:.75rem;margin:0;padding:0}
.figures div{background:var(--tint);border-radius:4px;padding:.7rem .9rem}
.figures dt,.figures .why{color:var(--soft);font-size:.85rem}
.figures dd{margin:0}
.figures .value{font-size:1.35rem;font-weight:650}
table{border-collapse:collapse;width:100%;margin:.8rem 0;font-size:.93rem}
th,td{text-align:left;vertical-align:top;padding:.4rem .6rem;border-bottom:1px solid var(--rule)}
td:last-child{overflow-wrap:anywhere}
th{color:var(--soft);font-weight:600}
td.number,th.number{text-align:right;white-space:nowrap}
td.wrong{color:var(--bad);font-weight:650}
td.unknown{color:var(--open);font-weight:650}
.component{width:30%}
.component b{display:block}
.component span{color:var(--soft)}
.open{color:var(--open);background:var(--open-tint);border-radius:3px;padding:.1rem .4rem;display:inline-block}
.blank{border-bottom:1px dotted var(--soft);height:1.7rem}
figure{margin:1rem 0}
svg{width:100%;height:auto;max-width:40rem;display:block}
ul{padding-left:1.3rem}
li{overflow-wrap:anywhere}
.signature{display:grid;grid-template-columns:2fr 2fr 1fr;gap:1.5rem;margin-top:3rem;color:var(--soft)}
.signature span{border-top:1px solid var(--soft);padding-top:.3rem}
@media print{
:root{font-size:9.5pt;color-scheme:light;--ink:#000;--soft:#444;--paper:#fff;--rule:#bbb;--tint:#f4f4f4;--good:#0b5a43;--good-tint:#fff;
--bad:#b00020;--bad-tint:#fff;--open:#6b4000;--open-tint:#fff}
@page{margin:15mm}
body{line-height:1.4}
.figures{grid-template-columns:repeat(4,1fr)}
th,td{padding:.25rem .5rem}
main{max-width:none;padding:0}
h2{break-after:avoid;margin-top:1.1rem;padding-top:.5rem}
tr,figure,.banner,.figures div,.signature,li{break-inside:avoid}
thead{display:table-header-group}
.banner{print-color-adjust:exact;-webkit-print-color-adjust:exact}
figure{margin:.4rem 0}
svg{max-width:10.5cm}
}"""
RESULTS = {"wrong": "wrong", "cannot tell": "unknown"}


def to_html(report: Report) -> str:
    """The whole report as one HTML document. All text in it is escaped: a statement may come from a stranger."""
    kind = "good" if report.status == PRIVATE else "bad"
    reasons = _bullets(report.reasons)
    sections = "\n".join(_section(number, section) for number, section in enumerate(report.sections, start=1))
    figures = "".join(
        f'<div><dt>{escape(label)}</dt><dd class="value">{escape(value)}</dd><dd class="why">{escape(why)}</dd></div>'
        for label, value, why in report.figures
    )
    title = escape(f"Privacy report: {report.name}")
    return f"""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{STYLE}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="date">{escape(report.date)}</p>
<div class="banner {kind}" role="status"><strong>{escape(report.headline)}</strong>{reasons}</div>
<dl class="figures">{figures}</dl>
{sections}
<div class="signature"><span>Name and role</span><span>Signature</span><span>Date</span></div>
</main>
</body>
</html>
"""


def _section(number: int, section: Section) -> str:
    parts = [f"<h2>{number}. {escape(section.title)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in section.paragraphs]
    if section.picture:
        parts.append(f"<figure>{section.picture}</figure>")
    if section.answers:
        rows = "".join(map(_answer, section.answers))
        parts.append(f"<table><thead><tr><th>component</th><th>answer</th></tr></thead><tbody>{rows}</tbody></table>")
    if section.rows:
        parts.append(_table(section))
    parts.append(_bullets(section.bullets))
    return f"<section>{''.join(parts)}</section>"


def _answer(one: Answer) -> str:
    blank = f' <span class="open">{escape(TO_FILL_IN)}</span><div class="blank"></div>' if one.open else ""
    name = f'<td class="component"><b>{escape(one.component)}</b><span>{escape(one.question)}</span></td>'
    return f"<tr>{name}<td>{escape(one.text)}{blank}</td></tr>"


def _table(section: Section) -> str:
    numeric = [all(row[i][:1].isdigit() for row in section.rows) for i in range(len(section.columns))]
    heads = "".join(
        f"<th{_number(right)}>{escape(column)}</th>" for column, right in zip(section.columns, numeric, strict=True)
    )
    body = ""
    for row in section.rows:
        cells = ""
        for cell, right in zip(row, numeric, strict=True):
            kind = f' class="{RESULTS[cell]}"' if cell in RESULTS else _number(right)
            cells += f"<td{kind}>{escape(cell)}</td>"
        body += f"<tr>{cells}</tr>"
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _number(right: bool) -> str:
    return ' class="number"' if right else ""


def _bullets(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""
