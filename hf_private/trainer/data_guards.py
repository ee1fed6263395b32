"""Checks of the data before the first charge, made-up batches, and a guard against evaluation on training records."""

import copy
import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import datasets
import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_private.gradients.selfcheck import Loss
from hf_private.gradients.undisturbed import undisturbed
from hf_private.tasks.collators import check_collator
from hf_private.tasks.dataset_check import check_dataset
from hf_private.tasks.heads import base_model, head_of
from hf_private.tasks.limits import limits_of
from hf_private.tasks.long_rows import longest_of
from hf_private.tasks.losses import LABEL_NAMES, PerSampleLoss
from hf_private.tasks.made_up import ranges_of, sample, schema_of
from hf_private.tasks.micro_batches import LogicalCollator
from hf_private.tasks.micro_batches import length_of as tokens_of
from hf_private.tasks.repeats import most_repeats
from hf_private.tasks.synthetic import synthetic_batch
from hf_private.tasks.training_records import TrainingRecords
from hf_private.tasks.unit_loss import MakeBatch, made_up_units

from .guards import check_content, check_evaluation, warn_of_copies

if TYPE_CHECKING:
    from .loading import LoadingMixin


UNKNOWN = (AttributeError, TypeError, pickle.PicklingError)  # of records that cannot be hashed
EXAMPLES = 16  # public ones that are collated together


def main_input(model: nn.Module) -> str:
    """Name of a model's main input."""
    return getattr(base_model(model), "main_input_name", "input_ids")


def check_data(trainer: "LoadingMixin", dataset: Any, logical: LogicalCollator, all_records: bool) -> None:
    """Check the collator and, in `train()`, all records; nothing has been charged yet."""
    assert trainer.model is not None
    if all_records:
        trainer.ranks.run_on_first(_check_repeats, trainer)
    if all_records and trainer.dp_config.check_dataset:
        trainer.evaluation_guard.check_copies()
        head = head_of(trainer.model) if trainer.per_sample_loss is None else None
        limits = limits_of(trainer.model, head)
        progress = not trainer.args.disable_tqdm
        trainer.ranks.run_on_first(check_dataset, trainer.as_inputs(dataset), logical.collate, limits, progress)
    if logical.max_rows > 1:
        check_collator(_as_batch(trainer, logical), dataset, trainer.model)


def _check_repeats(trainer: "LoadingMixin") -> None:
    """Refuse a record that stands in the training set more often than a unit is charged for."""
    config = trainer.dp_config
    repeats = 1 if config.unit_column else most_repeats(trainer.train_dataset)
    if repeats > config.group_size and config.is_private:
        raise ValueError(
            f"`train_dataset` must hold each record once, got one {repeats} times (the same row or object, as"
            f" oversampling does): the epsilon of one would be claimed, and that of {repeats} spent. Use it once,"
            " and train for more steps or weigh classes in `per_sample_loss`; or charge for it with"
            f" DPConfig(records_per_unit={repeats}). Nothing was charged."
        )


def longest_record(trainer: "LoadingMixin") -> int:
    """Tokens of the longest training record."""
    dataset, collator = trainer._without_unused_columns(trainer.as_inputs(trainer.train_dataset), "training")
    return longest_of(dataset, getattr(trainer.training_collator, "length_of", tokens_of), collator)


def try_records(trainer: "LoadingMixin", model: nn.Module, loss: Loss) -> None:
    """Compute the loss of two training records, and drop it: what the model cannot take would fail after a charge.

    The error names fields, types and shapes. Of errors that are not our own only the kind is told, as a collator or
    torch may quote a record.
    """
    if not trainer.dp_config.check_dataset:
        return
    dataset, collator = trainer._without_unused_columns(trainer.train_dataset, "training")
    batch: Any = {}
    try:
        batch = collator(copy.deepcopy(sample(dataset, min(2, trainer.args.per_device_train_batch_size))))
        if isinstance(loss, PerSampleLoss):
            batch = loss.checked(model, batch)
        with undisturbed(model), torch.no_grad():
            model.eval()
            loss(model, trainer._prepare_inputs(batch))
    except Exception as error:
        got = str(error).strip().rstrip(".") if _is_ours(error) else type(error).__name__
        fields = [f"{k} {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for k, x in batch.items() if _sized(x)]
        raise ValueError(
            f"`train_dataset` must hold records that the model takes, got an error for two: {got}. Their batch:"
            f" {', '.join(fields) or 'none'}. Nothing was charged. (`DPConfig(check_dataset=False)` skips this.)"
        ) from None


def _is_ours(error: Exception) -> bool:
    """Whether the error comes from this package, whose messages quote no record."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, ValueError) and frame.f_globals.get("__name__", "").startswith("hf_private.")


def _sized(x: Any) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape")


def _as_batch(trainer: "LoadingMixin", logical: LogicalCollator) -> Callable[[list[Any]], Any]:
    """Function from records to the model's batch: the collator, and a subclass's `_prepare_inputs`."""
    if type(trainer)._prepare_inputs is Trainer._prepare_inputs:
        return logical.collate

    def prepared(records: list[Any]) -> Any:
        batch = trainer._prepare_inputs(logical.collate(records))
        return {name: x.cpu() if isinstance(x, Tensor) else x for name, x in batch.items()}

    return prepared


def public_batch(
    trainer: "LoadingMixin", batch_size: int, length: int, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """A made-up batch: of `public_examples`, for the model's head, or with the dataset's schema if `per_sample_loss`
    replaces the head's. It has all fields of a training batch, as a model may use one to couple records."""
    if trainer.public_examples is not None:
        return example_batch(trainer, batch_size, generator)
    make: MakeBatch = partial(synthetic_batch, trainer.accelerator.unwrap_model(trainer.model))
    if trainer.rows_per_record > 1:
        make = made_up_units(make, trainer.rows_per_record)
    try:
        batch = make(batch_size, length, generator)
    except (AttributeError, ValueError):  # a head or an input that is not listed
        if trainer.per_sample_loss is None or trainer.train_dataset is None:
            raise
        return made_up_batch(trainer, batch_size, length, generator)
    inputs = training_inputs(trainer)
    further = inputs - batch.keys()
    if further:
        made_up = made_up_batch(trainer, batch_size, length, generator)
        if (
            main_input(trainer.accelerator.unwrap_model(trainer.model)) not in inputs
        ):  # it has another one, such as embedded tokens
            return made_up
        batch |= {name: made_up[name] for name in further if name in made_up}
    return batch


def training_inputs(trainer: "LoadingMixin") -> set[str]:
    """Names of the inputs of a training batch, without labels; none if it cannot be built."""
    dataset: Any = trainer.train_dataset
    if dataset is None or not len(dataset):
        return set()
    collator = trainer._get_collator_with_removed_columns(trainer.training_collator, description="training")
    try:
        collated = collator(copy.deepcopy(sample(dataset, 1)))
    except Exception:  # such records are refused elsewhere, with what is wrong
        return set()
    names = {name for name, x in collated.items() if isinstance(x, Tensor)}
    return names - {*LABEL_NAMES, *(trainer.args.label_names or ())}


def example_batch(trainer: "LoadingMixin", batch_size: int, generator: torch.Generator | None) -> dict[str, Tensor]:
    """Some of `public_examples`, in a batch of the trainer's collator; others for another generator.

    All batches are rows of one, so that they have one width and their records can be exchanged.
    """
    examples: Any = trainer.public_examples
    if examples is trainer.train_dataset:
        raise ValueError(
            "`public_examples` must not be `train_dataset`: whether the self-check passes would depend on it. Give a"
            " few records that anybody may see, such as made-up ones."
        )
    if len(examples) <= batch_size:
        raise ValueError(
            f"`public_examples` must hold more than {batch_size} different records, got {len(examples)}: the"
            " self-check compares batches of them. Add some."
        )
    seed = 0 if generator is None else generator.initial_seed()
    pool = [examples[n] for n in range(min(len(examples), max(EXAMPLES, batch_size + 1)))]
    rows = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))[:batch_size]
    collator = trainer._get_collator_with_removed_columns(trainer.training_collator, description="public")
    batch = _tensors(trainer, collator(pool))
    return {name: value[rows.to(value.device)] for name, value in batch.items()}


def _tensors(trainer: "LoadingMixin", batch: Any) -> dict[str, Tensor]:
    return {name: value for name, value in trainer._prepare_inputs(batch).items() if isinstance(value, Tensor)}


def made_up_batch(
    trainer: "LoadingMixin", batch_size: int, length: int, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Made-up records with the schema of the training set, in a batch of its collator."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    generator = generator or torch.Generator().manual_seed(0)
    varied = [length, *torch.randint(2, max(3, length), (batch_size - 1,), generator=generator).tolist()]
    try:
        make = schema_of(sample(trainer.train_dataset), ranges_of(model))
        collator = trainer._get_collator_with_removed_columns(trainer.training_collator, description="made-up")
        try:
            batch = collator([make(size, generator) for size in varied])
        except Exception:  # a collator of records of one length
            batch = collator([make(length, generator) for _ in varied])
        return _tensors(trainer, batch)
    except Exception:
        raise ValueError(
            f"`public_examples` must be given for {type(base_model(model)).__name__}: no made-up batch could be built"
            " from the schema of `train_dataset`. Give a few public records of the same form, or override"
            " `public_batch`."
        ) from None


class EvaluationGuard:
    """Keeps training records out of evaluations: their metrics would be logged without noise."""

    def __init__(self, trainer: "LoadingMixin") -> None:
        self.trainer = trainer
        self._known: TrainingRecords | None = None  # hashed at the first evaluation

    @property
    def _on(self) -> bool:
        config = self.trainer.dp_config
        return self.trainer.train_dataset is not None and config.is_private and not config.log_nonprivate

    def check(self, evaluation: Any) -> None:
        """Refuse the training set itself, and units that are in both; the unit's column is still there."""
        if self._on:
            check_evaluation(evaluation, self.trainer.train_dataset)
            if not self.trainer.dp_config.disjoint_units:
                self.trainer.unit_column.check_disjoint(evaluation, self.trainer.train_dataset)

    def check_content(self, evaluation: Any) -> None:
        """Refuse a dataset, or a dict of them, whose records are training records."""
        if self._on and evaluation is not None:
            check_evaluation(evaluation, self.trainer.train_dataset)
            check_content(evaluation, self._training_records())

    def check_copies(self) -> None:
        """Warn if training records recur in a dataset that can be read without computing its records."""
        config, dataset = self.trainer.dp_config, self.trainer.train_dataset
        if self._on and config.group_size == 1 and not config.unit_column:
            if isinstance(dataset, (datasets.Dataset, list, tuple)):
                with suppress(*UNKNOWN):
                    warn_of_copies(self._training_records().recurring())

    def check_public(self, **given: Any) -> None:
        """Refuse data that is used without noise, because it is said to be public, if it holds training records."""
        for name, dataset in given.items():
            found = None
            with suppress(*UNKNOWN):
                found = self._training_records().overlap(dataset) if self._on and dataset is not None else None
            if found is not None and found.share > found.allowed:
                raise ValueError(
                    f"`{name}` must hold public records, got {found.share:.0%} that are training records. They"
                    " are used without noise. Give other ones, such as made-up ones."
                )

    def forget(self) -> None:
        """Read the training records again: they may have been changed in place."""
        self._known = None

    def _training_records(self) -> TrainingRecords:
        trainer, known = self.trainer, self._known
        if known is not None and known.dataset is trainer.train_dataset:
            return known
        assert trainer.model is not None
        padding = getattr(getattr(base_model(trainer.model), "config", None), "pad_token_id", None)
        labels = (*LABEL_NAMES, *(trainer.args.label_names or ()))
        self._known = TrainingRecords(trainer.train_dataset, main_input(trainer.model), padding, labels)
        return self._known
