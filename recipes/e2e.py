"""Fine-tune a causal language model on the E2E NLG challenge with differential privacy; score texts for the dev set.

    # where no hub can be reached: a small GPT-2 made on the spot from public text, then fine-tuned privately
    python recipes/pretrain_tiny.py --output_dir outputs/gpt2_tiny
    python recipes/e2e.py --config recipes/configs/e2e_tiny.yaml --method rgp --output_dir outputs/e2e_rgp

    # GPT-2 as in the papers (batch 1024, 10 epochs, delta 8e-6), on four GPUs
    accelerate launch --num_processes 4 recipes/e2e.py --config recipes/configs/e2e_gpt2.yaml --output_dir outputs/e2e

A record is a meaning representation and one text that says it; the loss counts the text only. Scores: perplexity per
token of all dev texts, then texts by beam search for each different meaning, against all its references: BLEU,
ROUGE-L, NIST, CIDEr (and METEOR where WordNet is installed). The output folder gets the model, its card,
results.json, and generated.jsonl to look at. Generation runs on the first process and needs the whole model there
(DDP yes, FSDP no).
"""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import data
import evaluate
import torch
from data import split_off
from datasets import Dataset, DatasetInfo
from options import RecipeOptions, parse
from public_text import public_sentences
from torch import Tensor
from training import RecipeTrainer, finish, train, with_method
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed

METRICS = Path(__file__).parent / "metrics"
IGNORE = -100


@dataclass
class E2EOptions(RecipeOptions):
    """Options of this recipe."""

    model_name_or_path: str = field(default="gpt2", metadata={"help": "Hub name or folder of a causal LM."})
    max_length: int = field(default=128, metadata={"help": "Longest record (meaning and text) in tokens."})
    num_beams: int = field(default=5, metadata={"help": "Beams of the search; 1 is greedy and much faster."})
    max_new_tokens: int = field(default=64, metadata={"help": "Longest generated text in tokens."})
    generate_batch: int = field(default=32, metadata={"help": "Meanings that are put into words at a time."})
    max_meanings: int | None = field(default=None, metadata={"help": "Generate for so many meanings; 0 for none."})


def prompt(meaning: str) -> str:
    """`name[The Fox], food[fish]` as the model reads it: `name : The Fox | food : fish ||`."""
    pairs = re.findall(r"([^,\[\]]+)\[([^\]]*)\]", meaning)
    return " | ".join(f"{name.strip()} : {value}" for name, value in pairs) + " ||"


def tokenized(records: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Meaning and text as token ids; labels are the text and the end mark. The end of a long text is cut off."""

    def encode(rows: dict[str, list]) -> dict[str, list]:
        before = tokenizer([prompt(meaning) for meaning in rows["mr"]], add_special_tokens=False)["input_ids"]
        after = tokenizer([f" {text}" for text in rows["ref"]], add_special_tokens=False)["input_ids"]
        after = [ids + [tokenizer.eos_token_id] for ids in after]
        pairs = list(zip(before, after, strict=True))
        return {
            "input_ids": [(b + a)[:max_length] for b, a in pairs],
            "labels": [([IGNORE] * len(b) + a)[:max_length] for b, a in pairs],
        }

    return records.map(encode, batched=True, remove_columns=records.column_names, desc="tokenize")


class PadRight:
    """Collator: pads ids and labels on the right to the longest record of the batch."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, records: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(record["input_ids"]) for record in records)
        fill = {"input_ids": self.pad_token_id, "labels": IGNORE, "attention_mask": 0}
        rows = [{**record, "attention_mask": [1] * len(record["input_ids"])} for record in records]
        return {
            name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
            for name, value in fill.items()
        }


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the losses and number of the labelled tokens of each record: (B, T, V), (B, T) -> (B, 2)."""
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="none"
    )
    return torch.stack([losses.view(len(labels), -1).sum(-1), (labels[:, 1:] != IGNORE).sum(-1).float()], dim=-1)


def perplexity(prediction) -> dict[str, float]:
    """Over all tokens of all texts, each token once."""
    losses, tokens = prediction.predictions.astype("float64").sum(0)
    return {"perplexity": math.exp(losses / tokens)}


@torch.no_grad()
def generate(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, meanings: list[str], options: E2EOptions):
    """One text for each meaning, by beam search. Padding is on the left here: nothing is trained any more."""
    model.eval()
    texts = []
    for start in range(0, len(meanings), options.generate_batch):
        prompts = [prompt(meaning) for meaning in meanings[start : start + options.generate_batch]]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        outputs = model.generate(
            input_ids=batch["input_ids"].to(model.device),
            attention_mask=batch["attention_mask"].to(model.device),
            num_beams=options.num_beams,
            max_new_tokens=options.max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        new = outputs[:, batch["input_ids"].shape[1] :]
        texts += [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
    return texts


def score_texts(trainer: RecipeTrainer, tokenizer, dev: Dataset, options: E2EOptions) -> dict[str, float]:
    """Generate for each different meaning of the dev set, keep the texts, and score them."""
    references: dict[str, list[str]] = {}
    for meaning, text in zip(dev["mr"], dev["ref"], strict=True):
        references.setdefault(meaning, []).append(text)
    meanings = list(references)[: options.max_meanings]
    if not meanings or not trainer.is_world_process_zero():
        return {}
    if trainer.is_fsdp_enabled:
        print("No texts are generated under FSDP. Load the saved model in one process.")
        return {}
    texts = generate(trainer.accelerator.unwrap_model(trainer.model), tokenizer, meanings, options)
    wanted = [references[meaning] for meaning in meanings]
    with open(Path(trainer.args.output_dir, "generated.jsonl"), "w", encoding="utf-8") as file:
        for meaning, text, refs in zip(meanings, texts, wanted, strict=True):
            file.write(json.dumps({"mr": meaning, "generated": text, "reference": refs[0]}, ensure_ascii=False) + "\n")
    scores = evaluate.load(str(METRICS / "nlg")).compute(predictions=texts, references=wanted)
    return {f"eval_{name}": value for name, value in scores.items()}


def main(argv: list[str] | None = None) -> dict:
    options, dp_config, args = parse(E2EOptions, __doc__, argv)
    path = data.model_path(options.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "right"  # training; generate() asks for the left side itself
    set_seed(args.seed)
    model = with_method(AutoModelForCausalLM.from_pretrained(path), options, task_type="CAUSAL_LM")
    # Its main branch holds a loading script, which `datasets` no longer runs; the Hub's own conversion holds the data.
    hub, revision = ("tuetschek/e2e_nlg",), "refs/convert/parquet"
    train_set = data.load(
        "e2e", "train", options.data_dir, ("trainset", "train"), hub, "train", revision, ("mr", "ref")
    )
    dev = data.load("e2e", "dev", options.data_dir, ("devset", "dev"), hub, "validation", revision, ("mr", "ref"))
    columns = {"meaning_representation": "mr", "human_reference": "ref"}  # the Hub's names
    if "mr" not in train_set.column_names:
        train_set, dev = train_set.rename_columns(columns), dev.rename_columns(columns)
    train_set, dev = split_off(train_set, dev, options.holdout, options.max_train_records, options.max_eval_records)
    anchors = None
    if options.method in ("gep", "b-gep"):
        public = [{"mr": "", "ref": text} for text in public_sentences(2000)]
        public = data.read(Path(options.anchor_data)) if options.anchor_data else public
        info = DatasetInfo(dataset_name=Path(options.anchor_data or "public_sentences").name)  # for the card
        anchors = tokenized(Dataset.from_list(public, info=info), tokenizer, options.max_length)

    trainer = RecipeTrainer(
        model,
        args,
        dp_config=dp_config,
        train_dataset=tokenized(train_set, tokenizer, options.max_length),
        eval_dataset=tokenized(dev, tokenizer, options.max_length),
        anchor_dataset=anchors,
        data_collator=PadRight(tokenizer.pad_token_id),
        processing_class=tokenizer,
        compute_metrics=perplexity,
        preprocess_logits_for_metrics=token_losses,
    )
    took = train(trainer, options)
    metrics = trainer.evaluate()
    return finish(trainer, options, metrics | score_texts(trainer, tokenizer, dev, options), took)


if __name__ == "__main__":
    main()
