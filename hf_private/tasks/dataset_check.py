"""Reads the whole dataset before the first charge: is every record one that the model can take?

A text that is too long or a label that is out of range fails inside a step, after it was charged. This pass finds them
first. A `datasets.Dataset` is read by column (Arrow), others record by record with a progress bar.

A message names the field, the limit and the row of the first record that fails, not its content. It goes to the person
who holds the data, who needs the row to repair it; nothing has been trained or released by then.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from tqdm.auto import tqdm

from .heads import IGNORE_INDEX
from .limits import Limit, problems

CHUNK = 10_000  # rows of an Arrow table that are looked at together
TRUSTED = 100  # a collator that has repaired this many records (by truncating, say) is trusted with the others


def check_dataset(
    dataset: Any, collate: Callable[[list[Any]], Mapping[str, Any]], limits: Mapping[str, Limit], progress: bool = True
) -> None:
    """Refuse a dataset with a record that the model cannot take, unless the collator repairs it.

    `collate` is called with single records that are outside a limit as they are: it may truncate or map labels.

    >>> from transformers import default_data_collator
    >>> records = [{"input_ids": [1, 2]}, {"input_ids": [3, 99]}]
    >>> limits = {"input_ids": Limit(50, "`vocab_size`", remedy="Use the model's tokenizer.")}
    >>> check_dataset(records, default_data_collator, limits, progress=False)
    Traceback (most recent call last):
        ...
    ValueError: `input_ids` in row 1 of `train_dataset` must be at least 0 and below 50 (`vocab_size`), got a value...
    """
    repaired = 0
    for row, name, text in _suspects(dataset, limits, progress):
        try:
            batch = collate([dataset[row]])
        except Exception:  # the finding below says more than the collator's error, and quotes nothing
            found = [(name, text)]
        else:
            found = list(problems(_only_row(batch), limits))
        for field, what in found:
            raise ValueError(
                f"`{field}` in row {row} of `train_dataset` {what}. {limits[field].remedy} Nothing was charged."
                " (`DPConfig(check_dataset=False)` skips this check.)"
            ) from None
        repaired += 1
        if repaired == TRUSTED:
            return


def _only_row(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[0] for name, value in batch.items() if getattr(value, "shape", ())[:1] == (1,)}


def _suspects(dataset: Any, limits: Mapping[str, Limit], progress: bool) -> Iterator[tuple[int, str, str]]:
    """Rows that are outside a limit before collation: (row, field, what is wrong)."""
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        yield from _in_columns(dataset, limits)
        return
    rows = range(len(dataset))
    for row in tqdm(rows, desc="Checking the dataset (check_dataset)", disable=not progress, leave=False):
        record = dataset[row]
        if isinstance(record, Mapping):
            for name, text in problems(record, limits):
                yield row, name, text


def _in_columns(dataset: datasets.Dataset, limits: Mapping[str, Limit]) -> Iterator[tuple[int, str, str]]:
    names = [name for name in limits if name in dataset.column_names]
    if not names:
        return
    plain: Any = dataset.select_columns(names).with_format("arrow")  # its stubs also name a DatasetDict
    start = 0
    for table in plain.iter(CHUNK):
        if not all(_fits(table, name, limits[name]) for name in names):
            for offset, record in enumerate(table.to_pylist()):
                for name, text in problems(record, limits):
                    yield start + offset, name, text
        start += table.num_rows


def _fits(table: pa.Table, name: str, limit: Limit) -> bool:
    """Whether a column of whole numbers, or of lists of them, is within its limit; False where it is not obvious."""
    column = table.column(name).combine_chunks()
    if column.null_count:
        return False
    if isinstance(column, (pa.ListArray, pa.LargeListArray)):
        lengths = _lengths(column)
        if limit.longest is not None and lengths.max() > limit.longest:
            return False
        if not limit.empty and lengths.min() == 0:
            return False
        if limit.aligned and "input_ids" in table.column_names:
            tokens = table.column("input_ids").combine_chunks()
            if not isinstance(tokens, type(column)) or not np.array_equal(lengths, _lengths(tokens)):
                return False
        column = column.flatten()
    if column.null_count or not pa.types.is_integer(column.type):
        return not column.null_count and pa.types.is_floating(column.type)
    if limit.below is None:
        return True
    values = column.to_numpy(zero_copy_only=False)
    outside = (values < 0) | (values >= limit.below)
    if limit.ignored:
        outside &= values != IGNORE_INDEX
    return not outside.any()


def _lengths(column: pa.ListArray | pa.LargeListArray) -> np.ndarray:
    return column.value_lengths().to_numpy(zero_copy_only=False)
