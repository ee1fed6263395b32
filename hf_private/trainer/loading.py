"""The loader of the private data: draws of records or of units, and their micro-batches."""

from collections.abc import Callable
from typing import Any

from transformers import TrainingArguments

from hf_private.config import DPConfig
from hf_private.mechanism.sampling import PoissonLoader, PoissonSampler
from hf_private.mechanism.units import RowsOfUnits, Units, UnitSampler
from hf_private.randomness import Key
from hf_private.tasks.micro_batches import LogicalCollator


def private_loader(
    dataset: Any,
    units: Units | None,
    logical: LogicalCollator,
    config: DPConfig,
    args: TrainingArguments,
    expected_batch_size: int,
    key: Key | bytes | None,
) -> PoissonLoader:
    """Loader whose items are whole Poisson batches, split into micro-batches.

    Args:
        units: The records of each unit; None if every record is its own.
        logical: Makes micro-batches of the records of a draw.
    """
    collate: Callable[[list[Any]], Any] = logical
    options: dict[str, Any] = {"key": key, "rank": args.process_index, "world_size": args.world_size}
    if units is None and config.augmentations == 1:
        sampler = PoissonSampler(len(dataset), expected_batch_size, **options)
    else:
        sampler = UnitSampler(
            units,
            expected_batch_size,
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
