"""Time the self-check: CPU seconds of `DPTrainer`'s start-up check on BERT-base, in float32.

    OMP_NUM_THREADS=1 python recipes/selfcheck.py                   # three times
    OMP_NUM_THREADS=1 python recipes/selfcheck.py --repeats 1 --lora

The weights are random: the check does the same work whatever they are.
"""

import argparse
import time
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from hf_private.gradients.selfcheck import self_check
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch


def seconds(model: nn.Module) -> float:
    """CPU seconds of one check, of all threads."""
    loss = PerSampleLoss(model)
    start = time.process_time()
    self_check(model, loss, partial(synthetic_batch, model))
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lora", action="store_true", help="train LoRA's matrices only")
    args = parser.parse_args()
    torch.manual_seed(0)
    model: nn.Module = BertForSequenceClassification(BertConfig())
    if args.lora:
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules="all-linear"))  # pyrefly: ignore
    times = [seconds(model) for _ in range(args.repeats)]
    print("CPU seconds:", " ".join(f"{t:.2f}" for t in times))


if __name__ == "__main__":
    main()
