"""Runs the self-check on a model of the zoo, for the tests of it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_private.gradients.selfcheck import self_check
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch

# The first name in the message is a remedy, not a parameter: the refusal is about records that are not independent.
COUPLES = "^[^`]*`per_device_train_batch_size=1`"


def check(model: nn.Module, loss: Callable[..., Any] | None = None, **settings: Any) -> str:
    return self_check(model, loss or PerSampleLoss(model), partial(synthetic_batch, model), **settings)


def each(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each record."""
    return nn.functional.cross_entropy(logits.float(), labels, reduction="none")
