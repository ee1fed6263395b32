"""A picture of delta(epsilon), written as SVG by hand: the package needs no plotting library for it."""

import math

CURVE_FILE = "privacy_curve.svg"
WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 22, 46


def curve_svg(points: list[dict[str, float]], epsilon: float, delta: float) -> str:
    """The curve through `points`, and the claimed (epsilon, delta) as a dot.

    >>> curve_svg([{"epsilon": 1.0, "delta": 1e-3}, {"epsilon": 2.0, "delta": 1e-5}], 2.0, 1e-5).startswith("<svg")
    True
    """
    points = [point for point in points if point["delta"] > 0]
    decades = [math.log10(point["delta"]) for point in points] + [math.log10(delta)]
    bottom, top = math.floor(min(decades)), max(math.ceil(max(decades)), math.floor(min(decades)) + 1)
    right = max([point["epsilon"] for point in points] + [epsilon])

    def x(value: float) -> float:
        return round(LEFT + value / right * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(TOP + (top - math.log10(value)) / (top - bottom) * (HEIGHT - TOP - BOTTOM), 1)

    stride = max(1, math.ceil((top - bottom) / 6))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' font-family="sans-serif" font-size="12" role="img">',
        "<title>delta as a function of epsilon</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for decade in range(bottom, top + 1, stride):
        level = y(10.0**decade)
        lines.append(f'<path d="M{LEFT} {level}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{level + 4}" text-anchor="end">1e{decade}</text>')
    for quarter in range(5):
        value = right * quarter / 4
        lines.append(f'<text x="{x(value)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:.3g}</text>')
    path = "L".join(f"{x(point['epsilon'])} {y(point['delta'])}" for point in points)
    lines += [
        f'<path d="M{path}" fill="none" stroke="#1f5fbf" stroke-width="2"/>',
        f'<circle cx="{x(epsilon)}" cy="{y(delta)}" r="5" fill="#c2410c"/>',
        f'<text x="{(LEFT + WIDTH - RIGHT) // 2}" y="{HEIGHT - 8}" text-anchor="middle">epsilon</text>',
        f'<text x="14" y="{(TOP + HEIGHT - BOTTOM) // 2}" text-anchor="middle"'
        f' transform="rotate(-90 14 {(TOP + HEIGHT - BOTTOM) // 2})">delta</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
