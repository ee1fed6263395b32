"""Preference pairs: the chosen and the rejected side of a record are two rows of the model's input, clipped as one."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_private.tasks.heads import base_model
from hf_private.tasks.independence import empty_rows, refuse_adapters, refuse_model, with_one_token
from hf_private.tasks.losses import takes
from hf_private.trainer.data_guards import made_up_batch
from hf_private.trainer.private_mixin import PrivateMixin

from .preparation import TRAINING, without_gaps
from .settings import refuse_rehearsal

SIDES = 2
NO_INPUTS = ("completion_mask", "margin")  # of the model


class PairCollator:
    """TRL's collator of preference data, with one row for each record: both sides lie on the second axis.

    TRL returns all chosen sides, then all rejected ones: 2N rows of tokens become (N, 2, T). What has N entries, such
    as `margin`, stays as it is.

    >>> collator = PairCollator(lambda records: {"input_ids": torch.tensor([[1], [2], [3], [4]])})
    >>> collator([{}, {}])["input_ids"].tolist()
    [[[1], [3]], [[2], [4]]]
    """

    def __init__(self, collator: Callable[[list[Any]], Mapping[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, records: list[Any]) -> dict[str, Any]:
        size = len(records)
        return {
            name: value.unflatten(0, (SIDES, size)).transpose(0, 1) if len(value) == SIDES * size else value
            for name, value in self.collator(records).items()
        }

    @staticmethod
    def length_of(record: Mapping[str, Any]) -> int:
        """Tokens of a record in a batch: twice those of its longer side.

        >>> PairCollator.length_of({"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5, 6]})
        10
        """
        longest = max(len(record[name]) for name in ("chosen_ids", "rejected_ids"))
        return SIDES * (len(record.get("prompt_ids", ())) + longest)


class PairInputs:
    """Records of pairs in the model's field: `input_ids` holds both sides, cut to `max_length` as the collator does.

    >>> PairInputs([{"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4]}], max_length=2)[0]
    {'input_ids': [[1, 2], [1, 4]]}
    """

    def __init__(self, dataset: Any, max_length: int | None) -> None:
        self._dataset = dataset
        self._max_length = max_length

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> dict[str, list[list[int]]]:
        record = self._dataset[index]
        prompt = list(record.get("prompt_ids", ()))
        whole = [prompt + list(record[name]) for name in ("chosen_ids", "rejected_ids")]
        return {"input_ids": [ids[: self._max_length] for ids in whole]}


class PairMixin(PrivateMixin):
    """Makes a trainer of preference pairs private: a record is a pair, in one row of the private steps."""

    blank: Mapping[str, Any]  # columns of a prepared pair that teaches nothing

    def __init__(self, *arguments: Any, per_sample_loss: Any = None, **named: Any) -> None:
        if per_sample_loss is not None:
            raise ValueError(
                f"`per_sample_loss` must be None for {type(self).__name__}, got a function: it has its own loss."
            )
        super().__init__(*arguments, **named)

    def _prepare_dataset(self, dataset: Any, *arguments: Any, **named: Any) -> Any:
        """TRL's preparation. It leaves out pairs that are too long; those of the training set stay, blank."""
        prepare = super()._prepare_dataset  # pyrefly: ignore[missing-attribute]  TRL's trainer follows in the MRO
        if TRAINING not in (*arguments[-1:], named.get("dataset_name")):
            return prepare(dataset, *arguments, **named)
        return without_gaps(lambda records: prepare(records, *arguments, **named), dataset, self.blank)

    @property
    def training_collator(self) -> Callable[[list[Any]], Any]:
        """The collator of the private steps; TRL's own stays for evaluation."""
        return PairCollator(self.data_collator)

    def as_inputs(self, dataset: Any) -> Any:
        """Both sides of each record, as the model will see them."""
        return PairInputs(dataset, getattr(self.args, "max_length", None))

    def public_batch(
        self, batch_size: int, length: int, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Made-up pairs, whose prompt and answer have up to `length` tokens together."""
        return made_up_batch(self, batch_size, max(2, length // 2), generator)

    def rehearse(self, steps: int = 2) -> None:
        """Refused: TRL prepares text, and text cannot be made up from a schema."""
        refuse_rehearsal(self)


class PairLoss:
    """A loss of each preference pair. Subclasses say which in `losses`.

    Guarantee: a pair's loss depends on its own two sides alone. Its rows belong to one record, whose gradient is
    clipped as one (`rows_per_record`).
    """

    rows_per_record = SIDES

    def __init__(self, model: nn.Module) -> None:
        base = base_model(model)
        refuse_model(base, own_loss=True)
        refuse_adapters(model)
        self._options = {"use_cache": False} if takes(base, "use_cache") else {}

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Run the model on both sides of all pairs, (N, 2, T) -> (N,) losses."""
        inputs = {name: value.flatten(0, 1) for name, value in batch.items() if name not in NO_INPUTS}
        empty = empty_rows(inputs)
        if empty is None:
            return self.losses(model, inputs, batch)
        return self.losses(model, with_one_token(inputs), batch).where(~empty.unflatten(0, (-1, SIDES)).any(1), 0)

    def losses(self, model: nn.Module, inputs: dict[str, Tensor], batch: Mapping[str, Any]) -> Tensor:
        """The losses (N,) of `batch`, whose 2N rows are in `inputs`, one pair after the other."""
        raise NotImplementedError

    def forward(self, model: nn.Module, inputs: dict[str, Tensor]) -> Any:
        """The model's outputs for all rows."""
        return model(**inputs, **self._options)


def sides(x: Tensor) -> tuple[Tensor, Tensor]:
    """Chosen and rejected values, from one value for each row: (2N, ...) -> twice (N, ...)."""
    chosen, rejected = x.unflatten(0, (-1, SIDES)).unbind(1)
    return chosen, rejected
