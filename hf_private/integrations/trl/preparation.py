"""Keeps TRL's preparation of the dataset from quoting records in the log."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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


def _cut(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    for quote in ("'", '"'):  # `repr` takes the other one if the text holds the first
        before, opened, rest = message.partition(f": {quote}")
        if opened:
            record.msg, record.args = f"{before}: (not shown){rest.rpartition(quote)[2]}", ()
            message = record.msg
    return True
