"""Classify the service of a user's turn with differential privacy per conversation, and score it on the dev set.

    # epsilon per conversation: conversations are drawn, with at most 4 turns of each in a step
    HF_PRIVATE_DATA=data python recipes/units.py --target_epsilon 8 --unit_column conversation --records_per_unit 4 \
        --expected_batch_size 256 --max_steps 300 --learning_rate 1e-3 --output_dir outputs/units_8

    # the same, but turns are drawn, and the price is that of a group of 4
    ... --unit_column conversation --records_per_unit 4 --unit_sampling records

    # epsilon per turn: without `--unit_column`. Somebody with many turns is protected less.

Data: `sgd/train.tsv.gz` and `sgd/dev.tsv.gz` in `--data_dir` or HF_PRIVATE_DATA, with the columns dialogue, turn,
speaker, service, intent and utterance (Schema-Guided Dialogue). A record is a turn of the user. Ids of dialogues recur
in other files for other conversations, so each gets the name of its file as a prefix. Short turns ("Yes, please.") are
in both files: 29 % of the dev set. DPTrainer refuses to evaluate on training records, so dev turns whose text is in
the training file are left out. This is right for public data: with private data the dev set would depend on it.
"""

import csv
import gzip
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import evaluate
from data import model_path
from datasets import Dataset, DatasetInfo
from glue import METRICS
from options import RecipeOptions, parse
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

UNIT = "conversation"  # for `--unit_column`
# Public, like the names of labels in any task: they must not be read from the private data.
SERVICES = (
    "Alarm Banks Buses Calendar Events Flights Homes Hotels Media Messaging Movies Music Payment RentalCars"
    " Restaurants RideSharing Services Trains Travel Weather"
).split()


@dataclass
class UnitOptions(RecipeOptions):
    """Options of this recipe."""

    max_length: int = field(default=48, metadata={"help": "Maximum length of a turn in tokens."})


def rows_of(split: str, options: UnitOptions) -> list[dict[str, str]]:
    """All turns of one file, in its order."""
    folder = options.data_dir or os.environ.get("HF_PRIVATE_DATA")
    if folder is None:
        raise FileNotFoundError("No data: pass `--data_dir FOLDER` or set HF_PRIVATE_DATA.")
    places = [Path(folder, f"{split}.tsv.gz"), Path(folder, "sgd", f"{split}.tsv.gz")]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"No {split} data: there is no {' or '.join(map(str, places))}. Pass `--data_dir`.")
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def read(split: str, options: UnitOptions, limit: int | None = None) -> list[dict[str, str]]:
    """The user's turns of one file, each with its conversation."""
    rows = [row for row in rows_of(split, options) if row["speaker"] == "U"]
    turns = [row for row in rows[:limit] if row["service"] in SERVICES]
    return [
        {"text": row["utterance"], "labels": SERVICES.index(row["service"]), UNIT: f"{split}:{row['dialogue']}"}
        for row in turns
    ]


def unseen(turns: list[dict[str, str]], training: list[dict[str, str]]) -> list[dict[str, str]]:
    """The turns whose text, in lower case, is not a training turn's."""
    known = {turn["text"].lower() for turn in training}
    return [turn for turn in turns if turn["text"].lower() not in known]


def tokenized(records: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Turns as token ids and labels. The column of the unit stays; it does not reach the model."""
    found = Dataset.from_list(records, info=DatasetInfo(dataset_name="schema_guided_dstc8"))

    def encode(rows: dict[str, list]) -> dict[str, list]:
        return dict(tokenizer(rows["text"], truncation=True, max_length=max_length))

    return found.map(encode, batched=True, remove_columns=["text"], desc="tokenize")


def load_model(options: UnitOptions, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """MiniLM with a new head on the mean of all tokens, and its tokenizer."""
    path = model_path("minilm")
    config = AutoConfig.from_pretrained(path, num_labels=len(SERVICES))
    config.id2label, config.label2id = dict(enumerate(SERVICES)), {name: i for i, name in enumerate(SERVICES)}
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(path, config=config, attn_implementation="eager")
    read_by_mean(model)
    model.config._name_or_path = "sentence-transformers/all-MiniLM-L6-v2"  # for the card, not a local path
    return with_method(model, options, task_type="SEQ_CLS"), AutoTokenizer.from_pretrained(path)


def main(argv: list[str] | None = None) -> dict:
    options, dp_config, args = parse(UnitOptions, __doc__, argv)
    model, tokenizer = load_model(options, args.seed)
    with args.main_process_first():
        turns = read("train", options, options.max_train_records)
        train_set = tokenized(turns, tokenizer, options.max_length)
        dev_turns = unseen(read("dev", options), turns)
        random.Random(0).shuffle(dev_turns)  # `max_eval_records` is then a random sample, not the first services
        dev_set = tokenized(dev_turns[: options.max_eval_records], tokenizer, options.max_length)
    accuracy = evaluate.load(str(METRICS / "accuracy"))

    def compute_metrics(prediction) -> dict[str, float]:
        return accuracy.compute(predictions=prediction.predictions.argmax(-1), references=prediction.label_ids)

    trainer = RecipeTrainer(
        model,
        args,
        dp_config=dp_config,
        train_dataset=train_set,
        eval_dataset=dev_set,
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    took = train(trainer, options)
    return finish(trainer, options, trainer.evaluate(), took)


if __name__ == "__main__":
    main()
