"""What every rank runs: `worker.py FOLDER 1 2 3` forks one rank, then two, then three, and each runs all cases.

Results go to FOLDER/N-RANK.pt, for tests/test_ranks.py to compare. Under a launcher rank 1 dies in mid-run.
"""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import conftest  # noqa: F401  the tests' environment, before anything is imported
import tiny
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification, TrainerCallback
from transformers.distributed import DistributedConfig

from hf_private import ranks as ranks_module
from hf_private.bookkeeping import BookKeeper, trainable
from hf_private.clipping import Clipping
from hf_private.config import DPConfig
from hf_private.ledger import LedgerError, PrivacyLedger
from hf_private.losses import PerSampleLoss
from hf_private.mechanism import Mechanism
from hf_private.methods.anchors import Anchors, Group
from hf_private.methods.carriers import Carriers, Target
from hf_private.methods.full import Full, Method, unsharded
from hf_private.noise import NoiseSource
from hf_private.ranks import Ranks
from hf_private.shards import Shards
from hf_private.trainer import DPTrainer

KEY = bytes(range(32))
RECORDS = tiny.text()
DRAWS = ([3, 8, 9, 20, 21, 33, 39], [5], [], [0, 1, 2, 30, 31], [11, 12])  # some ranks empty, then all
STEPS = len(DRAWS)
SIGMA, CLIP, EXPECTED = 1.5, 0.25, 4


# ---- the engine on plain and on sharded models


def llama() -> nn.Module:
    """Its norms are modules of their own, which are copied for each record."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        pad_token_id=0,
        num_labels=2,
    )
    return LlamaForSequenceClassification(config)


def lora() -> nn.Module:
    model = get_peft_model(
        tiny.bert(num_hidden_layers=2),
        LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"),
    )
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model


def weights_of(model: nn.Module) -> dict[str, Target]:
    return {name: Target(rank=2) for name, p in trainable(model).items() if "layer" in name and p.dim() == 2}


def anchors(model: nn.Module) -> Method:
    loss = PerSampleLoss(model)

    def books(step: int, method: Method) -> Iterator[Any]:
        for part in ([34, 35, 36], [37, 38]):
            with BookKeeper(model, method) as book:
                book.backward(loss(model, batch_of(part)))
                yield book.records()

    return Anchors({"all": Group(tuple(trainable(model)), k=3)}, books)


METHODS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Method]]] = {
    "bk": (lambda: tiny.bert(num_hidden_layers=2), lambda model: Full()),
    "bk-llama": (llama, lambda model: Full()),
    "lora": (lora, lambda model: Full()),
    "rgp": (lambda: tiny.bert(num_hidden_layers=2), lambda model: Carriers(weights_of(model))),
    "history": (
        lambda: tiny.bert(num_hidden_layers=2),
        lambda model: Carriers(weights_of(model), source="history", warmup_steps=2, power_iterations=2),
    ),
    "lsg": (lambda: tiny.bert(num_hidden_layers=2), lambda model: Carriers(weights_of(model), sparsity=0.4)),
    "gep": (lambda: tiny.bert(num_hidden_layers=2), anchors),
}


def batch_of(indices: list[int]) -> dict[str, torch.Tensor]:
    return tiny.Padding()([RECORDS[i] for i in indices])


def shard(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        if type(module).__name__ in ("BertLayer", "LlamaDecoderLayer"):
            fully_shard(module)
    return fully_shard(model)


def mechanism(model: nn.Module, method: Method | None = None, **changes: Any) -> Mechanism:
    settings = {
        "per_sample_loss": PerSampleLoss(model, changes.pop("loss", None)),
        "clipping": Clipping("flat", CLIP),
        "noise": NoiseSource("secure", KEY),
        "noise_multiplier": SIGMA,
        "sample_rate": 0.1,
        "expected_batch_size": EXPECTED,
        "charge": lambda event: None,
        "dummy": lambda: batch_of([0]),
    }
    return Mechanism(model, method=method, **settings | changes)


def share(draw: list[int], ranks: Ranks, rows: int = 2) -> Iterator[dict[str, torch.Tensor]]:
    own = draw[ranks.rank :: ranks.world_size]
    return (batch_of(own[i : i + rows]) for i in range(0, len(own), rows))


def engine(name: str, sharded: bool, ranks: Ranks, adam: bool = False) -> dict[str, Any]:
    """Weights before and after five steps, and the bytes that a step reduces."""
    make, method_of = METHODS[name]
    model = make().eval()
    method = method_of(model)
    before = {key: p.detach().clone() for key, p in trainable(model).items()}
    if sharded:
        model = shard(model)
        assert all(isinstance(p, DTensor) for p in model.parameters())
    private = mechanism(model, method, ranks=ranks)
    optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(private.parameters.values(), lr=0.01 if adam else 0.5)
    reduced = []
    for draw in DRAWS:
        private.step(share(draw, ranks))
        reduced.append(ranks.reduced_bytes)
        optimizer.step()
    after = {key: unsharded(p.detach()).clone() for key, p in private.parameters.items()}
    return {"before": before, "after": after, "bytes": reduced[0], "drawn": private.noise.drawn}


def noise(sharded: bool, ranks: Ranks) -> torch.Tensor:
    """Gradients times the expected batch size after steps without records, under a key shared by the ranks: noise."""
    model = tiny.bert()
    model = shard(model) if sharded else model
    private = mechanism(model, noise=NoiseSource("secure", ranks.key()), ranks=ranks)
    drawn = []
    for _ in range(24):
        private.step([])
        drawn += [unsharded(p.grad).flatten() * EXPECTED for p in private.parameters.values()]
    return torch.cat(drawn)


def failure(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def errors(ranks: Ranks) -> dict[str, str | None]:
    """What each rank hears of a failure somewhere; afterwards the group still works."""
    second, found = ranks.rank == 1, {}

    def only_second(*_: Any) -> None:
        if second:
            raise RuntimeError("the second rank is unwell")

    found["agree"] = failure(lambda: ranks.agree(only_second))
    found["same"] = failure(lambda: ranks.same(answer=41 if second else 42))

    model = tiny.bert()
    with torch.no_grad():
        model.classifier.bias[0] += 1e-7 if second else 0
    found["weights"] = failure(lambda: ranks.check_weights(dict(model.named_parameters())))

    bad = {"attention_mask": torch.ones(1, 3)}
    found["micro-batch"] = failure(lambda: mechanism(tiny.bert(), ranks=ranks).step([bad] if second else []))

    model = tiny.bert()
    two = tiny.bert()
    mesh = dist.init_device_mesh("cpu", (ranks.world_size,))
    two.classifier.weight = nn.Parameter(distribute_tensor(two.classifier.weight.detach(), mesh, [Shard(0)]))
    found["tensor parallel"] = failure(lambda: mechanism(two, ranks=ranks))
    found["gep sharded"] = failure(lambda: mechanism(shard(tiny.bert()), anchors(tiny.bert()), ranks=ranks))
    found["no dummy"] = failure(lambda: mechanism(shard(tiny.bert()), dummy=None, ranks=ranks))
    found["wrapped"] = failure(lambda: Shards(nn.parallel.DistributedDataParallel(model), ranks))
    found["uncovered"] = uncovered(ranks)
    assert ranks.any(second)
    return found


class Uncovered(nn.Module):
    """A matrix that no rule knows."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(tiny.VOCABULARY, 2))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.table[input_ids].sum(1)


def uncovered(ranks: Ranks) -> str | None:
    """Under FSDP2 autograd's gradient is that of all ranks' records, even if each has only one."""
    private = mechanism(
        shard(Uncovered()),
        loss=lambda outputs, labels: outputs.logsumexp(1),
        per_sample_loss=lambda model, batch: model(**batch).logsumexp(1),
        ranks=ranks,
    )
    return failure(lambda: private.step([{"input_ids": torch.tensor([[3, 4]])}]))


# ---- DPTrainer

CARRIERS = {"r": 2, "target_modules": "all-linear", "exclude_modules": ["pooler"]}
TRAINERS = {
    "bk": {},
    "rgp": {"carriers": CARRIERS},
    "lsg": {"carriers": CARRIERS | {"sparsity": 0.3}},
    "gep": {"anchors": {"k": 1, "num_anchors": 8, "groups": [".*"]}},  # more directions these records do not have
}
SETTINGS = {"optim": "sgd", "learning_rate": 0.5, "max_steps": 5, "per_device_train_batch_size": 2}
DP = {"expected_batch_size": 2, "noise_multiplier": 0.7}


class After(TrainerCallback):
    """Calls something at the end of a step."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.action()


def make(folder: Path, key: bytes | None = KEY, dp: dict | None = None, **settings: Any) -> DPTrainer:
    parts = {name: settings.pop(name) for name in ("anchor_dataset", "callbacks", "eval_dataset") if name in settings}
    made = DPTrainer(
        settings.pop("model", None) or tiny.bert(),
        dp_config=DPConfig(**{"accountant": "rdp", **DP, **(dp or {})}),
        train_dataset=settings.pop("records", RECORDS),
        data_collator=tiny.Padding(),
        args=tiny.arguments(folder, **SETTINGS | settings),
        **parts,
    )
    made._test_key = key
    return made


def trained(folder: Path, resume: bool = False, **settings: Any) -> dict[str, Any]:
    made = make(folder, **settings)
    made.train(resume_from_checkpoint=resume or None)
    return {"weights": weights(made.model), "steps": charged(folder), "global_step": made.state.global_step}


def weights(model: nn.Module) -> torch.Tensor:
    """All parameters in one vector; sharded ones are gathered."""
    return torch.cat([unsharded(p.detach()).double().flatten() for p in model.parameters()])


def sharded_by_transformers(folder: Path, ranks: Ranks, dp: dict) -> dict[str, Any]:
    """FSDP2 as Transformers does it itself, through Trainer: train, evaluate, save, and load the plain model again."""
    if ranks.rank == 0:
        tiny.bert().save_pretrained(folder / "base")
    dist.barrier()
    plan = DistributedConfig(fsdp_size=ranks.world_size)
    model = BertForSequenceClassification.from_pretrained(folder / "base", distributed_config=plan)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    extra = {"eval_dataset": RECORDS[:6], "eval_strategy": "steps", "eval_steps": 2}
    made = make(folder / "run", model=model, dp=dp, **extra)
    made.train()
    assert all(isinstance(p, DTensor) for p in trainable(made.model).values())
    made.save_model(folder / "saved")
    dist.barrier()
    saved = weights(BertForSequenceClassification.from_pretrained(folder / "saved"))
    return {"weights": weights(made.model), "saved": saved, "steps": charged(folder / "run")}


def charged(folder: Path) -> int:
    return sum(event.steps for event in PrivacyLedger.read(folder / "_dp" / "ledger.jsonl").events)


def trainers(folder: Path, ranks: Ranks) -> dict[str, Any]:
    world, found = ranks.world_size, {}
    for name, dp in TRAINERS.items():
        settings = {"eval_dataset": RECORDS[:6], "eval_strategy": "steps", "eval_steps": 2} if name == "bk" else {}
        if name == "gep":
            settings["anchor_dataset"] = [{"input_ids": [9, 9, 5 + i, 7 + i, 6, 8], "labels": 0} for i in range(8)]
        found[name] = trained(folder / f"{name}-{world}", dp=dp, **settings)
    if world == 1:
        return found
    for name in ("bk", "rgp"):
        found[f"fsdp-{name}"] = sharded_by_transformers(folder / f"fsdp-{name}-{world}", ranks, TRAINERS[name])

    # interrupted here, and finished by another number of ranks
    if world == 2:
        stop = lambda: setattr(made.control, "should_training_stop", True)  # noqa: E731
        made = make(folder / "resume", save_strategy="steps", save_steps=3, callbacks=[After(3, stop)])
        made.train()
        found["stopped"] = {"steps": charged(folder / "resume")}
    else:
        found["resumed"] = trained(folder / "resume", resume=True)
        if (folder / "killed").is_dir():
            found["before"] = {"steps": charged(folder / "killed")}
            found["after kill"] = trained(folder / "killed", resume=True)

    found["ledger"] = ledger_fails(folder / f"ledger-{world}", ranks)
    found["budget"] = budget(folder / f"budget-{world}")
    found["other data"] = failure(
        lambda: make(folder / f"data-{world}", records=RECORDS[::-1] if ranks.rank == 1 else RECORDS).train()
    )
    found["no checkpoint"] = failure(lambda: make(folder / f"none-{world}").train(resume_from_checkpoint=True))
    return found


def ledger_fails(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Rank 0's disk is full at the third step: no rank takes it."""
    made = make(folder)
    charge, kept = made.spending.charge, []

    def full(event: Any) -> None:
        kept.append(tiny.weights(made.model))
        if len(kept) == 3 and ranks.rank == 0:
            raise LedgerError("the disk is full")
        charge(event)

    made.spending.charge = full
    error = failure(made.train)
    moved = not torch.equal(tiny.weights(made.model), kept[-1])
    writes = made.spending.writes
    return {
        "error": error,
        "charges": len(kept),
        "moved": moved,
        "global_step": made.state.global_step,
        "writes": writes,
    }


def budget(folder: Path) -> dict[str, Any]:
    """The budget is spent by a first run; then every rank refuses, and none waits for another."""
    first = make(folder, key=None, dp={"noise_multiplier": None, "target_epsilon": 3.0})
    first.train()
    left = first.privacy_spent().epsilon
    # a run that is longer than what its spending permits: all ranks stop after the same step
    again = make(folder, key=None, dp={"noise_multiplier": None, "target_epsilon": 6.0}, callbacks=[])
    plan = again.spending.plan

    def short(*args: Any) -> float:
        multiplier = plan(*args)
        again.spending.steps_left = 2
        return multiplier

    again.spending.plan = short
    again.train()
    refused = failure(make(folder, key=None, dp={"noise_multiplier": None, "target_epsilon": 1.0}).train)
    return {"epsilon": left, "stopped_at": again.state.global_step, "refused": refused, "steps": charged(folder)}


def kill(folder: Path, ranks: Ranks) -> None:
    """Rank 1 dies in its fourth step, after the ledger was charged and before the sums are added up."""
    made = make(folder / "killed", save_strategy="steps", save_steps=2)
    method = made.create_method()
    begin, count = method.begin_step, []

    def dies(step: int) -> None:
        begin(step)
        count.append(step)
        if len(count) == 4 and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    method.begin_step = dies
    made.create_method = lambda: method
    made.train()


def run(folder: Path) -> None:
    """All cases on this rank."""
    ranks = start()
    found: dict[str, Any] = {"world_size": ranks.world_size}
    found["engine"] = {name: engine(name, False, ranks) for name in METHODS}
    found["engine"]["bk-adam"] = engine("bk", False, ranks, adam=True)
    found["noise"] = noise(False, ranks)
    found["key"] = ranks.key().stream("test").words(0, 4)
    if ranks.world_size > 1:
        found["fsdp"] = {name: engine(name, True, ranks) for name in METHODS if name != "gep"}
        found["fsdp"]["bk-adam"] = engine("bk", True, ranks, adam=True)
        found["fsdp noise"] = noise(True, ranks)
        found["errors"] = errors(ranks)
    found["trainer"] = trainers(folder, ranks)
    torch.save(found, folder / f"{ranks.world_size}-{ranks.rank}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def start() -> Ranks:
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    ranks_module.CHECK_EVERY = 1
    ranks = Ranks()
    assert ranks.world_size == int(os.environ.get("WORLD_SIZE", 1))
    return ranks


def fork(folder: Path, world: int) -> None:
    """Run all cases on `world` ranks, which share the time of the imports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in range(world):
        if child := os.fork():
            started.append(child)
            continue
        code = 1
        try:
            if world > 1:
                names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
                values = (str(rank), str(rank), str(world), str(world), "127.0.0.1", port)
                os.environ.update(zip(names, values, strict=True))
            run(folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    while started:
        child, status = os.wait()
        started.remove(child)
        if status:
            for other in started:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


if __name__ == "__main__":
    if "RANK" in os.environ:
        kill(Path(sys.argv[1]), start())
    else:
        for number in map(int, sys.argv[2:]):
            fork(Path(sys.argv[1]), number)
