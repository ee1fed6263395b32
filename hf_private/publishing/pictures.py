"""Pictures of a card and of a report as SVG: no plotting library, no scripts, readable on light and dark pages."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from .rounding import decimals, percent

WIDTH, HEIGHT = 620, 360
LEFT, RIGHT, TOP, BOTTOM = 74, 26, 16, 52
# A style inside an SVG reaches the whole page: the names are ours alone.
STYLE = """\
.hfp{--page:#fff;--ink:#1f2933;--faint:#d5dbe1;--line:#1d5fb8;--chance:#6b7785;--mark:#b5400f;--safe:#1d5fb8;\
background:none}
@media (prefers-color-scheme:dark){.hfp{--page:#161b22;--ink:#e4e8ec;--faint:#3a434d;--line:#7db4ff;--chance:#9aa6b2;\
--mark:#ff9d6b;--safe:#7db4ff}}
@media print{.hfp{--page:#fff;--ink:#000;--faint:#ccc;--line:#1d5fb8;--chance:#555;--mark:#b5400f;--safe:#1d5fb8}}
.hfp text{fill:var(--ink);font:13px system-ui,sans-serif}
.hfp .page{fill:var(--page)}
.hfp .grid{stroke:var(--faint);stroke-width:1;fill:none}
.hfp .line{stroke:var(--line);stroke-width:2.5;fill:none}
.hfp .chance{stroke:var(--chance);stroke-width:1.5;stroke-dasharray:6 5;fill:none}
.hfp .safe{fill:var(--safe);opacity:.1}
.hfp .mark{fill:var(--mark)}
.hfp .note{fill:var(--chance)}
.hfp .bound{fill:var(--mark);font-weight:600}"""
DECADES = range(-5, 1)


def tradeoff_svg(curve: Iterable[tuple[float, float]], marked: Mapping[float, float], *, alone: bool = False) -> str:
    """Members found against false alarms, both on logarithmic axes, with guessing at random for comparison.

    Args:
        curve: (false alarms, members found at most), as `Risk.curve`.
        marked: points to label, as `Risk.tpr`.
        alone: for a file of its own, with a background, because the page around it may have other colours.

    >>> tradeoff_svg([(1e-5, 1e-3), (1.0, 1.0)], {0.01: 0.1}).startswith("<svg")
    True
    """
    first, last = DECADES[0], DECADES[-1]

    def x(rate: float) -> float:
        share = (math.log10(max(rate, 10.0**first)) - first) / (last - first)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(share: float) -> float:
        height = (math.log10(max(share, 10.0**first)) - first) / (last - first)
        return round(HEIGHT - BOTTOM - height * (HEIGHT - TOP - BOTTOM), 1)

    path = _path((x(rate), y(share)) for rate, share in curve)
    parts = [
        *(_grid(x(10.0**k), TOP, x(10.0**k), HEIGHT - BOTTOM) for k in DECADES),
        *(_grid(LEFT, y(10.0**k), WIDTH - RIGHT, y(10.0**k)) for k in DECADES),
        *(_text(x(10.0**k), HEIGHT - BOTTOM + 19, _share(10.0**k), "middle") for k in DECADES),
        *(_text(LEFT - 8, y(10.0**k) + 4, _share(10.0**k), "end") for k in DECADES),
        f'<path class="safe" d="{path}L{x(1)} {TOP}L{LEFT} {TOP}Z"/>',
        f'<path class="chance" d="M{x(0)} {y(0)}L{x(1)} {y(1)}"/>',
        f'<path class="line" d="{path}"/>',
    ]
    for rate, share in marked.items():
        parts.append(f'<circle class="mark" cx="{x(rate)}" cy="{y(share)}" r="4.5"/>')
        parts.append(_text(x(rate) - 6, y(share) - 9, f"≤ {percent(share)}", "end", "bound"))
    parts += [
        _text(LEFT + 10, TOP + 18, "impossible for any attack", "start", "note"),
        _text(x(10.0**-3.4), y(10.0**-3.4) + 24, "guessing at random", "start", "note"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "false alarms (people wrongly taken for members)", "middle"),
        _upright("members found"),
    ]
    return _svg("Members that an attack finds against its false alarms: upper bound and chance", parts, alone)


def budget_svg(phases: Sequence[Sequence[tuple[int, float]]], target: float | None = None) -> str:
    """Epsilon over the steps, phase after phase, with the budget as a dashed line.

    >>> "budget 2" in budget_svg([[(0, 0.0), (10, 1.0)], [(10, 1.0), (30, 1.9)]], 2.0)
    True
    """
    steps = max(phases[-1][-1][0], 1)
    highest = max([epsilon for phase in phases for _, epsilon in phase] + [target or 0.0])
    top = _round_number(highest)

    def x(step: float) -> float:
        return round(LEFT + step / steps * (WIDTH - LEFT - RIGHT), 1)

    def y(epsilon: float) -> float:
        return round(HEIGHT - BOTTOM - epsilon / top * (HEIGHT - TOP - BOTTOM), 1)

    quarters = range(5)
    parts = [
        *(_grid(LEFT, y(top * i / 4), WIDTH - RIGHT, y(top * i / 4)) for i in quarters),
        *(_text(LEFT - 8, y(top * i / 4) + 4, f"{top * i / 4:.3g}", "end") for i in quarters),
        *(_text(x(steps * i / 4), HEIGHT - BOTTOM + 19, f"{steps * i / 4:,.0f}", "middle") for i in quarters),
        *(_grid(x(phase[0][0]), TOP, x(phase[0][0]), HEIGHT - BOTTOM) for phase in phases[1:]),
    ]
    if target is not None:
        parts.append(f'<path class="chance" d="M{LEFT} {y(target)}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT + 8, y(target) + 18, f"budget {target:g}", "start", "note"))
    parts.append(f'<path class="line" d="{_path((x(step), y(eps)) for phase in phases for step, eps in phase)}"/>')
    for phase in phases:
        step, epsilon = phase[-1]
        parts.append(f'<circle class="mark" cx="{x(step)}" cy="{y(epsilon)}" r="4.5"/>')
        parts.append(_text(x(step) - 8, y(epsilon) + 22, decimals(epsilon, 2), "end", "bound"))
    parts += [_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "private steps", "middle"), _upright("epsilon so far")]
    return _svg("Epsilon after each step", parts)


def _svg(title: str, parts: Iterable[str], alone: bool = False) -> str:
    size = f' width="{WIDTH}" height="{HEIGHT}"' if alone else ""
    page = [f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>'] if alone else []
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="hfp" viewBox="0 0 {WIDTH} {HEIGHT}"{size} role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            *page,
            *parts,
            "</svg>",
        )
    )


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in points)


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="grid" d="M{x1} {y1}L{x2} {y2}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _upright(text: str) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return f'<text x="16" y="{middle:g}" text-anchor="middle" transform="rotate(-90 16 {middle:g})">{text}</text>'


def _share(share: float) -> str:
    return f"{100 * share:g} %"


def _round_number(value: float) -> float:
    """The next number of the form 1, 2, 4, 6, 8, 10 times a power of ten: its quarters are round.

    >>> [_round_number(x) for x in (8.0, 8.1, 0.3, 0.0)]
    [8.0, 10.0, 0.4, 1.0]
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value * (1 - 1e-9))
