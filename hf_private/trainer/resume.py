"""Finds the checkpoint that a run resumes from, and checks that it may."""

import json
from pathlib import Path

from transformers import Trainer
from transformers.utils import logging

from hf_private.spending.ledger import LedgerError
from hf_private.spending.spending import LEDGER

logger = logging.get_logger(__name__)

LAYOUTS = {  # what a checkpoint holds -> how it was saved
    "pytorch_model_fsdp_0": "FSDP2's SHARDED_STATE_DICT",
    "pytorch_model_fsdp.bin": "FSDP2's FULL_STATE_DICT",
}


def check_checkpoint(checkpoint: str | Path, output_dir: str | Path) -> None:
    """Refuse to resume from a checkpoint if it is not known what was spent."""
    checkpoint, ledger = Path(checkpoint), Path(output_dir, LEDGER)
    if not is_complete(checkpoint):
        raise ValueError(
            f"`resume_from_checkpoint` must be a complete checkpoint, got {str(checkpoint)!r}. Use True for the newest"
            " complete one."
        )
    if not (checkpoint / LEDGER).is_file():
        raise LedgerError(
            f"{checkpoint} holds no ledger ({LEDGER}), so it is not known what its weights have cost. If it was made"
            " without privacy on public data, load its weights with from_pretrained and start a new run."
        )
    if not ledger.is_file():
        raise LedgerError(
            f"there is no ledger at {ledger}, so it is not known which steps ran after {checkpoint}. Put it back; if"
            f" none ran after it, copy {checkpoint / LEDGER} there."
        )


def is_complete(checkpoint: str | Path) -> bool:
    """Whether a checkpoint was written to its end: Trainer writes trainer_state.json last, the ledger comes first."""
    try:
        json.loads(Path(checkpoint, "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    return True


def last_checkpoint(output_dir: str | Path) -> str:
    """The newest complete checkpoint; half-written ones, left by a killed run, are skipped."""
    numbered = {
        int(path.name[11:]): path for path in Path(output_dir).glob("checkpoint-*") if path.name[11:].isdigit()
    }
    for _, path in sorted(numbered.items(), reverse=True):
        if is_complete(path):
            return str(path)
        logger.warning(f"{path} is incomplete, because the run was interrupted while it was written. It is skipped.")
    raise ValueError(
        f"`resume_from_checkpoint` found no complete checkpoint in {str(output_dir)!r}. Start with train() instead:"
        " what was spent so far stays charged."
    )


def check_layout(checkpoint: str | None, trainer: Trainer) -> None:
    """Trainer would find out too late, or on one rank while the others wait, that it cannot read a checkpoint."""
    if trainer.is_distributed_loading_by_transformers and trainer.args.load_best_model_at_end:
        raise ValueError(
            "`load_best_model_at_end` cannot be combined with a model that was sharded by `distributed_config`:"
            " Trainer cannot load weights into it. Launch FSDP2 by Accelerate (recipes/accelerate/fsdp2.yaml), or"
            " leave it out."
        )
    if not checkpoint:
        return
    if not is_complete(checkpoint) or not any(Path(checkpoint).glob("*model*")):
        raise ValueError(
            f"`resume_from_checkpoint` found no complete checkpoint in {checkpoint!r} on this machine."
            " Put the output folder on a disk that all machines share, or copy the checkpoint to each of them."
        )
    if trainer.is_distributed_loading_by_transformers:
        raise ValueError(
            f"`resume_from_checkpoint` = {checkpoint!r} cannot be read into a model that was sharded by"
            " `distributed_config`: Trainer saves no optimizer with it. Launch FSDP2 by Accelerate to resume"
            " (recipes/accelerate/fsdp2.yaml), or load the checkpoint with from_pretrained and start a new phase with"
            " train(): what was spent stays charged."
        )
    found = next((text for name, text in LAYOUTS.items() if Path(checkpoint, name).exists()), "a plain checkpoint")
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    kind = str(getattr(plugin, "state_dict_type", "")).rpartition(".")[2]
    wanted = f"FSDP2's {kind}" if kind else "a plain checkpoint"
    if found != wanted:
        raise ValueError(
            f"`resume_from_checkpoint` must be {wanted} for this run, got {found} in {checkpoint!r}. Resume"
            " the way it was saved (fsdp_state_dict_type), on any number of ranks; or, unless it is in shards, load"
            " its weights with from_pretrained and start a new phase with train(): what was spent stays charged."
        )
