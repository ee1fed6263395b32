"""Fine-tune a causal language model on conversations with differential privacy, with TRL.

    python recipes/sft.py --config recipes/configs/sft_sgd.yaml --output_dir outputs/sft

    # four GPUs
    accelerate launch --config_file recipes/accelerate/ddp.yaml --num_processes 4 recipes/sft.py \
        --config recipes/configs/sft_sgd.yaml --output_dir outputs/sft

Needs the extra `trl`. A record is a conversation, and the loss counts what the assistant says. `--chats` names a file
of JSON lines, each with `messages`: a list of {"role", "content"}; for several conversations of one person also with
the column that `--unit_column` names. The default is `sgd/train.tsv.gz` (Schema-Guided Dialogue) in HF_PRIVATE_DATA,
whose turns are joined to conversations; `sgd/dev.tsv.gz` is the evaluation set.

A YAML file holds fields of the options below, of DPConfig and of TRL's SFTConfig; the command line takes precedence.
"""

import csv
import gzip
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import data
from datasets import Dataset, DatasetInfo
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, TrlParser

from hf_private import DPConfig
from hf_private.integrations.trl import DPSFTTrainer

ROLES = {"U": "user", "S": "assistant"}  # of SGD
TEMPLATE = Path(__file__).parent / "configs" / "chat.jinja"  # for tokenizers without one


@dataclass
class SFTOptions:
    """Options of this recipe."""

    model_name_or_path: str = field(default="gpt2", metadata={"help": "Hub name or folder of a causal LM."})
    chats: str | None = field(default=None, metadata={"help": "JSON lines of conversations; default: SGD's."})
    eval_chats: str | None = field(default=None, metadata={"help": "Conversations of other people, to evaluate on."})
    rank: int | None = field(default=None, metadata={"help": "Rank of LoRA; default: all weights are trained."})
    max_records: int | None = field(default=None, metadata={"help": "Use the first N conversations only."})


def conversations(turns: Iterable[dict[str, str]]) -> list[dict[str, Any]]:
    """SGD's turns as chats, one for each dialogue. A dialogue begins with the user.

    >>> conversations([{"dialogue": "1", "speaker": "U", "utterance": "Hi"}])
    [{'messages': [{'role': 'user', 'content': 'Hi'}]}]
    """
    chats: dict[str, list[dict[str, str]]] = {}
    for turn in turns:
        said = {"role": ROLES[turn["speaker"]], "content": turn["utterance"]}
        chats.setdefault(turn["dialogue"], []).append(said)
    return [{"messages": messages} for messages in chats.values()]


def read(file: str | None, split: str, limit: int | None) -> Dataset | None:
    """The conversations of a file of JSON lines, or of SGD; None if there is no such file of SGD."""
    if file is not None:
        records = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
        return Dataset.from_list(records[:limit], info=DatasetInfo(dataset_name=Path(file).name))
    path = Path(os.environ.get("HF_PRIVATE_DATA", "."), "sgd", f"{split}.tsv.gz")
    if not path.is_file():
        return None
    with gzip.open(path, "rt", encoding="utf-8", newline="") as turns:
        found = conversations(csv.DictReader(turns, delimiter="\t", quoting=csv.QUOTE_NONE))
    return Dataset.from_list(found[:limit], info=DatasetInfo(dataset_name="schema_guided_dialogue"))


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save; the metrics."""
    parser = TrlParser((SFTOptions, DPConfig, SFTConfig), description=__doc__)
    options, dp_config, args = parser.parse_args_and_config(argv)
    path = data.model_path(options.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.chat_template = tokenizer.chat_template or TEMPLATE.read_text()
    records = read(options.chats, "train", options.max_records)
    if records is None:
        raise FileNotFoundError("No conversations: pass `--chats FILE`, or set HF_PRIVATE_DATA to a folder with sgd/.")
    trainer = DPSFTTrainer(
        AutoModelForCausalLM.from_pretrained(path),
        args,
        dp_config=dp_config,
        train_dataset=records,
        eval_dataset=None if options.chats and not options.eval_chats else read(options.eval_chats, "dev", None),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=options.rank, target_modules="all-linear") if options.rank else None,
    )
    trainer.train(args.resume_from_checkpoint)
    metrics = trainer.evaluate() if trainer.eval_dataset is not None else {}
    if metrics:
        metrics["eval_perplexity"] = math.exp(metrics["eval_loss"])
    trainer.save_model()
    if trainer.is_world_process_zero():
        Path(args.output_dir, "results.json").write_text(json.dumps(metrics, indent=2) + "\n")
        print(trainer.privacy_spent())
    return metrics


if __name__ == "__main__":
    main()
