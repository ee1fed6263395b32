"""Options and their types. A type's error message says what is allowed and what was got.

>>> probability("2")
Traceback (most recent call last):
    ...
argparse.ArgumentTypeError: must be a number between 0 and 1, got '2'
"""

import argparse
import math
from collections.abc import Callable

TASKS = {  # what `--task` accepts, and the class that builds it
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
}


class UsageError(Exception):
    """A request that cannot be met: reported in one line, with exit code 2."""


def add_common_options(parser: argparse.ArgumentParser, default: object = False) -> None:
    """Add `--json` and `--verbose`. Pass SUPPRESS to accept them after the name of a subcommand too."""
    parser.add_argument("--json", action="store_true", default=default, help="print one JSON document instead of text")
    parser.add_argument("--verbose", action="store_true", default=default, help="show the logs of other libraries")


def _number(text: str, allowed: str, accepts: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not accepts(value):
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")
    return value


def positive(text: str) -> float:
    """A finite number greater than 0."""
    return _number(text, "a number > 0", lambda value: value > 0)


def probability(text: str) -> float:
    """A number strictly between 0 and 1."""
    return _number(text, "a number between 0 and 1", lambda value: 0 < value < 1)


def fraction(text: str) -> float:
    """A number >= 0 and < 1."""
    return _number(text, "a number >= 0 and < 1", lambda value: 0 <= value < 1)


def whole(lower: int) -> Callable[[str], int]:
    """Whole numbers >= `lower`; `1e6` and `67_349` are allowed."""

    def parse(text: str) -> int:
        return int(_number(text, f"a whole number >= {lower}", lambda value: value == int(value) and value >= lower))

    return parse


def key_values(**types: Callable[[str], object]) -> Callable[[str], dict[str, object]]:
    """Settings written as `r=8,sparsity=0.3`, with one type per key."""

    def parse(text: str) -> dict[str, object]:
        settings: dict[str, object] = {}
        for item in text.split(","):
            key, equals, value = item.partition("=")
            if not equals or key not in types:
                raise argparse.ArgumentTypeError(f"must be KEY=VALUE with a key of {', '.join(types)}, got {item!r}")
            try:
                settings[key] = types[key](value)
            except argparse.ArgumentTypeError as error:
                raise argparse.ArgumentTypeError(f"{key} {error}") from None
        return settings

    return parse
