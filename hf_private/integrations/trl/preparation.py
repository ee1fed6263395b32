"""TRL loads the base and prepares the dataset: with our words for what is missing, and without telling records."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from datasets import Dataset, concatenate_datasets

TRAINING = "train"  # what TRL calls the training set
ROW = "row_before_preparation"
QUANTISED = ("bitsandbytes", "torchao")  # libraries of the extra `quantized`
QUOTING = ("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer")


@contextmanager
def unquoted() -> Iterator[None]:
    """Cut from TRL's warnings what they quote: one shows the end of a prompt, decoded.

    >>> logger = logging.getLogger("trl.trainer.sft_trainer")
    >>> text = "It is left out: 'Dear Ann'. Change the template."
    >>> record = logger.makeRecord(logger.name, logging.WARNING, "", 0, text, (), None)
    >>> with unquoted():
    ...     kept = logger.filter(record)
    >>> record.msg
    'It is left out: (not shown). Change the template.'
    """
    loggers = [logging.getLogger(name) for name in QUOTING]
    for logger in loggers:
        logger.addFilter(_cut)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_cut)


@contextmanager
def naming_extra() -> Iterator[None]:
    """Name our extra where TRL loads a quantised base whose library is not installed.

    >>> with naming_extra():
    ...     raise ImportError("Using `bitsandbytes` 4-bit quantization requires ...")  # doctest: +SKIP
    Traceback (most recent call last):
    ImportError: `bitsandbytes` must be installed for this base: pip install 'hf-private[quantized]'.
    """
    try:
        yield
    except ImportError as error:
        for library in QUANTISED:
            if library in str(error) and find_spec(library) is None:
                raise ImportError(
                    f"`{library}` must be installed for this base: pip install 'hf-private[quantized]'."
                ) from error
        raise


def _cut(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    for quote in ("'", '"'):  # `repr` takes the other one if the text holds the first
        before, opened, rest = message.partition(f": {quote}")
        if opened:
            record.msg, record.args = f"{before}: (not shown){rest.rpartition(quote)[2]}", ()
            message = record.msg
    return True


def without_gaps(prepare: Callable[[Any], Any], dataset: Any, blank: Mapping[str, Any]) -> Any:
    """`prepare(dataset)`, with a blank record for each that TRL leaves out because it is too long for `max_length`.

    Guarantee: the number of records, which is public and on the card, is that of the given dataset. It does not tell
    how many records were too long.

    Args:
        prepare: Of TRL. It may leave out and change records.
        blank: The prepared columns of a record whose loss has no gradient. Other columns, such as the unit's, stay.

    >>> data = Dataset.from_dict({"input_ids": [[5], [6, 6], [7]], "who": ["a", "b", "c"]})
    >>> short = lambda records: records.filter(lambda record: len(record["input_ids"]) < 2)
    >>> without_gaps(short, data, {"input_ids": [0]}).to_dict()
    {'input_ids': [[5], [7], [0]], 'who': ['a', 'c', 'b']}
    """
    if not isinstance(dataset, Dataset):
        return prepare(dataset)  # what has no length is refused later
    if dataset.format["type"] == "custom":
        raise ValueError(
            "`train_dataset` must hold what TRL prepares, got a dataset with a transform (`with_transform`). Apply it"
            " beforehand: `dataset.map(transform, batched=True)`."
        )
    numbered = dataset.with_format(None).add_column(ROW, list(range(len(dataset))))  # pyrefly: ignore[bad-argument-type]
    prepared = prepare(numbered)
    missing = set(range(len(dataset))).difference(prepared[ROW])
    prepared = prepared.remove_columns(ROW)
    if not missing:
        return prepared
    blanks = [
        {name: blank[name] if name in blank else dataset[row][name] for name in prepared.column_names}
        for row in sorted(missing)
    ]
    return concatenate_datasets([prepared, Dataset.from_list(blanks, features=prepared.features)])
