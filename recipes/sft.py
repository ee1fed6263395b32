"""Fine-tune a causal language model on conversations with differential privacy, with TRL.

    python recipes/sft.py --config recipes/configs/sft_sgd.yaml --output_dir outputs/sft

    # four GPUs
    accelerate launch --config_file recipes/accelerate/ddp.yaml --num_processes 4 recipes/sft.py \
        --config recipes/configs/sft_sgd.yaml --output_dir outputs/sft

Needs the extra `trl`. A record is a conversation, and the loss counts what the assistant says. `--chats` names a file
of JSON lines, each with `messages`: a list of {"role", "content"}; for several conversations of one person also with
the column that `--unit_column` names. The default is the training conversations of Schema-Guided Dialogue in
HF_PRIVATE_DATA (recipes/conversations.py); a quarter of its dev conversations is the evaluation set.

`--nonprivate` trains the same model without clipping and noise, and `--untuned` evaluates it as it is, for comparison.

A YAML file holds fields of the options below, of DPConfig and of TRL's SFTConfig; the command line takes precedence.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import data
import torch
from conversations import chats, turns
from datasets import Dataset, DatasetInfo
from e2e import perplexity, token_losses
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, TrlParser

from hf_private import DPConfig
from hf_private.config import BUDGETS
from hf_private.integrations.trl import DPSFTTrainer

TEMPLATE = Path(__file__).parent / "configs" / "chat.jinja"  # for tokenizers without one


@dataclass
class SFTOptions:
    """Options of this recipe."""

    model_name_or_path: str = field(default="gpt2", metadata={"help": "Hub name or folder of a causal LM."})
    chats: str | None = field(default=None, metadata={"help": "JSON lines of conversations; default: SGD's."})
    eval_chats: str | None = field(default=None, metadata={"help": "Conversations of other people, to evaluate on."})
    rank: int | None = field(default=None, metadata={"help": "Rank of LoRA; default: all weights are trained."})
    nonprivate: bool = field(default=False, metadata={"help": "No clipping and no noise. NOT PRIVATE; to compare."})
    untuned: bool = field(default=False, metadata={"help": "Evaluate the model as it is; train and save nothing."})
    answers: int = field(default=0, metadata={"help": "Print the model's answer in N evaluation conversations."})
    max_eval_records: int | None = field(default=None, metadata={"help": "Evaluate on the first N conversations."})
    max_records: int | None = field(default=None, metadata={"help": "Use the first N conversations only."})


def read(file: str | None, part: str, limit: int | None) -> Dataset:
    """The conversations of a file of JSON lines, or of SGD with their numbers."""
    if file is not None:
        records = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
        return Dataset.from_list(records[:limit], info=DatasetInfo(dataset_name=Path(file).name))
    records = [{"dialogue": number, "messages": messages} for number, messages in chats(turns(part)).items()]
    return Dataset.from_list(records[:limit], info=DatasetInfo(dataset_name="schema_guided_dialogue"))


@torch.no_grad()
def answers(model: Any, tokenizer: Any, conversations: list[list[dict[str, str]]]) -> Iterator[tuple[str, str]]:
    """What users say first, and the model's most likely answer."""
    model.eval()
    for messages in conversations:
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_tensors="pt")
        ids = prompt["input_ids"].to(model.device)
        made = model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        yield messages[0]["content"], tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).strip()


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save; the metrics."""
    parser = TrlParser((SFTOptions, DPConfig, SFTConfig), description=__doc__)
    options, dp_config, args = parser.parse_args_and_config(argv)
    path = data.model_path(options.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.chat_template = tokenizer.chat_template or TEMPLATE.read_text()
    if options.nonprivate:
        free = {"noise_multiplier": 0.0, "clip_norm": math.inf, "clipping": "flat"}
        dp_config = replace(dp_config, **dict.fromkeys(BUDGETS), **free)
    evaluated = None
    if options.eval_chats or not options.chats:
        evaluated = read(options.eval_chats, "test", options.max_eval_records)
    trainer = DPSFTTrainer(
        AutoModelForCausalLM.from_pretrained(path),
        args,
        dp_config=dp_config,
        train_dataset=read(options.chats, "private", options.max_records),
        eval_dataset=evaluated,
        processing_class=tokenizer,
        compute_metrics=perplexity,
        preprocess_logits_for_metrics=token_losses,
        peft_config=LoraConfig(r=options.rank, target_modules="all-linear") if options.rank else None,
    )
    if not options.untuned:
        checkpoint = args.resume_from_checkpoint
        trainer.train(True if checkpoint == "True" else checkpoint)
    metrics = trainer.evaluate() if evaluated is not None else {}
    if evaluated is not None and trainer.is_world_process_zero():
        for asked, said in answers(trainer.model, tokenizer, evaluated["messages"][: options.answers]):
            print(f"User: {asked}\nAssistant: {said}")
    if options.untuned:
        print(json.dumps(metrics))
        return metrics
    trainer.save_model()
    if trainer.is_world_process_zero():
        Path(args.output_dir, "results.json").write_text(json.dumps(metrics, indent=2) + "\n")
        print(json.dumps(metrics))
        print(trainer.privacy_spent())
    return metrics


if __name__ == "__main__":
    main()
