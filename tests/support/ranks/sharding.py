"""FSDP2 through DPTrainer: sharded by Transformers, or by Accelerate with full and with sharded checkpoints."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from accelerate.state import DistributedType, PartialState
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import BertForSequenceClassification, TrainingArguments
from transformers.distributed import DistributedConfig

from hf_private.distributed.ranks import Ranks
from hf_private.gradients.bookkeeper import trainable
from hf_private.trainer import setup
from hf_private.trainer.averaging import WeightAverage
from tests.support import training, zoo
from tests.support.ranks.engine import failure
from tests.support.ranks.runs import EVALUATED, PEOPLE, TRAINERS, make, settings_of, stopped

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
RUNS = {  # kind of checkpoint, and what is trained
    "full-history": (FULL, "history"),
    "sharded-history": (SHARDED, "history"),
    "full-lora": (FULL, "lora"),
}


def sharding(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Two ranks train three steps, and are refused what cannot be; three ranks go on to the end."""
    world, found = ranks.world_size, {}
    for name in ("bk", "rgp", "units"):
        records = {"records": PEOPLE} if name == "units" else {}
        found[f"fsdp-{name}"] = by_transformers(folder / f"fsdp-{name}-{world}", ranks, TRAINERS[name], **records)
    for name, (kind, method) in RUNS.items():
        with by_accelerate(kind):
            if world == 2:
                found[name] = stopped(folder / name, make_args=as_gpus, **settings_of(method))
            else:
                found[name] = resumed(folder / name, folder / f"{name}-saved", **settings_of(method))
        if world == 3:  # Accelerate would let from_pretrained leave all ranks but the first without weights
            found[name]["saved"] = training.weights(plain(folder / f"{name}-saved"))
    return found | ({"refused": refused(folder)} if world == 2 else {})


# ---- by Transformers


def by_transformers(folder: Path, ranks: Ranks, dp: dict, **settings: Any) -> dict[str, Any]:
    """FSDP2 as Transformers does it itself, through Trainer: train, evaluate, save, and load the plain model again."""
    if ranks.rank == 0:
        zoo.small("bert").save_pretrained(folder / "base")
    dist.barrier()
    model = loaded(folder / "base")
    assert all(isinstance(p, DTensor) for p in model.parameters())
    made = make(folder / "run", model=model, dp=dp, eval_steps=2, **EVALUATED, **settings)
    made.train()
    assert all(isinstance(p, DTensor) for p in trainable(made.model).values())
    made.save_model(folder / "saved")
    dist.barrier()
    saved = training.weights(BertForSequenceClassification.from_pretrained(folder / "saved"))
    return {"weights": training.weights(made.model), "saved": saved, "steps": training.steps(folder / "run")}


def loaded(folder: Path) -> BertForSequenceClassification:
    plan = DistributedConfig(fsdp_size=dist.get_world_size())
    return BertForSequenceClassification.from_pretrained(folder, distributed_config=plan)


# ---- by Accelerate


@contextmanager
def by_accelerate(kind: str) -> Iterator[None]:
    """What `accelerate launch` sets up for recipes/accelerate/fsdp2.yaml. Its default would wrap BERT's embeddings
    twice."""
    settings = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_STATE_DICT_TYPE": kind,
    }
    with mock.patch.dict(os.environ, settings):
        yield


def as_gpus(folder: Path, **settings: Any) -> TrainingArguments:
    """Accelerate has FSDP2 for accelerators only. Take the ranks for some; what follows is its own code, on CPUs."""
    args = training.arguments(folder, **settings)
    assert args.device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return args


def resumed(folder: Path, target: Path, **settings: Any) -> dict[str, Any]:
    """Go on from the third step to the fifth, and save; the self-check saw the model in shards."""
    made, seen = make(folder, make_args=as_gpus, **settings), []
    check = setup.self_check

    def noted(model: Any, *args: Any) -> str:
        seen.append(all(isinstance(p, DTensor) for p in trainable(model).values()))
        return check(model, *args)

    with mock.patch.object(setup, "self_check", noted):
        made.train(resume_from_checkpoint=True)
    assert all(isinstance(p, DTensor) for p in trainable(made.model).values())
    made.save_model(target)
    dist.barrier()
    return {"weights": training.weights(made.model), "steps": training.steps(folder), "checked": seen}


def plain(folder: Path) -> nn.Module:
    """The model as anybody loads it."""
    if not (folder / "adapter_config.json").is_file():
        return BertForSequenceClassification.from_pretrained(folder)
    return PeftModel.from_pretrained(zoo.small("bert", num_hidden_layers=2), folder)


def refused(folder: Path) -> dict[str, str | None]:
    """Checkpoints that cannot be resumed the way a run is set up."""
    found = {}

    def resume(name: str, **settings: Any) -> str | None:
        return failure(lambda: make(folder / name, **settings).train(resume_from_checkpoint=True))

    found["full, plain"] = resume("full-history")
    found["sharded, plain"] = resume("sharded-history")
    with by_accelerate(SHARDED):
        found["full, sharded"] = resume("full-history", make_args=as_gpus)
        found["plain, sharded"] = resume("resume", make_args=as_gpus)
    found["at load"] = resume("resume", model=loaded(folder / "fsdp-bk-2" / "base"))
    saved = EVALUATED | {"eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "save_only_model": True}
    model = loaded(folder / "fsdp-bk-2" / "base")
    found["best"] = failure(make(folder / "no-best", model=model, load_best_model_at_end=True, **saved).train)
    average = [WeightAverage(decay=0.9)]
    found["average"] = failure(
        make(folder / "no-average", model=loaded(folder / "fsdp-bk-2" / "base"), callbacks=average).train
    )
    return found
