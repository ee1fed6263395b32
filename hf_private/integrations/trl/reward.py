"""DPRewardTrainer: TRL's RewardTrainer with a private step."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from trl import RewardConfig, RewardTrainer

from hf_private.gradients.selfcheck import Loss
from hf_private.tasks.heads import Head, base_model
from hf_private.tasks.independence import refuse_batch

from .pairs import PairLoss, PairMixin, sides
from .preparation import naming_extra
from .settings import SHARED, refuse_images, refuse_settings


class DPRewardTrainer(PairMixin, RewardTrainer):
    """RewardTrainer whose model can be published: it learns a reward from preferences with differential privacy.

    Takes all that `RewardTrainer` takes, and the arguments of privacy that `DPTrainer` takes. A record is a preference
    pair: its chosen and its rejected answer are one unit of privacy, and their gradient is clipped as one.

    Guarantee: TRL's rewards and accuracies of the training pairs are not computed, so they reach no log.
    """

    args: RewardConfig  # pyrefly: ignore[bad-override-mutable-attribute]  narrower than Trainer's, as TRL has it

    blank = {"chosen_ids": [0], "rejected_ids": [0]}  # equal rewards, whose gradients cancel
    objective_of = RewardTrainer
    arguments_class = RewardConfig

    def __init__(
        self,
        model: Any,
        args: RewardConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        **named: Any,
    ) -> None:
        refuse_settings(args, SHARED)
        refuse_images(train_dataset)
        with naming_extra():
            super().__init__(model, args, data_collator, train_dataset, **named)

    @property
    def objective_name(self) -> str:
        """Name of the loss on the card."""
        return "reward model (Bradley-Terry); a record is a pair of answers"

    def create_loss(self, model: nn.Module) -> Loss:
        """The loss of each pair."""
        return RewardLoss(model, self.args.center_rewards_coefficient)


class RewardLoss(PairLoss):
    """The loss of Bradley and Terry's model of each pair: -log sigmoid(chosen - rejected - margin).

    Args:
        center: Weight of (chosen + rejected)^2, which keeps rewards around zero.
    """

    def __init__(self, model: nn.Module, center: float | None = None) -> None:
        super().__init__(model)
        self.center = center

    def losses(self, model: nn.Module, inputs: dict[str, Tensor], batch: Mapping[str, Any]) -> Tensor:
        refuse_batch(base_model(model), Head.CLASSIFICATION, inputs, {"labels": inputs["input_ids"]})
        chosen, rejected = sides(self.forward(model, inputs).logits.squeeze(-1))
        losses = -logsigmoid(chosen - rejected - batch.get("margin", 0))
        return losses if self.center is None else losses + self.center * (chosen + rejected) ** 2
