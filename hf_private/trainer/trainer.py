"""DPTrainer: Trainer with a private step. Loop, scheduler, callbacks, checkpoints and evaluation are Trainer's own."""

from transformers import Trainer

from .private_mixin import PrivateMixin


class DPTrainer(PrivateMixin, Trainer):
    """Trainer whose model can be published: it fine-tunes with differential privacy, as `dp_config` says.

    Takes all that `Trainer` takes, and:

    Args:
        dp_config: Privacy settings, see `DPConfig`.
        per_sample_loss: fn(outputs, labels) -> (B,), a loss for each record, in place of the one that fits the
            model's head; `labels` is a dict if there are several. It replaces `compute_loss`.
        anchor_dataset: Public records that span the subspace of `DPConfig.anchors`.
        public_examples: A few public records of the form of `train_dataset`, for the self-check at the start of
            `train()`. By default, records are made up, which fails for content such as file names.
        continues: Folder or Hub repository whose privacy.json this run continues, beside that of the base model.
            Needed for an adapter from `PeftModel.from_pretrained`, because PEFT does not record its origin.

    `gradient_accumulation_steps` and `per_device_train_batch_size` change speed and memory only, once
    `DPConfig.expected_batch_size` is set. Epochs are counted in steps of that size: an epoch is ceil(n / B) steps.

    >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
    >>> from hf_private import DPConfig
    >>> model = BertForSequenceClassification(
    ...     BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, intermediate_size=8, vocab_size=50)
    ... )
    >>> records = [{"input_ids": [7, 8, 9, 10 + i], "labels": i % 2} for i in range(40)]
    >>> folder = getfixture("tmp_path")
    >>> args = TrainingArguments(folder, max_steps=2, report_to=[], disable_tqdm=True, logging_strategy="no")
    >>> trainer = DPTrainer(model, args, dp_config=DPConfig(noise_multiplier=1.0), train_dataset=records)
    >>> output = trainer.train()
    {'train_runtime': ...}
    >>> output.global_step
    2
    >>> trainer.privacy_spent().epsilon < 5
    True
    """
