"""The plot of the demo: epsilon and accuracy over the steps, with and without privacy."""

from collections.abc import Sequence
from pathlib import Path

Curve = Sequence[tuple[int, float]]  # (step, value)


def draw(path: Path, epsilon: Curve, accuracy: dict[str, Curve], budget: float, chance: float) -> bool:
    """Write the plot; return False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(*zip(*epsilon, strict=True), color="tab:purple")
    left.axhline(budget, color="gray", linestyle="--", linewidth=1)
    left.annotate("budget", (0, budget), xytext=(2, -12), textcoords="offset points", color="gray")
    left.set(title="privacy spent", xlabel="step", ylabel="epsilon (upper bound)", ylim=(0, budget * 1.1))
    for (name, curve), colour in zip(accuracy.items(), ("tab:purple", "tab:orange"), strict=False):
        right.plot(*zip(*curve, strict=True), marker="o", markersize=4, label=name, color=colour)
    right.axhline(chance, color="gray", linestyle="--", linewidth=1, label="chance")
    right.set(title="accuracy on new tickets", xlabel="step", ylim=(0, 1.02))
    right.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    return True
