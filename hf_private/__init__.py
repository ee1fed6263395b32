"""Differentially private fine-tuning for the Hugging Face Trainer.

Public names are loaded when they are first used, so that `import hf_private` and the command line stay quick:

>>> from hf_private import DPConfig
>>> DPConfig(target_epsilon=8.0).target_delta
1e-05
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accounting.budget import calibrate
    from .config import DPConfig
    from .gradients.bookkeeper import BookKeeper
    from .methods.carriers.config import CarrierConfig
    from .methods.gep.config import AnchorConfig
    from .publishing.verify import verify
    from .spending.ledger import PrivacyLedger
    from .tasks.pooling import read_by_mean
    from .trainer.averaging import WeightAverage
    from .trainer.callbacks import PrivacyCallback
    from .trainer.seq2seq import DPSeq2SeqTrainer
    from .trainer.trainer import DPTrainer

__version__ = "0.2.0.dev0"

__all__ = [
    "AnchorConfig",
    "BookKeeper",
    "CarrierConfig",
    "DPConfig",
    "DPSeq2SeqTrainer",
    "DPTrainer",
    "PrivacyCallback",
    "PrivacyLedger",
    "WeightAverage",
    "calibrate",
    "read_by_mean",
    "verify",
]

_MODULES = {
    "AnchorConfig": "methods.gep.config",
    "BookKeeper": "gradients.bookkeeper",
    "CarrierConfig": "methods.carriers.config",
    "DPConfig": "config",
    "DPSeq2SeqTrainer": "trainer.seq2seq",
    "DPTrainer": "trainer.trainer",
    "PrivacyCallback": "trainer.callbacks",
    "PrivacyLedger": "spending.ledger",
    "WeightAverage": "trainer.averaging",
    "calibrate": "accounting.budget",
    "read_by_mean": "tasks.pooling",
    "verify": "publishing.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
