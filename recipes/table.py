"""Output of a sweep: its table as Markdown, and a plot of the score over epsilon."""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any


def summary(cells: list, metrics: list[str]) -> list[dict[str, Any]]:
    """One row per method and epsilon, with (mean, standard deviation) of every metric; no deviation for one seed."""
    groups: dict[tuple, list] = {}
    for cell in cells:
        groups.setdefault((cell.method, cell.epsilon), []).append(cell)
    rows = []
    for (method, epsilon), group in groups.items():
        row = {"method": method, "epsilon": epsilon, "seeds": len(group)}
        row["learning_rate"] = group[0].result["learning_rate"]
        row["minutes"] = statistics.mean(minutes(cell.result) for cell in group)
        for metric in metrics:
            values = [cell.result["metrics"][metric] for cell in group]
            row[metric] = (statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)
        rows.append(row)
    return rows


def minutes(result: dict[str, Any]) -> float:
    """Wall time of a run, extrapolated from the steps after a resume."""
    return result["train_seconds"] / 60 * result["steps"] / max(1, result["steps"] - result["resumed_at"])


def shown(value: tuple[float, float | None]) -> str:
    mean, deviation = value
    return f"{mean:.4f}" if deviation is None else f"{mean:.4f} ± {deviation:.4f}"


def markdown(plan: dict[str, Any], rows: list[dict], trials: list[tuple[str, float, float]], asked: int) -> str:
    """The table, and the learning rates of the search."""
    names = [metric.removeprefix("eval_").replace("_", " ") for metric in plan["metrics"]]
    lines = [
        f"# {plan['title']}", "", plan.get("note", "").strip(), "", f"`{plan['command']}`", "",
        f"{sum(row['seeds'] for row in rows)} of {asked} runs are done. Mean ± standard deviation over seeds.", "",
        f"| method | epsilon | {' | '.join(names)} | seeds | learning rate | train minutes |",
        f"| --- | --- |{' --- |' * len(names)} --- | --- | --- |",
    ]  # fmt: skip
    for row in rows:
        scores = " | ".join(shown(row[metric]) for metric in plan["metrics"])
        epsilon = "not private" if row["epsilon"] is None else f"{row['epsilon']:g}"
        tail = f"{row['seeds']} | {row['learning_rate']:g} | {row['minutes']:.1f}"
        lines.append(f"| {row['method']} | {epsilon} | {scores} | {tail} |")
    reading = plan.get("reading", "").strip()  # an interpretation of the table, written by hand
    if reading:
        lines += ["", reading]
    if trials:
        lines += ["", f"Learning rates tried ({names[0]} on held-out training records):", ""]
        for method, group in itertools.groupby(trials, key=lambda trial: trial[0]):
            tried = ", ".join(f"{rate:g}: {score:.4f}" for _, rate, score in group)
            lines.append(f"- {method}: {tried}")
    return "\n".join(lines) + "\n"


def samples(folder: Path, most: int = 4) -> list[dict[str, str]]:
    """A few generated texts from generated.jsonl, if the recipe wrote it, spread over all meanings."""
    file = folder / "generated.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return rows[:: max(1, -(-len(rows) // most))]


def shown_samples(cells: list) -> str:
    """The samples of all cells, meaning by meaning."""
    texts = {cell.name: cell.result["samples"] for cell in cells if cell.result.get("samples")}
    if not texts:
        return ""
    lines = ["", "## Samples"]
    for number, first in enumerate(next(iter(texts.values()))):
        lines += ["", f"`{first['mr']}`", "", f"- a reference: {first['reference']}"]
        lines += [f"- {name}: {rows[number]['generated']}" for name, rows in texts.items() if number < len(rows)]
    return "\n".join(lines) + "\n"


def plot(plan: dict[str, Any], rows: list[dict], path: Path) -> None:
    """The first metric over epsilon, one line per method."""
    from matplotlib.figure import Figure

    metric = plan["metrics"][0]
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for method in dict.fromkeys(row["method"] for row in rows):
        points = sorted((row for row in rows if row["method"] == method), key=lambda row: row["epsilon"] or 0)
        means, spread = zip(*(row[metric] for row in points), strict=True)
        if points[0]["epsilon"] is None:
            axes.axhline(means[0], linestyle="--", color="gray", label=f"{method} (not private)")
        else:
            bars = [deviation or 0.0 for deviation in spread]
            axes.errorbar([row["epsilon"] for row in points], means, bars, marker="o", capsize=3, label=method)
    axes.set(xlabel="epsilon", ylabel=metric.removeprefix("eval_"), title=plan["title"])
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
