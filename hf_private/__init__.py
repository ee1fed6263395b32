"""Differentially private fine-tuning for the Hugging Face Trainer.

Public names are loaded when they are first used, so that `import hf_private` and the command line stay quick:

>>> import hf_private
>>> sorted(hf_private.__all__) == sorted(set(hf_private.__all__))
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

__version__ = "0.1.0"

_HOME = {}  # public name -> module that holds it

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
