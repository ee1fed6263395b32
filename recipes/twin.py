"""Diagnose a private run that learns nothing: train its twin without noise, on records that need no protection.

    python recipes/glue.py --config recipes/configs/sst2_minilm.yaml --method bk --twin made-up --output_dir outputs/t

Method, clipping, Poisson batches, number of records, steps and learning rate are those of the private run; the noise
is left out. Of the private records only the number is used. If the twin learns and the private run does not, the noise
is the cause. If the twin learns nothing either, the settings are. The twin's own accuracy says nothing about the task:
made-up records are easier than most. It spends nothing, so try as many settings as you like.
"""

from dataclasses import replace
from pathlib import Path

import data
from datasets import Dataset, DatasetInfo

from hf_private import DPConfig
from hf_private.cli.demo.tickets import generate
from hf_private.config import BUDGETS

MADE_UP = "made-up"
HELD_OUT = 500  # records to score the twin on
LEARNED = 0.1  # above the most frequent class


def without_noise(dp_config: DPConfig) -> DPConfig:
    """The same settings, clipping included, without noise. NOT PRIVATE."""
    return replace(dp_config, **{**dict.fromkeys(BUDGETS), "noise_multiplier": 0.0})


def records(source: str, count: int, columns: tuple[str, ...], classes: int) -> tuple[Dataset, Dataset]:
    """At most `count` records to train the twin on, and others to score it on.

    Args:
        source: `made-up` (support tickets, labelled by topic), or a local file of public records with `columns` and
            `label`.
    """
    if source == MADE_UP:
        tickets = generate(count + HELD_OUT, seed=0)
        rows = [{**dict.fromkeys(columns, t.text), "label": t.label % classes} for t in tickets]
        train, test = rows[:count], rows[count:]
    else:
        rows = _read(source, (*columns, "label"))
        held_out = min(HELD_OUT, len(rows) // 5)
        train, test = rows[held_out:][:count], rows[:held_out]
    seen = {tuple(row[column] for column in columns) for row in train}
    test = [row for row in test if tuple(row[column] for column in columns) not in seen]
    info = DatasetInfo(dataset_name=Path(source).name)
    return Dataset.from_list(train, info=info), Dataset.from_list(test, info=info)


def _read(source: str, columns: tuple[str, ...]) -> list[dict[str, str]]:
    must = f"`--twin` must be `{MADE_UP}` or a file ({', '.join(data.ENDINGS)}) with the columns {', '.join(columns)}"
    try:
        rows = data.read(Path(source))
    except (OSError, ValueError) as error:
        raise ValueError(f"{must}, got {source!r}: {error}") from error
    if len(rows) < 10 or not set(columns) <= rows[0].keys():
        found = f"{len(rows)} records" + (f" with the columns {', '.join(map(str, rows[0]))}" if rows else "")
        raise ValueError(f"{must} and at least 10 records, got {source!r}: {found}")
    return rows


def verdict(accuracy: float, labels: list[int]) -> str:
    """What the twin's accuracy on held-out `labels` says about the private run."""
    chance = max(labels.count(label) for label in labels) / len(labels)
    found = f"Without noise these settings reach {accuracy:.1%} (most frequent class: {chance:.1%})."
    if accuracy < chance + LEARNED:
        return (
            f"{found} They learn next to nothing: change learning rate, steps or batch size first. Noise is not the"
            " cause, or not the only one."
        )
    return f"{found} They learn: if the private run does not, its noise is too loud. Compare `hf-private plan`."
