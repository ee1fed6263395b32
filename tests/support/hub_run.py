"""Private runs that push while they train and at their end, then read back what arrived. `test_hub.py` starts this in
a process of its own: the Hub's address is read when huggingface_hub is imported.
"""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub import snapshot_download
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, TrainingArguments

from hf_private.config import DPConfig
from hf_private.publishing.verify import verify
from hf_private.trainer.trainer import DPTrainer
from tests.support import training, zoo

METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {},
    "carriers": {"carriers": {"r": 2, "sparsity": 0.5}},
    "gep": {"anchors": {"k": 4, "num_anchors": 8, "target_modules": ["classifier"]}},
}


def run(method: str, folder: Path) -> dict[str, Any]:
    """Train, push, and read back."""
    output = folder / "out"
    model = zoo.small("bert")
    if method == "lora":
        base = folder / "base"
        model.save_pretrained(base)  # a local path, which no card may show
        model = get_peft_model(
            AutoModelForSequenceClassification.from_pretrained(base), LoraConfig(r=2, target_modules=["query"])
        )
    args = TrainingArguments(
        str(output),
        max_steps=4,
        save_steps=2,
        save_total_limit=1,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        push_to_hub=True,
        hub_model_id=f"someone/{method}",
        hub_strategy="every_save",
        hub_always_push=True,
        hub_token="hf_" + "t" * 34,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    records = Dataset.from_list(training.text())
    trainer = DPTrainer(
        model,
        args,
        dp_config=DPConfig(noise_multiplier=4.0, expected_batch_size=4, **METHODS[method]),
        train_dataset=records,
        eval_dataset=Dataset.from_list(training.text(seed=2)),
        anchor_dataset=Dataset.from_list(training.text(seed=1)) if method == "gep" else None,
        data_collator=training.Padding(),
    )
    for name in ("runs/Nov01/events.out.tfevents.1", "rng_state.pth", "train.log", "all_results.json"):
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"train_loss": 0.5}')
    trainer.train()
    trainer.save_state()
    trainer.push_to_hub()
    arrived = snapshot_download(f"someone/{method}")
    verdicts = {where: verify(where) for where in (f"someone/{method}", arrived, str(output))}
    return {
        "names": sorted(path.name for path in Path(arrived).iterdir()),
        "codes": [verdict.code for verdict in verdicts.values()],
        "findings": [f.message for verdict in verdicts.values() for f in verdict.findings if f.status != "holds"],
        "kept": sorted(path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()),
        "staged": [path.name for path in (output / "_dp").rglob("*.safetensors")],
    }


if __name__ == "__main__":
    results = {method: run(method, Path(sys.argv[1], method)) for method in METHODS}
    Path(sys.argv[1], "results.json").write_text(json.dumps(results))
