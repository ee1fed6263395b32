"""A rehearsal: a whole run on made-up records, in a scratch folder. It charges nothing.

It finds what would otherwise fail after money or privacy was spent: a model that is refused, a batch that does not fit
into memory, a metric that fails, a folder that cannot be written.
"""

import copy
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from hf_private.tasks.made_up import UnknownSchemaError, ranges_of, sample, schema_of

if TYPE_CHECKING:
    from .private_mixin import PrivateMixin

logger = logging.get_logger(__name__)

LENGTHS = (4, 12)  # of made-up inputs whose size varies
EVALUATED = 16


class MadeUpRecords(Sequence):
    """As many made-up records as a dataset has, each a function of its position.

    Args:
        dataset: The dataset whose schema they have. Only a few of its records are read, and their content is not kept.
        model: The model whose vocabulary and classes they are drawn from.
        size: Number of records; that of the dataset by default.
        first: Seed of the first record, below 2^32: torch takes no more bits. Other seeds give other records.
    """

    def __init__(self, dataset: Any, model: torch.nn.Module, size: int | None = None, first: int = 0) -> None:
        self._make = schema_of(sample(dataset), ranges_of(model))
        self._size = len(dataset) if size is None else size
        self._first = first

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._size:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self._first + int(index))
        length = int(torch.randint(*LENGTHS, (1,), generator=generator))
        return self._make(length, generator)


def rehearse(trainer: "PrivateMixin", steps: int = 2) -> None:
    """Train, evaluate, save and resume on made-up records, with a copy of the model and the settings of `trainer`.

    The model, the ledger, the output folder and the Hub stay as they are. A copy of the model needs memory. Optimizers
    and callbacks that were passed as objects are not used: they belong to the model that is not trained here.
    """
    if trainer.train_dataset is None:
        raise ValueError("`train_dataset` must be given to rehearse, got None: its schema is needed.")
    folder = trainer.ranks.run_on_first(tempfile.mkdtemp, "", "hf_private_rehearsal_")
    try:
        _twin(trainer, folder, steps).train()
        again = _twin(trainer, folder, steps + 1)
        again.train(resume_from_checkpoint=True)
        if again.eval_dataset is not None:
            again.evaluate()
        again.save_model(str(Path(folder, "saved")))
    finally:
        if trainer.is_world_process_zero():
            shutil.rmtree(folder, ignore_errors=True)
    logger.info(f"Rehearsal passed: {steps} steps, evaluation, checkpoint, resume and saving. Nothing was charged.")


def _twin(trainer: "PrivateMixin", folder: str, steps: int) -> "PrivateMixin":
    """A trainer of the same class and settings on made-up records, in another folder."""
    model = trainer.bare_model
    args = copy.copy(trainer.args)
    changes = {"output_dir": folder, "max_steps": steps, "save_strategy": "steps", "save_steps": steps}
    changes |= {"push_to_hub": False, "report_to": [], "load_best_model_at_end": False, "disable_tqdm": True}
    for name, value in changes.items():
        setattr(args, name, value)
    config = copy.copy(trainer.dp_config)
    config.expected_batch_size = trainer.expected_batch_size
    try:
        train_dataset = MadeUpRecords(trainer.train_dataset, model)
        held_out = None
        if trainer.eval_dataset is not None:
            held_out = MadeUpRecords(trainer.train_dataset, model, EVALUATED, first=2**31)
    except UnknownSchemaError as error:
        raise ValueError(
            f"`train_dataset` cannot be made up: {error}. Rehearse with records of simple types."
        ) from None
    return type(trainer)(
        model=copy.deepcopy(model),
        args=args,
        data_collator=trainer.data_collator,
        train_dataset=train_dataset,
        eval_dataset=held_out,
        processing_class=trainer.processing_class,
        compute_metrics=trainer.compute_metrics,
        preprocess_logits_for_metrics=trainer.preprocess_logits_for_metrics,
        dp_config=config,
        per_sample_loss=trainer.per_sample_loss,
        anchor_dataset=trainer.anchor_dataset,
        public_examples=trainer.public_examples,
    )
