"""Fine-tune a language model on private text with differential privacy, and sample text that may be shared.

    python recipes/synthesize.py --private_file notes.jsonl --text_column note --code_columns ward sex \
        --codes codes.json --model_name_or_path gpt2 --target_epsilon 8 --output_dir outputs/synthetic --samples 20000

Each record of the file has a text and control codes (a label, attributes). The model learns to write a text for its
codes, `ward : surgery | sex : f ||` and then the text, and is sampled with as many codes as wanted. Sampling is
post-processing of the private model, so it costs nothing, however many texts are drawn; `--sample_only` draws more
from a model that was trained before.

`codes.json` is a public list of what to sample, with public weights:

    [{"ward": "surgery", "sex": "f", "weight": 2}, {"ward": "surgery", "sex": "m", "weight": 1}]

Codes are never taken from the private file, and how often one occurs there is private. `--count_noise 20` weighs the
listed codes by their numbers in the private file, plus Gaussian noise of this standard deviation: one more release,
which the budget of the run covers (recipes/code_counts.py). Texts that are empty, too short or
unfinished are left out, and so are repetitions of other *synthetic* texts. They are not compared with private ones:
what is left out would then depend on the records.

The output folder gets the model with its card, and `synthetic/`, a `datasets` folder whose card and privacy.json are
the model's guarantee. recipes/compare_texts.py tells, to whoever holds the private texts, how good the synthetic ones
are.
"""

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import data
import torch
from code_counts import noised_counts
from datasets import Dataset
from e2e import IGNORE, PadRight, perplexity, token_losses
from options import RecipeOptions, parse
from training import RecipeTrainer, finish, train, with_method
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TrainingArguments, set_seed

from hf_private import DPConfig
from hf_private.spending.statement import STATEMENT, read_statement

FOLDER = "synthetic"
COUNTS = "codes.json"
WEIGHTS = {False: "public weights", True: "their numbers in the private records, noised at the expense of epsilon"}
CARD = """---
tags: [synthetic{private_tag}]
---
# Synthetic text

{count:,} texts, sampled from a language model that was fine-tuned on private text. No text was written by a person.

**Privacy.** {claim} The statement is [{statement}]({statement}), that of the model; its
card says what is not covered. Sampling uses the model alone, so it changes nothing about the guarantee.

**How it was made.** The codes were sampled with {weights}; the texts with temperature {temperature} and
top-p {top_p}. {kept:,} of {drawn:,} samples were kept: not those that were unfinished, shorter than {shortest}
words, or repetitions of other samples.
"""


@dataclass
class SynthesisOptions(RecipeOptions):
    """Options of this recipe."""

    private_file: str = field(default="", metadata={"help": "JSON lines or CSV with the private records."})
    text_column: str = field(default="text", metadata={"help": "Column of the text."})
    code_columns: list[str] = field(default_factory=lambda: ["label"], metadata={"help": "Columns of control codes."})
    codes: str = field(default="", metadata={"help": "Public JSON file of what to sample; `weight` is optional."})
    model_name_or_path: str = field(default="gpt2", metadata={"help": "Hub name or folder of a causal LM."})
    max_length: int = field(default=128, metadata={"help": "Most tokens of codes and text."})
    count_noise: float | None = field(
        default=None,
        metadata={"help": "Weigh codes by their numbers in the private file, with noise of this size, charged."},
    )
    sample_only: bool = field(
        default=False, metadata={"help": "Sample from the model in `output_dir` without training. Costs nothing."}
    )
    samples: int = field(default=1000, metadata={"help": "Number of samples to draw, before filtering."})
    shortest: int = field(default=3, metadata={"help": "Fewest words of a text that is kept."})
    temperature: float = field(default=1.0, metadata={"help": "Below 1: likelier, less varied texts."})
    top_p: float = field(default=0.95, metadata={"help": "Sample among the likeliest tokens up to this probability."})
    sample_batch: int = field(default=64, metadata={"help": "Texts that are sampled together."})


def prompt(codes: dict[str, Any]) -> str:
    """Codes as the model reads them.

    >>> prompt({"ward": "surgery", "sex": "f"})
    'ward : surgery | sex : f ||'
    """
    return " | ".join(f"{name} : {value}" for name, value in codes.items()) + " ||"


def tokenized(records: Dataset, tokenizer: PreTrainedTokenizerBase, options: SynthesisOptions) -> Dataset:
    """Codes and text as token ids; labels are the text and the end token. Other columns, such as the unit's, stay."""

    def encode(record: dict[str, Any]) -> dict[str, list[int]]:
        before = tokenizer(prompt({name: record[name] for name in options.code_columns}), add_special_tokens=False)
        after = tokenizer(f" {record[options.text_column]}", add_special_tokens=False)["input_ids"]
        ids, after = before["input_ids"], [*after, tokenizer.eos_token_id]
        labels = [IGNORE] * len(ids) + after
        return {"input_ids": (ids + after)[: options.max_length], "labels": labels[: options.max_length]}

    return records.map(encode, remove_columns=[options.text_column, *options.code_columns], desc="tokenize")


def listed_codes(options: SynthesisOptions) -> list[dict[str, Any]]:
    """The public list of codes, each with its weight."""
    if not options.codes:
        raise ValueError(
            "`--codes` must name a public JSON file of codes to sample: their frequencies in the private file are"
            " private. A list of all codes, without weights, will do."
        )
    listed = json.loads(Path(options.codes).read_text())
    if options.count_noise is not None and any("weight" in one for one in listed):
        raise ValueError("`--codes` must have no weights with `--count_noise`, which gives them.")
    for one in listed:
        if sorted(one.keys() - {"weight"}) != sorted(options.code_columns):
            raise ValueError(
                f"`--codes` must give {options.code_columns} for each entry, got {sorted(one.keys() - {'weight'})}."
            )
    return [{"weight": 1, **one} for one in listed]


def count(
    listed: list[dict[str, Any]], records: Dataset, options: SynthesisOptions, dp_config: DPConfig, folder: str
) -> None:
    """Write the codes with their noised numbers in the private records; once for each output folder."""
    file = Path(folder, COUNTS)
    if file.is_file():
        return
    codes = [tuple(str(one[name]) for name in options.code_columns) for one in listed]
    found = list(zip(*([str(value) for value in records[name]] for name in options.code_columns), strict=True))
    units = records[dp_config.unit_column] if dp_config.unit_column else None
    counts = noised_counts(found, codes, options.count_noise or 0.0, folder, dp_config, units)
    file.write_text(json.dumps([{**one, "weight": number} for one, number in zip(listed, counts, strict=True)]))


def chosen_codes(listed: list[dict[str, Any]], options: SynthesisOptions, seed: int) -> list[dict[str, Any]]:
    """The codes of all samples, drawn with their weights."""
    ordered = [{name: one[name] for name in options.code_columns} for one in listed]
    return random.Random(seed).choices(ordered, [one["weight"] for one in listed], k=options.samples)


@torch.no_grad()
def sampled(
    model: Any, tokenizer: PreTrainedTokenizerBase, codes: list[dict], options: SynthesisOptions
) -> Iterator[str]:
    """A text for each entry of codes; an unfinished one is empty. It reads the model and public codes only."""
    model.eval()
    for start in range(0, len(codes), options.sample_batch):
        prompts = [prompt(one) for one in codes[start : start + options.sample_batch]]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        width = batch["input_ids"].shape[1]
        outputs = model.generate(
            input_ids=batch["input_ids"].to(model.device),
            attention_mask=batch["attention_mask"].to(model.device),
            do_sample=True,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=0,  # generate's own default is 50
            max_length=options.max_length,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        for ids in outputs[:, width:].tolist():
            finished = tokenizer.eos_token_id in ids
            yield tokenizer.decode(ids, skip_special_tokens=True).strip() if finished else ""


def kept(texts: list[str], shortest: int) -> list[int]:
    """Which texts are long enough, and not the repetition of an earlier one.

    >>> kept(["a good day", "", "A  good day", "bad"], shortest=2)
    [0]
    """
    seen, rows = set(), []
    for row, text in enumerate(texts):
        words = text.lower().split()
        if len(words) >= shortest and tuple(words) not in seen:
            seen.add(tuple(words))
            rows.append(row)
    return rows


def samples(
    model: Any, tokenizer: PreTrainedTokenizerBase, listed: list[dict], options: SynthesisOptions, seed: int
) -> Dataset:
    """The texts that are kept of `options.samples`, with their codes."""
    codes = chosen_codes(listed, options, seed)
    set_seed(seed)
    texts = list(sampled(model, tokenizer, codes, options))
    rows = kept(texts, options.shortest)
    columns = {name: [codes[row][name] for row in rows] for name in options.code_columns}
    return Dataset.from_dict({**columns, options.text_column: [texts[row] for row in rows]})


def write(folder: Path, texts: Dataset, model_folder: Path, options: SynthesisOptions) -> None:
    """The texts as a `datasets` folder, with the statement of the model and a card that says what it claims."""
    statement = read_statement(model_folder)
    assert statement is not None, "the model was saved with its statement"
    guarantee, unit = statement["guarantee"], statement["privacy_unit"]
    claim = "This is NOT PRIVATE: " + "; ".join(statement["not_private_because"]) + "."
    if statement["private"]:
        per = f"`{unit['column']}`" if unit.get("column") else unit["unit"]
        claim = f"Differential privacy with epsilon = {guarantee['epsilon']}, delta = {guarantee['delta']} per {per}."
    texts.save_to_disk(str(folder))
    shutil.copy(model_folder / STATEMENT, folder / STATEMENT)
    words = CARD.format(
        private_tag=", differential-privacy" if statement["private"] else "",
        count=len(texts), claim=claim, weights=WEIGHTS[options.count_noise is not None],
        statement=STATEMENT, temperature=options.temperature, top_p=options.top_p,
        kept=len(texts), drawn=options.samples, shortest=options.shortest,
    )  # fmt: skip
    (folder / "README.md").write_text(words)


def trained(
    options: SynthesisOptions, dp_config: DPConfig, args: TrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[Any, dict]:
    """The model, fine-tuned on the private file and saved with its card, and the results of the run."""
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(data.model_path(options.model_name_or_path))
    records = Dataset.from_list(data.read(Path(options.private_file))[: options.max_train_records])
    if options.count_noise is not None and args.process_index == 0:
        count(listed_codes(options), records, options, dp_config, args.output_dir)
    trainer = RecipeTrainer(
        with_method(model, options, task_type="CAUSAL_LM"),
        args,
        dp_config=dp_config,
        train_dataset=tokenized(records, tokenizer, options),
        data_collator=PadRight(tokenizer.pad_token_id),
        processing_class=tokenizer,
        compute_metrics=perplexity,
        preprocess_logits_for_metrics=token_losses,
    )
    took = train(trainer, options)
    return trainer.accelerator.unwrap_model(trainer.model), finish(trainer, options, {}, took)


def main(argv: list[str] | None = None) -> dict:
    options, dp_config, args = parse(SynthesisOptions, __doc__, argv)
    listed = listed_codes(options)  # before anything is charged
    origin = args.output_dir if options.sample_only else data.model_path(options.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(origin)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "right"  # for training; sampling pads on the left
    if options.sample_only:
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        model, results = AutoModelForCausalLM.from_pretrained(origin, dtype=dtype).to(args.device), {}
    else:
        model, results = trained(options, dp_config, args, tokenizer)
    if args.process_index > 0 or not options.samples:
        return results
    if options.count_noise is not None:
        listed = json.loads(Path(args.output_dir, COUNTS).read_text())
    texts = samples(model, tokenizer, listed, options, args.seed)
    folder = Path(args.output_dir, FOLDER)
    write(folder, texts, Path(args.output_dir), options)
    print(f"{len(texts)} of {options.samples} texts kept: {folder}")
    return results


if __name__ == "__main__":
    main()
