"""Which models this process has trained, and what that has cost: no file tells it of an object in memory."""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from hf_private.accounting.events import Event
from hf_private.tasks.heads import base_model

from .spending import Spending
from .statement import not_private


class Training(NamedTuple):
    """One training of a model: where it was charged, and its record at the time, which only the first rank has."""

    spending: Spending
    record: dict[str, Any] | None

    def as_record(self) -> dict[str, Any]:
        """The record, with the runs that its folder's card charges by now."""
        return {**self.record, "tuning": self.spending.tuning}


_trained: "WeakKeyDictionary[nn.Module, tuple[Training, ...]]" = WeakKeyDictionary()
settled = WeakTensorKeyDictionary()  # the parameters that were there: their past is in those records


def remember(model: nn.Module, spending: Spending, begun: bool = True) -> None:
    """Keep in mind, as long as the model lives, what its weights have cost.

    Args:
        begun: The ledger has what they had cost before. Otherwise that stays in mind beside it.
    """
    base, record = base_model(model), None
    if spending.writes:
        record = spending.record()
        events = [Event.from_dict(event) for event in record["ledger"]["events"]]
        record["private"] = not not_private(events, record["runs"])
    _trained[base] = (*(() if begun else _trained.get(base, ())), Training(spending, record))
    for parameter in model.parameters():
        settled[parameter] = True


def remembered(model: nn.Module) -> tuple[dict[str, Any], ...]:
    """The records of what this process has trained a model on, on the first rank; empty if it has not."""
    return tuple(training.as_record() for training in _trained.get(base_model(model), ()))


def all_in(spending: Spending, model: nn.Module) -> bool:
    """Whether the last run on a model was charged here, with all that its weights had cost before."""
    trainings = _trained.get(base_model(model), ())
    return len(trainings) == 1 and trainings[0].spending is spending
