"""Draw README's picture: speed and memory of a private step, against plain training and other libraries.

It reads what `make bench` and `make bench-peers` measured, and measures nothing itself:

    python recipes/overview.py
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
SETTING = "bert-8x128"
OURS, THEIRS = "#3b6fb6", "#9aa0a6"

# engine of the benchmark -> label; top to bottom
ENGINES = {
    "rgp": "hf_private, RGP or LSG (r = 8)",
    "lora-bk": "hf_private, LoRA (r = 8)",
    "bk": "hf_private, full fine-tuning (BK)",
    "opacus-hooks": "Opacus, full, hooks",
    "opake": "Opake, full",
    "opacus-ghost": "Opacus, full, ghost clipping",
}
PEERS = ("opacus-hooks", "opake", "opacus-ghost")


def measured() -> dict[str, dict]:
    """The rows of the headline setting by engine."""
    rows = []
    for name in ("benchmark.json", "benchmark_peers.json"):
        rows += json.loads((RESULTS / name).read_text())
    return {row["engine"]: row for row in rows if row["setting"] == SETTING}


def draw(path: Path) -> None:
    rows = measured()
    figure, panels = plt.subplots(1, 2, figsize=(9, 2.9), sharey=True, layout="constrained")
    for panel, key, title in zip(panels, ("speed", "memory"), ("Speed", "Peak memory"), strict=True):
        for place, (engine, label) in enumerate(ENGINES.items()):
            value = rows[engine][key]
            color = THEIRS if engine in PEERS else OURS
            panel.barh(label, value or 0, color=color)
            shown = f"{value:.2f}" if value else "not measured"
            box = dict(facecolor="white", edgecolor="none", pad=1)  # the line at 1 must not cross a number
            panel.annotate(
                shown, (value or 0, place), xytext=(5, 0), textcoords="offset points", va="center", bbox=box
            )
        panel.axvline(1, color="black", linewidth=1, zorder=0.5)
        panel.set_title(f"{title} (plain training = 1)", fontsize=11)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_xlim(0, 1.7)
    panels[1].set_xlim(0, 5.6)
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(RESULTS / "overview.png")
