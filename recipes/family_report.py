"""The tables of `families.py`: how many types are exact, which are not, and why."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from architectures import HEADS, MAPPINGS
from transformers import CONFIG_MAPPING

GUIDE = Path(__file__).parents[1] / "hf_private" / "gradients" / "README.md"
BEGIN, END = "<!-- made by recipes/families.py -->", "<!-- end -->"
SAID = (  # words of the self-check, and what they mean
    ("running_mean", "BatchNorm, or another buffer that a forward pass changes"),
    ("would leak data", "BatchNorm, or another buffer that a forward pass changes"),
    ("BatchNorm", "BatchNorm, or another buffer that a forward pass changes"),
    ("equal scores", "it chooses among equal scores"),
    ("without padding", "padding changes a record"),
    ("random in evaluation mode", "randomness in evaluation mode"),
    ("in one row", "images of all records in one row"),
)
STATUSES = ("exact", "exact by fallback", "refused", "wrong", "not built")


def rows_of(types: list[str]) -> list[tuple[str, str, str, bool]]:
    """Every row: type, head, method, and whether it is the type's row for the self-check.

    One head of each type comes first, so that a run that is stopped says something of every type.
    """
    rows = []
    for model_type in types:
        heads = [head for head in HEADS if model_type in HEADS[head] and CONFIG_MAPPING[model_type] in MAPPINGS[head]]
        rows += [(model_type, head, method, head == heads[0]) for head in heads for method in ("lora", "full")]
    return sorted(rows, key=lambda row: not row[3])


def by_type(rows: list[dict[str, Any]], method: str) -> dict[str, str]:
    """One status for each type, of its heads that were built: wrong if a head is, the weaker one of two that are
    exact, else what they agree on."""
    found: dict[str, set[str]] = {}
    for row in rows:
        if row["method"] == method:
            found.setdefault(row["type"], set()).add(row["status"])
    types = {}
    for model_type, states in found.items():
        built = states - {"not built"} or states
        if "wrong" in built:
            types[model_type] = "wrong"
        elif built == {"exact", "exact by fallback"}:
            types[model_type] = "exact by fallback"
        else:
            types[model_type] = next(iter(built)) if len(built) == 1 else "mixed by head"
    return types


def unfinished(rows: list[dict[str, Any]]) -> list[str]:
    """What was not measured: types that the run has not reached, other heads, LoRA, the self-check."""
    done = {(row["type"], row["head"], row["method"]) for row in rows}
    wanted = {(t, head, method) for t, head, method, _ in rows_of(sorted(CONFIG_MAPPING))}
    missing, checked = wanted - done, sum("self_check" in row for row in rows)
    if not missing:
        return []
    lora = sum(method == "lora" for *_, method in missing)
    return [
        f"**An unfinished run**: {len(done)} of {len(wanted)} rows (type, head, method) measured, {checked} of them"
        f" with the self-check; {lora} of the missing ones are LoRA's.",
        "",
    ]


def counts_table(rows: list[dict[str, Any]]) -> list[str]:
    """How many types have which status."""
    lines = [
        "| types | " + " | ".join([*STATUSES, "mixed by head"]) + " |",
        "| --- |" + " --- |" * (len(STATUSES) + 1),
    ]
    for method, title in (("full", "full fine-tuning"), ("lora", "LoRA on linear layers")):
        counts = Counter(by_type(rows, method).values())
        lines.append(f"| {title} | " + " | ".join(str(counts[s]) for s in [*STATUSES, "mixed by head"]) + " |")
    return lines


def made_with(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def failures(rows: list[dict[str, Any]], method: str) -> dict[str, list[str]]:
    """Types that are exact and that the self-check refuses, by what it says."""
    found: dict[str, list[str]] = {}
    for row in rows:
        said = row.get("self_check", "passed")
        if row["method"] == method and said != "passed":
            kind = next((kind for sign, kind in SAID if sign in said), "other reasons")
            found.setdefault(kind, []).append(row["type"])
    return found


def guide_table(rows: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """What the guide to gradients shows of it."""
    lines = [f"Made with {made_with(versions)}, by model type:", "", *unfinished(rows), *counts_table(rows), ""]
    lines += ["| | full fine-tuning | LoRA on linear layers |", "| --- | --- | --- |"]
    listed = ("exact by fallback", "refused", "wrong", "mixed by head", "not built")
    types = {method: by_type(rows, method) for method in ("full", "lora")}
    for status in listed:
        cells = [", ".join(sorted(t for t, s in types[m].items() if s == status)) or "none" for m in ("full", "lora")]
        lines.append(f"| {status} | " + " | ".join(cells) + " |")
    failed = {method: failures(rows, method) for method in ("full", "lora")}
    for kind in sorted(failed["full"].keys() | failed["lora"].keys()):
        cells = [", ".join(sorted(failed[method].get(kind, []))) or "none" for method in ("full", "lora")]
        lines.append(f"| exact, and refused by the self-check: {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_guide_table(text: str, table: str) -> str:
    """The guide with that table between its marks."""
    front, _, rest = text.partition(BEGIN)
    return f"{front}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def report(rows: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """The tables, as Markdown."""
    without = sum(row["status"] == "exact" and not row.get("copied") for row in rows)
    exact, minutes = sum(row["status"] == "exact" for row in rows), sum(row["seconds"] for row in rows) / 60
    lines = [
        "# Which architectures are exact",
        "",
        "Every architecture of transformers with a training head, built tiny, in float64, against one record at a"
        f" time. Made by `make families` in {minutes:.0f} minutes of CPU time, with {made_with(versions)}.",
        "",
        *unfinished(rows),
        *counts_table(rows),
        "",
        "**Exact** is by rules: the weights that are multiplied with activations have gradients that are never formed,"
        " or formed in the backward pass, as a convolution's. Small parameters (scales, tables, class tokens) may have"
        f" a copy for each record; {without} of the {exact} exact rows have none. **Exact by fallback** has copies of"
        " a weight that is multiplied (`BookKeeper.formed`), which a warning names. **Refused** is an error that names"
        " the parameter. **Not built** says nothing: no tiny model, no inputs, a library that is not installed,"
        " or a loop that torch's own gradients do not add up to.",
        "",
        "What no loss of these records reaches (an expert that no token chose, a tower without its input) is compared,"
        f" and 0. In {sum(_unreached(row) > 0.25 for row in rows)} rows this is more than a quarter of the parameters:"
        " `parameters` and `reached` in the JSON file.",
    ]
    for method, title in (("full", "Full fine-tuning"), ("lora", "LoRA")):
        types = by_type(rows, method)
        lines += ["", f"## {title}", ""]
        for status in ("exact", "exact by fallback"):
            names = ", ".join(sorted(t for t, s in types.items() if s == status))
            lines += [f"**{status}:** {names or 'none'}", ""]
        lines += ["| type | head | status | why |", "| --- | --- | --- | --- |"]
        for row in sorted(rows, key=lambda r: (r["type"], r["head"])):
            if row["method"] == method and row["status"] not in ("exact", "exact by fallback"):
                reason = re.sub(r"\s*Remedy:.*", "", row.get("reason", "")).replace("|", "\\|")[:160]
                lines.append(f"| {row['type']} | {row['head']} | {row['status']} | {reason} |")
        failed = [r for r in rows if r["method"] == method and r.get("self_check", "passed") != "passed"]
        lines += ["", "Exact, and refused by the self-check:", ""]
        lines += [f"- {r['type']} ({r['head']}): {r['self_check'][:160]}" for r in failed] or ["- none"]
    return "\n".join(lines) + "\n"


def _unreached(row: dict[str, Any]) -> float:
    return 1 - row["reached"] / row["parameters"] if "reached" in row else 0.0
