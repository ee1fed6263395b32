"""DPDPOTrainer: TRL's DPOTrainer with a private step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from trl import DPOConfig, DPOTrainer
from trl.trainer.utils import use_adapter

from hf_private.gradients.selfcheck import Loss
from hf_private.spending.costs import cost_of, unknown_cost
from hf_private.spending.lineage import past_of
from hf_private.spending.registry import recognise
from hf_private.tasks.head_losses import shifted, token_losses
from hf_private.tasks.heads import IGNORE_INDEX, Head, base_model
from hf_private.tasks.independence import refuse_batch
from hf_private.trainer.refusals import Refusal

from .objectives import BATCH_LOSSES, OBJECTIVES, Pairs
from .pairs import PairLoss, PairMixin, sides
from .preparation import naming_extra, unquoted
from .settings import SHARED, refuse_experts, refuse_images, refuse_settings

UNSUPPORTED = "the private loss does not have it"


def _of_the_batch(args: DPOConfig) -> list[str]:
    return [name for name in args.loss_type if name not in OBJECTIVES]


REFUSED = (
    *SHARED,
    Refusal(
        "loss_type",
        lambda a: bool(_of_the_batch(a)),
        "; ".join(f"{name!r} couples pairs: {why}" for name, why in BATCH_LOSSES.items())
        + "; others have no known loss for each pair",
        f"Use {', '.join(map(repr, OBJECTIVES))}.",
    ),
    Refusal(
        "precompute_ref_log_probs",
        lambda a: a.precompute_ref_log_probs,
        "it reads the training set outside of the private steps, in batches of fixed neighbours",
        "Leave it at False: with PEFT, the reference costs no memory.",
    ),
    Refusal("use_weighting", lambda a: a.use_weighting, UNSUPPORTED, "Leave it at False."),
    Refusal("ld_alpha", lambda a: a.ld_alpha is not None, UNSUPPORTED, "Leave it unset."),
    Refusal(
        "f_divergence_type", lambda a: a.f_divergence_type != "reverse_kl", UNSUPPORTED, "Leave it at 'reverse_kl'."
    ),
)


class DPDPOTrainer(PairMixin, DPOTrainer):
    """DPOTrainer whose model can be published: it learns from preferences with differential privacy.

    Takes all that `DPOTrainer` takes, and the arguments of privacy that `DPTrainer` takes. A record is a preference
    pair: its chosen and its rejected answer are one unit of privacy, and their gradient is clipped as one. The
    reference is `ref_model`, or the model without its adapter, and is never trained. Loss types that are a function of
    one pair are supported, also several with weights; "sft" is the mean over the record's own tokens.

    Guarantee: TRL's rewards, margins and accuracies of the training pairs are not computed, so they reach no log. A
    reference that has cost privacy which `model` has not is refused.
    """

    args: DPOConfig  # pyrefly: ignore[bad-override-mutable-attribute]  narrower than Trainer's, as TRL has it
    ref_model: Any

    blank = {"prompt_ids": [0], "chosen_ids": [], "rejected_ids": []}
    objective_of = DPOTrainer
    arguments_class = DPOConfig

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: DPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        **named: Any,
    ) -> None:
        args = DPOConfig("tmp_trainer") if args is None else args
        refuse_settings(args, REFUSED)
        refuse_images(train_dataset)
        with unquoted(), naming_extra():
            super().__init__(model, args, data_collator, train_dataset, ref_model=ref_model, **named)
        refuse_experts(self)

    @property
    def objective_name(self) -> str:
        """Name of the loss on the card."""
        weights = self.args.loss_weights or [1.0] * len(self.args.loss_type)
        terms = [f"{name} (weight {weight:g})" for name, weight in zip(self.args.loss_type, weights, strict=True)]
        named = self.args.loss_type[0] if terms == [f"{self.args.loss_type[0]} (weight 1)"] else ", ".join(terms)
        return f"preference optimisation (DPO), loss {named}, beta {self.args.beta:g}; a record is a pair of answers"

    def create_loss(self, model: nn.Module) -> Loss:
        """The loss of each pair."""
        self._check_reference()
        return DPOLoss(model, self.args, self._reference)

    @contextmanager
    def _reference(self, model: nn.Module) -> Iterator[nn.Module]:
        """The reference model: another one, or this one without its adapter, or with the one that it began with."""
        if self.ref_model is not None:
            yield self.ref_model
            return
        if not isinstance(model, PeftModel):
            raise ValueError("`ref_model` must be given for a model without adapter, got None.")
        with use_adapter(model, "ref" if "ref" in model.peft_config else None):
            yield model

    def _check_reference(self) -> None:
        """Refuse a reference that was trained privately, unless `model` was trained in that run, too."""
        if self.ref_model is None or self.dp_config.disjoint_data:
            return
        own = [cost_of(statement) for statement in past_of(self.bare_model, self.continues, resumed=True).statements]
        recognise(self.ref_model)
        for statement in past_of(self.ref_model, self.continues).statements:
            cost = cost_of(statement)
            if any(event["steps"] for event in cost["events"]) and cost not in own and not self.spending.has(cost):
                raise unknown_cost("`ref_model` was trained privately, and `model` was not trained in that run")


class DPOLoss(PairLoss):
    """The DPO loss of each pair.

    Args:
        model: The policy.
        args: `loss_type`, `loss_weights`, `beta` and so on.
        reference: fn(policy) -> a context with the reference model.
    """

    def __init__(
        self, model: nn.Module, args: DPOConfig, reference: Callable[[nn.Module], AbstractContextManager[nn.Module]]
    ) -> None:
        super().__init__(model)
        self.args = args
        self.reference = reference

    def losses(self, model: nn.Module, inputs: dict[str, Tensor], batch: Mapping[str, Any]) -> Tensor:
        answers = batch["completion_mask"].flatten(0, 1)
        labels = inputs["input_ids"].masked_fill(answers == 0, IGNORE_INDEX)
        refuse_batch(base_model(model), Head.CAUSAL_LM, inputs, {"labels": labels})
        target = shifted(labels)
        with torch.no_grad(), self.reference(model) as reference:
            ref_chosen, ref_rejected = sides(self._nll(reference, inputs, target).sum(-1))
        nll = self._nll(model, inputs, target)
        chosen, rejected = sides(nll.sum(-1))
        chosen_tokens, rejected_tokens = sides(answers.sum(-1).clamp(min=1))
        counted = sides((target != IGNORE_INDEX).sum(-1).clamp(min=1))[0]
        pairs = Pairs(ref_chosen - chosen, ref_rejected - rejected, chosen_tokens, rejected_tokens, chosen / counted)
        weights = self.args.loss_weights or [1.0] * len(self.args.loss_type)
        terms = [w * OBJECTIVES[name](pairs, self.args) for name, w in zip(self.args.loss_type, weights, strict=True)]
        return torch.stack(terms).sum(0)

    def _nll(self, model: nn.Module, inputs: dict[str, Tensor], target: Tensor) -> Tensor:
        """- log p of each token of the answers (2N, T); 0 elsewhere."""
        return token_losses(self.forward(model, inputs).logits, target)
