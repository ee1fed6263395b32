"""Pretrain a small GPT-2 from scratch on public text, for use without the Hub.

    # 1.3M parameters, ten minutes on one core
    python recipes/pretrain_tiny.py --output_dir outputs/gpt2_tiny

    # 5.1M parameters, ten minutes on a core of one's own with bf16 instructions; reads HF_PRIVATE_DATA
    python recipes/pretrain_tiny.py --output_dir outputs/gpt2_small --texts conversations reviews --layers 5 \
        --width 256 --block 256 --positions 512 --per_device_train_batch_size 4 --max_steps 2400 --bf16 --use_cpu

The text of the first is the documentation of Python and sentences from templates (recipes/public_text.py): no
download, and nothing from the E2E data. It replaces `gpt2` for comparisons of methods; its texts are poor. The second
has read the public part of SGD's conversations (recipes/conversations.py), in the format of configs/chat.jinja, and
the sentences of SST-2, so it speaks. Fine-tune it on other text than that.

The same Python version, packages, number of threads and seed give the same model. A run that was stopped goes on when
it is started again.
"""

from dataclasses import dataclass, field
from pathlib import Path

import data
import torch
from conversations import chats, digest, turns
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
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.chat_template_utils import render_jinja_template

END = "<|endoftext|>"
TEMPLATE = Path(__file__).parent / "configs" / "chat.jinja"
SOURCES = {  # what the card says of each text
    "documentation": "paragraphs of the documentation of Python (PSF License)",
    "templates": "sentences from templates about fictional places",
    "conversations": "conversations of the dev set of Schema-Guided Dialogue, none of its training set (CC BY-SA 4.0)",
    "reviews": "sentences of film reviews, from the training set of SST-2 (for research)",
}
PHRASE = 12  # words; most of SST-2's shorter texts are parts of the longer ones
CARD = """---
language: en
pipeline_tag: text-generation
---
# A small GPT-2 on public text

{layers} layers, width {width}, a byte-level BPE vocabulary of {vocabulary} tokens, {parameters:,} parameters,
{steps} steps on {tokens:,} tokens. Made by `recipes/pretrain_tiny.py` of hf-private as a base model for use without
the Hub.

**Trained on**

{sources}

All of it is published, so training uses no privacy mechanism. Do not fine-tune the model on the same text to show what
private training can do.

**Intended for** comparisons of private fine-tuning methods. **Not intended for** text generation.

Loss on {held_out} held-out blocks of {block} tokens: {loss:.3f} ({start:.3f} before training).
"""


@dataclass
class PretrainOptions:
    """Size of the model, and its text."""

    texts: list[str] = field(
        default_factory=lambda: ["documentation", "templates"],
        metadata={"help": "What it reads.", "choices": list(SOURCES)},
    )
    layers: int = field(default=4, metadata={"help": "Number of layers."})
    width: int = field(default=128, metadata={"help": "Width of the model; a multiple of 64."})
    vocabulary: int = field(default=4096, metadata={"help": "Number of tokens."})
    block: int = field(default=128, metadata={"help": "Tokens in a training record."})
    positions: int | None = field(
        default=None, metadata={"help": "Longest text of the model; default: twice `block`."}
    )
    sentences: int = field(default=30_000, metadata={"help": "Number of sentences from templates."})


def read(source: str, options: PretrainOptions) -> list[str]:
    """The texts of one source, each once, in a fixed order."""
    if source == "documentation":
        return python_documentation()
    if source == "templates":
        return public_sentences(options.sentences)
    if source == "conversations":
        found = list(chats(turns("public")).values())
        return render_jinja_template(found, chat_template=TEMPLATE.read_text(), eos_token=END)[0]
    reviews = data.load("sst2", "train", None, ("train",), ("nyu-mll/glue", "sst2"), "train", columns=("sentence",))
    whole = (text.strip() for text in reviews["sentence"] if len(text.split()) >= PHRASE)
    return list(dict.fromkeys(whole))


def make_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on these texts; it can encode any string."""
    bpe = ByteLevelBPETokenizer()
    plain = (text.replace(END, "") for text in texts)
    bpe.train_from_iterator(plain, vocab_size=vocabulary, special_tokens=[END], show_progress=False)
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
        warmup_steps=50, lr_scheduler_type="cosine", weight_decay=0.1, logging_steps=50,
        save_strategy="steps", save_steps=200, save_total_limit=1, report_to=["none"],
    )  # fmt: skip
    options, args = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    sources = {name: read(name, options) for name in options.texts}
    listed = "\n".join(
        f"- {len(texts):,} {SOURCES[name]}; SHA-256 begins with `{digest(texts)}`" for name, texts in sources.items()
    )
    print(listed, flush=True)
    texts = [text for found in sources.values() for text in found]
    tokenizer = make_tokenizer(texts, options.vocabulary)
    if "conversations" in sources:
        tokenizer.chat_template = TEMPLATE.read_text()
    blocks = make_blocks(texts, tokenizer, options.block)
    held_out = max(len(blocks) // 100, 1)

    set_seed(args.seed)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=options.positions or 2 * options.block, n_embd=options.width,
        n_layer=options.layers, n_head=options.width // 64 or 1, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, activation_function="gelu_pytorch_tanh",
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
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))
    loss = trainer.evaluate()["eval_loss"]
    trained = trainer.state.global_step * args.train_batch_size * args.world_size * options.block
    trainer.save_model()
    if trainer.is_world_process_zero():
        card = CARD.format(
            layers=options.layers, width=options.width, vocabulary=len(tokenizer), parameters=model.num_parameters(),
            steps=trainer.state.global_step, tokens=trained, sources=listed,
            held_out=held_out, block=options.block, loss=loss, start=start,
        )  # fmt: skip
        Path(args.output_dir, "README.md").write_text(card)
        print(f"{model.num_parameters():,} parameters, loss {start:.3f} -> {loss:.3f}: {args.output_dir}")


if __name__ == "__main__":
    main()
