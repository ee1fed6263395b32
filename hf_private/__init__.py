"""Differentially private fine-tuning for the Hugging Face Trainer.

Public names are loaded when they are first used, so that `import hf_private` and the command line stay quick:

>>> from hf_private import DPConfig
>>> DPConfig(target_epsilon=8.0).target_delta
1e-05
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accounting import calibrate
    from .anchor_config import AnchorConfig
    from .bookkeeping import BookKeeper
    from .callbacks import PrivacyCallback
    from .config import DPConfig
    from .ledger import PrivacyLedger
    from .targets import CarrierConfig
    from .trainer import DPTrainer
    from .verification import verify

__version__ = "0.1.0"

__all__ = [
    "AnchorConfig",
    "BookKeeper",
    "CarrierConfig",
    "DPConfig",
    "DPTrainer",
    "PrivacyCallback",
    "PrivacyLedger",
    "calibrate",
    "verify",
]

_ROOMS = {
    "AnchorConfig": "anchor_config",
    "BookKeeper": "bookkeeping",
    "CarrierConfig": "targets",
    "DPConfig": "config",
    "DPTrainer": "trainer",
    "PrivacyCallback": "callbacks",
    "PrivacyLedger": "ledger",
    "calibrate": "accounting",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
