"""The ROC curve of an attack, on linear axes and on log axes, which show the small rates that matter most."""

from pathlib import Path

import numpy as np

Rates = tuple[np.ndarray, np.ndarray]  # false positives, true positives


def draw(path: Path, curves: dict[str, Rates]) -> bool:
    """Write the plot; return False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, scale, start in zip(axes, ("linear", "log"), (0.0, 1e-3), strict=True):
        line = np.linspace(start, 1, 200)
        axis.plot(line, line, color="gray", linestyle="--", linewidth=1, label="guessing")
        for name, (false, true) in curves.items():
            axis.step(np.clip(false, start, 1), np.clip(true, start, 1), where="post", label=name)
        axis.set(xscale=scale, yscale=scale, xlim=(start, 1), ylim=(start, 1.02), xlabel="false positive rate")
        axis.set(ylabel="true positive rate")
    axes[0].legend(loc="lower right")
    figure.savefig(path, dpi=120)
    return True
