"""The picture of a plan: what each epsilon and batch size cost in noise."""

from collections.abc import Mapping, Sequence

from hf_private.accounting.budget import BudgetExceeded, calibrate
from hf_private.accounting.signal import HOPELESS, TOLERATED, noise_to_signal
from hf_private.cli.arguments import UsageError

from .rules import Schedule, batches

EPSILONS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
Curve = Sequence[tuple[float, float]]  # (epsilon, noise to signal)


def curves(n: int, delta: float, noised: int, steps: int) -> dict[int, Curve]:
    """Noise to signal over epsilon, by batch size, at the noise that RDP demands."""
    found: dict[int, Curve] = {}
    for batch in batches(n):
        points = []
        for epsilon in EPSILONS:
            try:
                sigma = calibrate(epsilon, delta, batch / n, steps, accountant="rdp")
            except BudgetExceeded:
                continue
            points.append((epsilon, noise_to_signal(sigma, noised, batch).ratio))
        if points:
            found[batch] = points
    return found


def draw(path: str, found: Mapping[int, Curve], chosen: tuple[float, float, Schedule], method: str) -> None:
    """Write the picture; `chosen` is (epsilon, noise to signal, schedule) of the recommended plan.

    Raises:
        UsageError: if matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("argument --picture: needs matplotlib: pip install 'hf-private[demo]'") from error
    epsilon, noise, schedule = chosen
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    shades = colormaps["viridis"]
    for index, (batch, curve) in enumerate(found.items()):
        colour = shades(index / max(len(found) - 1, 1) * 0.9)
        axes.plot(*zip(*curve, strict=True), marker="o", markersize=3, color=colour, label=f"{batch:,}")
    for level, text in ((TOLERATED, "noise is felt from here on"), (HOPELESS, "a run of ours learned nothing here")):
        axes.axhline(level, color="gray", linestyle="--", linewidth=1)
        axes.annotate(text, (1, level), xycoords=("axes fraction", "data"), xytext=(-4, 3),
                      textcoords="offset points", ha="right", color="gray", fontsize=8)  # fmt: skip
    axes.plot(epsilon, noise, marker="*", markersize=15, color="tab:red", linestyle="none", label="recommended")
    axes.set(xscale="log", yscale="log", xlabel="epsilon", ylabel="noise / signal of a step")
    axes.set_title(f"{method}, {schedule.steps} steps", loc="left")
    axes.set_xticks(EPSILONS, [f"{value:g}" for value in EPSILONS])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3)
    axes.legend(title="batch size", fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        must = f"argument --picture: must be a file that can be written, got {path!r}"
        raise UsageError(f"{must}: {str(error).splitlines()[0]}") from error
