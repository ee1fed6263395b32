"""Facts for the card besides the ledger: settings, data, evaluation, software. They do not depend on the records."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from transformers import EarlyStoppingCallback, Trainer

from hf_private import __version__
from hf_private.tasks.heads import base_model

from .setup import objective_of

if TYPE_CHECKING:
    from .private_mixin import PrivateMixin

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "datasets", "dp-accounting", "prv-accountant")


def public_facts(trainer: "PrivateMixin") -> dict[str, Any]:
    """The facts of a `DPTrainer`, as plain values."""
    dataset, base = trainer.train_dataset, getattr(base_model(trainer.model), "config", None)
    info, adapters = getattr(dataset, "info", None), getattr(trainer.model, "peft_config", None) or {}
    settings = trainer.dp_config.to_dict() | {"expected_batch_size": trainer.expected_batch_size}
    settings |= objective_of(trainer)
    if trainer.provenance.post_processing:
        settings["post_processing"] = trainer.provenance.post_processing
    return {
        "settings": settings,
        "optimizer": str(getattr(trainer.args.optim, "value", trainer.args.optim)),
        "base_model": getattr(base, "_name_or_path", None) or None,
        "peft": next((adapter.peft_type.value for adapter in adapters.values()), None),
        "dataset": {
            # no fingerprint: a hash of the records is a function of them, and not a private one
            "name": getattr(info, "dataset_name", None) or getattr(info, "builder_name", None),
            # where units are drawn, the number of records shows how many somebody has
            "num_records": None if trainer.dp_config.draws_units else trainer.num_records,
            **({} if trainer.num_units is None else {"num_units": trainer.num_units}),
        },
        "evaluation": {
            "covered": False,
            "used": trainer.eval_dataset is not None,
            "chooses_model": chooses_model(trainer),
        },
        "versions": {"hf_private": __version__, **{name: version(name) for name in LIBRARIES}},
    }


def chooses_model(trainer: Trainer) -> bool:
    """Whether metrics on the evaluation data decide which weights come out."""
    args = trainer.args
    stops = any(isinstance(callback, EarlyStoppingCallback) for callback in trainer.callback_handler.callbacks)
    by_rate = args.lr_scheduler_type == "reduce_lr_on_plateau"
    return bool(args.load_best_model_at_end or args.save_strategy == "best" or stops or by_rate)
