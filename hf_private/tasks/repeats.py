"""Finds records that stand in a dataset several times: the same object, or the same row of a table.

Oversampling a class, `ConcatDataset([ds] * 10)`, or `ds.select` with an index twice are common elsewhere. Here,
leaving out the person whose record stands k times changes k rows: epsilon is that of k records. Different people who
wrote the same words have a row each, which is not a repetition.

Content is not compared here, as short records recur naturally. A dataset that was repeated and then saved has copies
in other rows: `train()` warns if more than a third of the records recur (`TrainingRecords.recurring`). A dataset that
computes its records, and repeats inside its own `__getitem__`, is not recognised.
"""

from itertools import count
from typing import Any

import datasets
import numpy as np
from torch.utils.data import ConcatDataset, Subset

BLOCK = 2**40  # rows that one buffer of a table may have
VALUES = (str, bytes, int, float, type(None))  # Python keeps one object for equal ones


def most_repeats(dataset: Any) -> int:
    """How often the record that stands most often in a dataset stands there, as far as its container shows that.

    >>> most_repeats(ConcatDataset([[{"x": 1}, {"x": 1}]] * 3))
    3
    >>> most_repeats(datasets.Dataset.from_dict({"x": [5, 5, 6]}).select([0, 1, 2, 2]))
    2
    """
    places = _Places().of(dataset)
    return int(np.unique(places, return_counts=True)[1].max()) if len(places) else 0


class _Places:
    """Numbers records by where they are kept, the same place by the same number."""

    def __init__(self) -> None:
        self._blocks: dict[Any, int] = {}
        self._numbers = count(1)

    def of(self, dataset: Any) -> np.ndarray:
        """A number (N,) for each record. Those of objects are positive, those of rows negative."""
        if isinstance(dataset, Subset):
            return self.of(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
        if isinstance(dataset, ConcatDataset):
            return np.concatenate([self.of(part) for part in dataset.datasets])
        if isinstance(dataset, datasets.Dataset):
            rows = self._of_table(dataset)
            return rows if dataset._indices is None else rows[dataset._indices.column(0).to_numpy()]
        if isinstance(dataset, (list, tuple)):
            single = (id(x) if not isinstance(x, VALUES) else -n - 1 for n, x in enumerate(dataset))
            places = np.fromiter(single, dtype=np.int64, count=len(dataset))
            return np.where(places < 0, self._block(id(dataset)) + places, places)
        return self._block(id(dataset)) - 1 - np.arange(len(dataset))

    def _of_table(self, dataset: datasets.Dataset) -> np.ndarray:
        table = dataset.data.table
        parts = []
        for chunk in table.column(0).chunks if table.num_columns else ():
            buffers = [buffer for buffer in (*chunk.buffers()[1:], chunk.buffers()[0]) if buffer is not None]
            key = buffers[0].address if buffers else (id(chunk), next(self._numbers))
            parts.append(self._block(key) - 1 - chunk.offset - np.arange(len(chunk)))
        return np.concatenate(parts) if parts else self._block(id(dataset)) - 1 - np.arange(table.num_rows)

    def _block(self, key: Any) -> int:
        """Where the negative numbers of a container begin."""
        return -BLOCK * self._blocks.setdefault(key, len(self._blocks))
