"""The class that the mixins are written for.

A mixin stands before a Trainer class among the bases, and what it calls with super() is that class's. So it has no
base of its own; only a type checker sees a Trainer here, with a model.
"""

from typing import TYPE_CHECKING

from torch import nn
from transformers import Trainer

if TYPE_CHECKING:

    class TrainerBase(Trainer):
        """Trainer with a model. Its own annotation also allows None, which it is before __init__."""

        model: nn.Module  # pyrefly: ignore[bad-override-mutable-attribute]
else:
    TrainerBase = object
