"""Public records for GEP and public carriers: selection, check that none is a training record, gradients.

All randomness here is public, a function of (seed, step): every rank and every power iteration sees the same records,
labels and dropout masks. It never affects the generators of the private pass.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hf_private.gradients.bookkeeper import BookKeeper, rows_per_record
from hf_private.gradients.method import Method
from hf_private.gradients.persample import PerSample
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.methods.subspace import public_generator
from hf_private.tasks.heads import Head, head_of
from hf_private.tasks.losses import LABEL_NAMES
from hf_private.tasks.micro_batches import length_of, split
from hf_private.tasks.synthetic import random_labels

from .config import AnchorConfig

PublicConfig = TypeVar("PublicConfig", AnchorConfig, CarrierConfig)  # configs that may read public records

NUMBERING = ("id", "idx", "index")
LOOKED_AT = 50_000  # the most rows that are hashed, spread evenly over a dataset
OWN_LABELS = (Head.CAUSAL_LM, Head.MASKED_LM, Head.SEQ2SEQ_LM)


def checked_anchors(config: PublicConfig | None, dataset: Any, training: Any) -> PublicConfig | None:
    """The config with the name and fingerprint of the public dataset. Refuses one that contains training records."""
    reads = config is not None and config.reads_public_data
    if dataset is None and not reads:
        return config
    if config is None or not reads:
        raise ValueError(
            "`anchors` must be given with `anchor_dataset`, got None. Public records are for GEP,"
            " DPConfig(anchors=AnchorConfig(...)), or for CarrierConfig(source='public')."
        )
    if dataset is None:
        raise ValueError(
            f"`anchor_dataset` must be given with `{config.METHOD_TYPE.lower()}`, got None. Pass public records,"
            " DPTrainer(anchor_dataset=...); they need no labels."
        )
    if not hasattr(dataset, "__getitem__") or not len(dataset):
        raise ValueError(f"`anchor_dataset` must have rows and random access, got {type(dataset).__name__}.")
    if training is not None:
        check_apart(dataset, training)
    found = fingerprint(dataset)
    stated = config.dataset_fingerprint
    if stated not in (None, found):
        raise ValueError(f"`dataset_fingerprint` must be that of `anchor_dataset`, {found}, got {stated}.")
    info = getattr(dataset, "info", None)
    name = getattr(info, "dataset_name", None) or getattr(info, "builder_name", None)
    return replace(config, dataset_name=config.dataset_name or name, dataset_fingerprint=found)


def fingerprint(dataset: Any) -> str:
    """Hash of the rows of a dataset: 16 hexadecimal digits, equal for equal rows in any class of dataset.

    >>> fingerprint([{"text": "a"}, {"text": "b"}]) == fingerprint([{"text": "b"}, {"text": "a"}])
    False
    """
    total = hashlib.sha256(str(len(dataset)).encode())
    for row in _rows(dataset):
        total.update(_digest(row, _columns(row)))
    return total.hexdigest()[:16]


def check_apart(anchors: Any, training: Any) -> None:
    """Refuse public data that shares records with the private data; of long datasets only a part is compared.

    Labels do not count: the same text or image with another label is the same record.
    """
    same = anchors is training or getattr(anchors, "_fingerprint", 0) == getattr(training, "_fingerprint", 1)
    shared = len(training) if same else _shared_rows(anchors, training)
    if shared:
        raise ValueError(
            f"`anchor_dataset` must be public, got one that shares {shared} rows with `train_dataset`. The subspace is"
            " published: remove these rows from one of the two."
        )


def _shared_rows(anchors: Any, training: Any) -> int:
    if not len(anchors) or not len(training):
        return 0
    columns = sorted(_columns(next(_rows(anchors))) & _columns(next(_rows(training))))
    if not columns:
        return 0
    known = {_digest(row, columns) for row in _rows(anchors)}
    return sum(_digest(row, columns) in known for row in _rows(training))


def _rows(dataset: Any) -> Iterator[Any]:
    for index in np.linspace(0, len(dataset) - 1, min(len(dataset), LOOKED_AT), dtype=np.int64):
        yield dataset[int(index)]


def _columns(row: Any) -> set[str]:
    return {name for name in row if name not in LABEL_NAMES + NUMBERING} if isinstance(row, Mapping) else {""}


def _cell(row: Any, name: str) -> Any:
    """A column of a row; of a tuple such as (image, label) the first element, of anything else the row itself."""
    if isinstance(row, Mapping):
        return row[name]
    return row[0] if isinstance(row, tuple | list) else row


def _digest(row: Any, columns: Iterable[str]) -> bytes:
    """Hash of the columns of a row, equal for lists, arrays, tensors and images with the same content."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(columns):
        value = _cell(row, name)
        try:
            array = np.asarray(value)
        except ValueError:  # a ragged list
            array = np.asarray(repr(value))
        if array.dtype.kind == "f":
            array = array.astype(np.float32)
        content = array.tobytes() if array.dtype.kind in "biuf" else repr(array.tolist()).encode()
        total.update(f"{name}/{array.shape}/".encode() + content)
    return total.digest()


class AnchorData:
    """The public micro-batches of a step, with random labels, their own, or for language models those of the text.

    Args:
        dataset: Public records; labels are not needed.
        collator: List of records to a batch of tensors.
        model: Its head determines the labels.
        num_anchors: Records m in a step; all, if there are fewer.
        max_rows, max_tokens: Size of a micro-batch. Changes speed and memory only.
        labels: "random"; "own": those of the dataset, which must have them; "any": its own, or else random.
        seed: Public.
    """

    def __init__(
        self,
        dataset: Any,
        collator: Callable[[list[Any]], Mapping[str, Any]],
        model: nn.Module,
        *,
        num_anchors: int,
        max_rows: int,
        max_tokens: int | None = None,
        labels: str = "random",
        seed: int = 0,
    ) -> None:
        self.dataset = dataset
        self.collator = collator
        self.model = model
        self.num_anchors = num_anchors
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.labels = labels
        self.seed = seed

    def __call__(self, step: int) -> Iterator[dict[str, Any]]:
        """Collated micro-batches of public records, equal for equal steps."""
        generator = public_generator("anchors", self.seed, step)
        chosen = torch.randperm(len(self.dataset), generator=generator)[: self.num_anchors].tolist()
        records = [self.dataset[index] for index in chosen]
        for part in split([length_of(record) for record in records], self.max_rows, self.max_tokens):
            yield self._labelled(dict(self.collator([records[i] for i in part])), generator)

    def _labelled(self, batch: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        try:
            head = head_of(self.model)
        except ValueError:  # a head that only the user's loss knows: use the labels of the dataset
            return batch
        if head is Head.CAUSAL_LM and "labels" not in batch:
            labels = batch["input_ids"]
            mask = batch.get("attention_mask")
            return batch | {"labels": labels if mask is None else labels.masked_fill(mask == 0, -100)}
        if head in OWN_LABELS:
            return batch
        has_labels = any(name in batch for name in LABEL_NAMES)
        if self.labels == "own" and not has_labels:
            raise ValueError(
                "`anchor_dataset` must have labels with labels='own', got none. Use labels='random', or label rows."
            )
        if self.labels != "random" and has_labels:
            return batch
        unlabelled = {name: value for name, value in batch.items() if name not in LABEL_NAMES}
        return unlabelled | random_labels(self.model, unlabelled, generator)


class AnchorBooks:
    """The entries of public micro-batches: `books(step, method)`, see `Books` in method.py."""

    def __init__(
        self,
        model: nn.Module,
        per_sample_loss: Callable[[nn.Module, Mapping[str, Any]], Tensor],
        batches: Callable[[int], Iterator[Mapping[str, Any]]],
        seed: int = 0,
    ) -> None:
        self.model = model
        self.per_sample_loss = per_sample_loss
        self.batches = batches
        self.seed = seed

    def __call__(self, step: int, method: Method) -> Iterator[Mapping[str, PerSample]]:
        """Run the model on the public records in its current mode, and restore it."""
        with public_randomness(self.seed, step):
            for batch in self.batches(step):
                rows = rows_per_record(self.per_sample_loss)
                with torch.enable_grad(), BookKeeper(self.model, method, rows) as book:
                    book.backward(self.per_sample_loss(self.model, batch))
                    yield book.entries()


@contextmanager
def public_randomness(seed: int, step: int) -> Iterator[None]:
    """Make the global generators a function of (seed, step); restore their secret state at the end."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(public_generator("anchors", seed, step).initial_seed())
        yield
