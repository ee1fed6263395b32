"""Pretrain a small GPT-2 from scratch on public text, for use without the Hub.

    python recipes/pretrain_tiny.py --output_dir outputs/gpt2_tiny          # ten minutes on one core
    python recipes/e2e.py --config recipes/configs/e2e_tiny.yaml --model_name_or_path outputs/gpt2_tiny --method rgp

The text is the documentation of Python and sentences from templates (recipes/public_text.py): no download, no personal
data, and nothing from the E2E data. The same Python version, packages and seed give the same model. It replaces `gpt2`
for comparisons of methods; its texts are poor.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from public_text import public_sentences, python_documentation
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

END = "<|endoftext|>"
CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# A small GPT-2 on public text

{layers} layers, width {width}, a byte-level BPE vocabulary of {vocabulary} tokens, {parameters:,} parameters,
{steps} steps. Made by `recipes/pretrain_tiny.py` of hf-private as a base model for use without the Hub.

**Trained on** {documentation:,} paragraphs of the documentation of Python ({licence}) and {sentences:,} sentences from
templates about fictional places. The data contains no personal data, so training uses no privacy mechanism.

**Intended for** comparisons of private fine-tuning methods. **Not intended for** text generation.

Loss on {held_out} held-out blocks: {loss:.3f} ({start:.3f} before training).
"""


@dataclass
class PretrainOptions:
    """Size of the model and of its text."""

    layers: int = field(default=4, metadata={"help": "Number of layers."})
    width: int = field(default=128, metadata={"help": "Width of the model; a multiple of 64."})
    vocabulary: int = field(default=4096, metadata={"help": "Number of tokens."})
    block: int = field(
        default=128, metadata={"help": "Tokens in a training record; the model has twice as many positions."}
    )
    sentences: int = field(default=30_000, metadata={"help": "Number of sentences from templates."})


def make_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on these texts; it can encode any string."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=vocabulary, special_tokens=[END], show_progress=False)
    marks = {"bos_token": END, "eos_token": END, "pad_token": END}
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, model_max_length=1024, **marks)


def make_blocks(texts: list[str], tokenizer: PreTrainedTokenizerFast, block: int) -> list[dict[str, torch.Tensor]]:
    """All texts concatenated and cut into blocks of equal length. (Packing is fine here: nothing is private.)"""
    end = tokenizer.eos_token_id
    ids = [token for row in tokenizer(texts)["input_ids"] for token in (*row, end)]
    rows = torch.tensor(ids[: len(ids) // block * block]).view(-1, block)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows[order]]


def main(argv: list[str] | None = None) -> None:
    parser = HfArgumentParser((PretrainOptions, TrainingArguments), description=__doc__.splitlines()[0])
    parser.set_defaults(
        output_dir="outputs/gpt2_tiny", max_steps=1200, per_device_train_batch_size=16, learning_rate=2e-3,
        warmup_steps=50, lr_scheduler_type="cosine", weight_decay=0.1, logging_steps=50, save_strategy="no",
        report_to=["none"],
    )  # fmt: skip
    options, args = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    documentation, sentences = python_documentation(), public_sentences(options.sentences)
    tokenizer = make_tokenizer(documentation + sentences, options.vocabulary)
    blocks = make_blocks(documentation + sentences, tokenizer, options.block)
    held_out = max(len(blocks) // 50, 1)

    set_seed(args.seed)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=2 * options.block, n_embd=options.width, n_layer=options.layers,
        n_head=options.width // 64 or 1, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    trainer = Trainer(
        model,
        args,
        train_dataset=blocks[held_out:],
        eval_dataset=blocks[:held_out],
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    start = trainer.evaluate()["eval_loss"]
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        card = CARD.format(
            layers=options.layers, width=options.width, vocabulary=len(tokenizer), parameters=model.num_parameters(),
            steps=trainer.state.global_step, documentation=len(documentation), sentences=len(sentences),
            licence="PSF License", held_out=held_out, loss=loss, start=start,
        )  # fmt: skip
        Path(args.output_dir, "README.md").write_text(card)
        print(f"{model.num_parameters():,} parameters, loss {start:.3f} -> {loss:.3f}: {args.output_dir}")


if __name__ == "__main__":
    main()
