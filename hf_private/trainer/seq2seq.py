"""DPSeq2SeqTrainer: Seq2SeqTrainer with a private step."""

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from .private_mixin import PrivateMixin


class DPSeq2SeqTrainer(PrivateMixin, Seq2SeqTrainer):
    """Seq2SeqTrainer whose model can be published: it fine-tunes with differential privacy, as `dp_config` says.

    Takes all that `Seq2SeqTrainer` takes, and the arguments of privacy that `DPTrainer` takes. Evaluation generates if
    `predict_with_generate` is set, and the best model is chosen by any of its metrics. A record's loss is the mean
    over its own target tokens, with `label_smoothing_factor` applied record by record.

    Guarantee: The update is that of `DPTrainer` on the same records. Generation only reads weights that were released.

    >>> from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration
    >>> from hf_private import DPConfig
    >>> config = T5Config(
    ...     d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=50, decoder_start_token_id=0
    ... )
    >>> records = [{"input_ids": [7, 8, 9, 10 + i], "labels": [10 + i, 1]} for i in range(40)]
    >>> args = Seq2SeqTrainingArguments(
    ...     getfixture("tmp_path"), max_steps=2, report_to=[], disable_tqdm=True, logging_strategy="no"
    ... )
    >>> trainer = DPSeq2SeqTrainer(
    ...     T5ForConditionalGeneration(config), args, dp_config=DPConfig(noise_multiplier=1.0), train_dataset=records
    ... )
    >>> output = trainer.train()
    {'train_runtime': ...}
    >>> output.global_step
    2
    """

    arguments_class = Seq2SeqTrainingArguments
