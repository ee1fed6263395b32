"""DPSFTTrainer: TRL's SFTTrainer with a private step."""

from typing import Any

import torch
from torch import Tensor, nn
from trl import SFTConfig, SFTTrainer

from hf_private.gradients.selfcheck import Loss
from hf_private.tasks.head_losses import shifted, token_losses
from hf_private.tasks.heads import IGNORE_INDEX
from hf_private.trainer.private_mixin import PrivateMixin

from .preparation import TRAINING, naming_extra, unquoted, without_gaps
from .settings import SHARED, refuse_experts, refuse_images, refuse_rehearsal, refuse_settings

BLANK = {"input_ids": [0], "labels": [IGNORE_INDEX]}


class DPSFTTrainer(PrivateMixin, SFTTrainer):
    """SFTTrainer whose model can be published: it fine-tunes with differential privacy, as `dp_config` says.

    Takes all that `SFTTrainer` takes, and the arguments of privacy that `DPTrainer` takes. TRL prepares the dataset:
    text, conversations, prompts and completions, `assistant_only_loss`, chat templates, `peft_config`. A record's loss
    is the mean over its own target tokens. (TRL divides by the tokens of the whole batch, which couples records.)

    Guarantee: The update is that of `DPTrainer` on the prepared records; TRL's metrics of the training tokens are not
    computed, so they reach no log.

    >>> from datasets import Dataset
    >>> from tokenizers import Tokenizer, models
    >>> from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    >>> from hf_private import DPConfig
    >>> vocabulary = {word: i for i, word in enumerate("<eos> [UNK] I tea coffee".split())}
    >>> words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    >>> records = Dataset.from_list([{"prompt": "I", "completion": word} for word in ("tea", "coffee")] * 20)
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=5))
    >>> args = SFTConfig(getfixture("tmp_path"), max_steps=2, report_to=[], disable_tqdm=True, bf16=False)
    >>> trainer = DPSFTTrainer(
    ...     model,
    ...     args,
    ...     dp_config=DPConfig(noise_multiplier=1.0),
    ...     train_dataset=records,
    ...     processing_class=tokenizer,
    ... )
    >>> output = trainer.train()
    {'train_runtime': ...}
    >>> output.global_step
    2
    """

    args: SFTConfig  # pyrefly: ignore[bad-override-mutable-attribute]  narrower than Trainer's, as TRL has it

    objective_of = SFTTrainer
    arguments_class = SFTConfig

    def __init__(
        self,
        model: Any,
        args: SFTConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        **named: Any,
    ) -> None:
        refuse_settings(args, SHARED)
        refuse_images(train_dataset)
        with unquoted(), naming_extra():
            super().__init__(model, args, data_collator, train_dataset, **named)
        refuse_experts(self)

    def _prepare_dataset(self, dataset: Any, *arguments: Any, **named: Any) -> Any:
        """TRL's preparation. It leaves out records without target tokens; those of the training set stay, blank."""
        prepare = super()._prepare_dataset
        if TRAINING not in (*arguments[-1:], named.get("dataset_name")):
            return prepare(dataset, *arguments, **named)
        return without_gaps(lambda records: prepare(records, *arguments, **named), dataset, BLANK)

    @property
    def objective_name(self) -> str:
        """Name of the loss on the card."""
        kind = "dynamic fine-tuning (DFT)" if self.args.loss_type == "dft" else "supervised fine-tuning"
        return f"{kind}, mean over each record's target tokens"

    def rehearse(self, steps: int = 2) -> None:
        """Refused: TRL prepares text, and text cannot be made up from a schema."""
        refuse_rehearsal(self)

    def create_loss(self, model: nn.Module) -> Loss:
        """The loss of each record: that of the language model, or DFT's."""
        if self.args.loss_type == "dft" and self.per_sample_loss is None:
            return type(super().create_loss(model))(model, dft_loss)
        return super().create_loss(model)


def dft_loss(outputs: Any, labels: Tensor) -> Tensor:
    """DFT (arXiv:2508.05629): each token's loss times its own probability, which is taken as a constant -> (B,).

    >>> from types import SimpleNamespace
    >>> logits = torch.zeros(1, 3, 4)  # four equally likely tokens
    >>> dft_loss(SimpleNamespace(logits=logits), torch.tensor([[1, 2, 3]]))  # log(4) / 4
    tensor([0.3466])
    """
    target = shifted(labels)
    losses = token_losses(outputs.logits, target)
    return (losses * torch.exp(-losses.detach())).sum(-1) / (target != IGNORE_INDEX).sum(-1).clamp(min=1)
