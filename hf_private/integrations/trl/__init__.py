"""TRL's trainers, with a private step: supervised fine-tuning, preference optimisation, reward models.

    from hf_private.integrations.trl import DPSFTTrainer

Needs the extra `trl`. Methods whose objective cannot be divided among records are refused by name, with the reason.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dpo import DPDPOTrainer
    from .reward import DPRewardTrainer
    from .sft import DPSFTTrainer

__all__ = ["DPDPOTrainer", "DPRewardTrainer", "DPSFTTrainer"]

MODULES = {"DPDPOTrainer": "dpo", "DPRewardTrainer": "reward", "DPSFTTrainer": "sft"}
_ONLINE = (
    "its advantages are normalised over the batch or a group, so one record changes the weight of the others, and"
    " rollouts are generated from records and used in several steps, so one step's charge does not cover them"
)
REFUSED = {  # TRL's methods -> why there is no private version
    "GRPO": _ONLINE,
    "RLOO": _ONLINE,
    "PPO": _ONLINE,
    "OnlineDPO": _ONLINE,
    "KTO": "its loss has an estimate of the KL divergence over the whole batch",
    "Distillation": "it generates from the model in training, and averages losses over the tokens of the batch",
}
INSTEAD = "Use `DPSFTTrainer` or `DPDPOTrainer`; generate and score the preference pairs on public prompts beforehand."

if find_spec("trl") is None:
    raise ImportError("`trl` must be installed for hf_private.integrations.trl: pip install 'hf-private[trl]'.")


def __getattr__(name: str) -> Any:
    """The trainers, imported when they are asked for: TRL takes seconds to import."""
    if name in MODULES:
        return getattr(import_module(f".{MODULES[name]}", __name__), name)
    method = name.removeprefix("DP").removesuffix("Trainer")
    if name == f"DP{method}Trainer" and method in REFUSED:
        raise NotImplementedError(f"`{method}` cannot be trained privately: {REFUSED[method]}. {INSTEAD}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
