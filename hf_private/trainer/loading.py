"""Data loading: Poisson draws of the private records, public anchors, and evaluation on other records."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import datasets
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from hf_private._validate import integer_at_least
from hf_private.config import DPConfig
from hf_private.distributed.ranks import Ranks
from hf_private.gradients.selfcheck import Loss
from hf_private.mechanism.sampling import PoissonLoader, PoissonSampler
from hf_private.mechanism.units import RowsOfUnits, UnitSampler
from hf_private.methods.gep.public_data import AnchorBooks, AnchorData, checked_anchors
from hf_private.tasks.losses import LABEL_NAMES
from hf_private.tasks.micro_batches import LogicalCollator
from hf_private.tasks.unit_column import UnitColumn

from .base import TrainerBase
from .data_guards import EvaluationGuard, check_data, main_input, public_batch
from .setup import Keys


class LoadingMixin(TrainerBase):
    """The loaders of a private Trainer class. `PrivateMixin` sets what they read of a run."""

    dp_config: DPConfig
    ranks: Ranks
    per_sample_loss: Callable[[Any, Any], Tensor] | None
    anchor_dataset: Any
    public_examples: Any
    expected_batch_size: int
    unit_column: UnitColumn
    evaluation_guard: EvaluationGuard
    _keys: Keys | None

    @property
    def num_units(self) -> int | None:
        """Number of units in the training set; None if every record is its own unit."""
        units = self.unit_column.units(self.train_dataset)
        return None if units is None else len(units)

    @property
    def num_records(self) -> int | None:
        """Number of training records; None if there is no training set. One without a length is refused."""
        dataset: Any = self.train_dataset
        return None if dataset is None else len(dataset)

    # ---- training

    @property
    def training_collator(self) -> Callable[[list[Any]], Any]:
        """The collator of private steps: `data_collator`, unless a subclass trains on another layout than it
        evaluates on. Rows of its batches are records."""
        return self.data_collator

    @property
    def rows_per_record(self) -> int:
        """Rows of each record (chunks of a text, candidates), as the collator's attribute of this name says, or 1.

        Its tensors then have the shape (records, rows, ...).
        """
        rows = getattr(self.training_collator, "rows_per_record", 1)
        integer_at_least(1, rows_per_record=rows)
        return rows

    def as_inputs(self, dataset: Any) -> Any:
        """The records in the fields of the model's input, for the check before the first charge."""
        return dataset

    def get_train_dataloader(self) -> PoissonLoader:
        """Loader whose items are whole Poisson batches, split into micro-batches."""
        if self.train_dataset is None:
            raise ValueError("`train_dataset` must be given to train, got None.")
        dataset, collator = self._without_unused_columns(self.train_dataset, "training")
        logical = LogicalCollator(
            collator,
            self.args.per_device_train_batch_size,
            self.dp_config.micro_batch_tokens,
            rows_of=(main_input(self.model), *LABEL_NAMES, *(self.args.label_names or ())),
        )
        check_data(self, dataset, logical, all_records=self._keys is not None)
        return self._poisson_loader(dataset, logical)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The expected batch size, for Trainer's banner and speed."""
        return self.expected_batch_size

    def _poisson_loader(self, dataset: Any, logical: LogicalCollator) -> PoissonLoader:
        """Draws of records, or of units, which `logical` makes micro-batches of."""
        args, config, units = self.args, self.dp_config, self.unit_column.units(self.train_dataset)
        collate: Callable[[list[Any]], Any] = logical
        options: dict[str, Any] = {
            "key": self._keys.sampling if self._keys else None,
            "rank": args.process_index,
            "world_size": args.world_size,
        }
        if units is None and config.augmentations == 1:
            sampler = PoissonSampler(len(dataset), self.expected_batch_size, **options)
        else:
            sampler = UnitSampler(
                units,
                self.expected_batch_size,
                records_per_unit=config.records_per_unit,
                sampling=config.unit_sampling,
                augmentations=config.augmentations,
                num_records=len(dataset),
                **options,
            )
            dataset = RowsOfUnits(dataset, size=sampler.num_records)
            collate = logical.collate_units
        return PoissonLoader(
            dataset,
            sampler,
            collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
        )

    def _with_checked_anchors(self, config: DPConfig) -> DPConfig:
        """The settings with the name and fingerprint of `anchor_dataset` in them."""
        own: Any = config.method_config  # parsed by DPConfig
        checked: Any = checked_anchors(own, self.anchor_dataset, self.train_dataset)
        return replace(config, **{"anchors" if config.carriers is None else "carriers": checked})

    def _anchor_books(self, loss: Loss) -> AnchorBooks:
        """The public records of GEP or of public carriers, in micro-batches as the private ones have."""
        args = self.args
        config: Any = self.dp_config.method_config
        dataset, collator = self._without_unused_columns(self.anchor_dataset, "anchor")
        data = AnchorData(
            dataset,
            collator,
            self.model,
            num_anchors=config.num_anchors,
            labels=config.labels,
            max_rows=args.per_device_train_batch_size,
            max_tokens=self.dp_config.micro_batch_tokens,
            seed=args.seed,
        )
        return AnchorBooks(self.model, loss, lambda step: map(self._prepare_inputs, data(step)), args.seed)

    def public_batch(
        self, batch_size: int, length: int, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """A made-up batch for the self-check at the start of `train()`: inputs and labels of records of up to `length`
        tokens, no two alike. It is made for the model's head, or else by the collator, of made-up records with the
        schema of the training set. `public_examples` replaces those."""
        return public_batch(self, batch_size, length, generator)

    # ---- evaluation

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Trainer's loader, for units that are not trained on."""
        self.evaluation_guard.check(eval_dataset if not isinstance(eval_dataset, str) else self.eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Trainer's loader, for units that are not trained on."""
        self.evaluation_guard.check(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def evaluation_loop(self, dataloader: DataLoader, *args: Any, **kwargs: Any) -> Any:
        """Trainer's loop of `evaluate` and `predict`, for anything but the training records: their metrics would be
        published without noise."""
        self.evaluation_guard.check_content(getattr(dataloader, "dataset", None))
        return super().evaluation_loop(dataloader, *args, **kwargs)

    # ---- columns

    def _without_unused_columns(self, dataset: Any, description: str) -> tuple[Any, Callable[[list[Any]], Any]]:
        """The dataset and its collator. One of them removes the columns that the model does not take."""
        if isinstance(dataset, datasets.Dataset):
            return self._remove_unused_columns(dataset, description), self.training_collator
        return dataset, self._get_collator_with_removed_columns(self.training_collator, description)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """As Trainer does, and the unit's column in any case, in training and in evaluation."""
        return self.unit_column.removed(super()._remove_unused_columns(dataset, description))

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        return self.unit_column.hidden_from(super()._get_collator_with_removed_columns(data_collator, description))
