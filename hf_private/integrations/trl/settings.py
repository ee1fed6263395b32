"""Settings of TRL that a private run refuses, before TRL reads the dataset."""

from collections.abc import Iterable, Sequence
from typing import Any

from hf_private.trainer.refusals import REFUSED_ARGS, Refusal, refused_settings

SHARED: tuple[Refusal, ...] = (
    *(refusal for refusal in REFUSED_ARGS if refusal.name in ("packing", "padding_free", "use_liger_kernel")),
    Refusal(
        "activation_offloading",
        lambda a: bool(getattr(a, "activation_offloading", False)),
        "it is TRL's step that offloads, and a private step keeps other tensors",
        "Use gradient_checkpointing=True.",
    ),
    Refusal(
        "use_vllm",
        lambda a: bool(getattr(a, "use_vllm", False)),
        "rollouts of the model in training reuse records beyond the step that is charged for them",
        "Generate on public prompts beforehand.",
    ),
    Refusal(
        "router_aux_loss_coef",
        lambda a: bool(getattr(a, "router_aux_loss_coef", None)),
        "the load-balancing loss couples all records of a batch",
        "Set router_aux_loss_coef=0.0.",
    ),
)
IMAGES = ("image", "images")


def refuse_settings(args: Any, refusals: Iterable[Refusal]) -> None:
    """Raise for the first settings that cannot be private, before the dataset is packed or the model is changed."""
    found = list(refused_settings(args, refusals))
    if found:
        raise ValueError("\n".join(found))


def refuse_images(dataset: Any) -> None:
    """Raise for records with images: TRL's collators give the images of a batch no rows of their own."""
    columns: Sequence[str] = getattr(dataset, "column_names", None) or ()
    for name in IMAGES:
        if name in columns:
            raise ValueError(
                f"`train_dataset` must be text for a private trainer of TRL, got the column {name!r}: a batch's images"
                " have no row for each record. Use `DPTrainer` with a collator that has one."
            )


def refuse_experts(trainer: Any) -> None:
    """Raise if TRL has switched on the load-balancing loss of a mixture-of-experts model, which it does by default."""
    if getattr(trainer, "aux_loss_enabled", False):
        raise ValueError(
            f"`router_aux_loss_coef` must be 0.0, got {trainer.router_aux_loss_coef} from the model's config: the"
            " load-balancing loss couples all records of a batch. Set router_aux_loss_coef=0.0 in the arguments."
        )


def refuse_rehearsal(trainer: Any) -> None:
    """Raise: conversations cannot be made up from a schema, and TRL's trainers take no other records."""
    raise NotImplementedError(
        f"`rehearse` cannot make up the text that {type(trainer).__name__} prepares. Train on a few public records in"
        " another output_dir, with max_steps=2."
    )
