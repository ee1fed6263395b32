"""What goes wrong on one rank, and what all of them hear of it."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import Dataset, random_split

from hf_private.distributed.fsdp import Shards
from hf_private.distributed.ranks import Ranks
from hf_private.gradients.method import Full
from hf_private.spending.ledger import LedgerError
from hf_private.spending.run import Run
from hf_private.tasks.losses import PerSampleLoss
from tests.support import training, zoo
from tests.support.ranks.engine import RECORDS, anchors, batch_of, failure, mechanism, replicated, shard
from tests.support.ranks.runs import make


def errors(ranks: Ranks) -> dict[str, str | None]:
    """What each rank hears of a failure somewhere; afterwards the group still works."""
    second, found = ranks.rank == 1, {}

    def only_second(*_: Any) -> None:
        if second:
            raise RuntimeError("the second rank is unwell")

    found["agree"] = failure(lambda: ranks.run_on_all(only_second))
    found["same"] = failure(lambda: ranks.assert_equal(answer=41 if second else 42))

    model = zoo.small("bert")
    with torch.no_grad():
        model.classifier.bias[0] += 1e-7 if second else 0
    found["weights"] = failure(lambda: ranks.check_weights(dict(model.named_parameters())))

    bad = {"attention_mask": torch.ones(1, 3)}
    found["micro-batch"] = failure(lambda: mechanism(zoo.small("bert"), ranks=ranks).step([bad] if second else []))

    method = Full()
    method.begin_step = only_second
    found["begin_step"] = failure(lambda: mechanism(zoo.small("bert"), method, ranks=ranks).step([]))
    found["key"] = other_key(ranks)

    model = zoo.small("bert")
    two = zoo.small("bert")
    mesh = dist.init_device_mesh("cpu", (ranks.world_size,))
    two.classifier.weight = nn.Parameter(distribute_tensor(two.classifier.weight.detach(), mesh, [Shard(0)]))
    found["tensor parallel"] = failure(lambda: mechanism(two, ranks=ranks))
    found["gep sharded"] = failure(
        lambda: mechanism(shard(zoo.small("bert")), anchors(zoo.small("bert")), ranks=ranks)
    )
    found["no dummy"] = failure(lambda: mechanism(shard(zoo.small("bert")), dummy=None, ranks=ranks))
    found["wrapped"] = failure(lambda: Shards(nn.parallel.DistributedDataParallel(model), ranks))
    found["uncovered"] = uncovered(ranks)
    mesh = replicated(ranks)
    found["half"] = failure(lambda: mechanism(shard(zoo.small("bert"), mesh["shard"]), ranks=ranks))
    model = shard(zoo.small("bert"), mesh)
    with torch.no_grad():
        model.classifier.bias.to_local()[0] += 1e-7 if second else 0
    found["replica"] = failure(lambda: ranks.check_weights(dict(model.named_parameters())))
    assert ranks.any(second)
    return found


def other_key(ranks: Ranks) -> str | None:
    """A rank to which something else arrives than rank 0 has sent."""
    broken = Ranks()
    send = broken._of_first
    broken._of_first = lambda own: bytes(reversed(send(own))) if ranks.rank == 1 else send(own)
    return failure(broken.key)


class Uncovered(nn.Module):
    """A matrix that no rule knows."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(zoo.VOCABULARY, 2))

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


def dies_in_shards(folder: Path, ranks: Ranks) -> None:
    """The last act: under FSDP2 a rank that fails ends, and so does what the others wait for."""
    model = shard(zoo.small("bert"))
    loss = PerSampleLoss(model)

    def only_first(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if ranks.rank == 1:
            raise MemoryError("too many records")
        return loss(model, batch)

    private = mechanism(model, per_sample_loss=only_first, ranks=ranks)
    error = failure(lambda: private.step([batch_of([1, 2])]))
    grads = any(p.grad is not None for p in private.parameters.values())
    torch.save({"error": error, "released": grads}, folder / f"died-{ranks.world_size}-{ranks.rank}.pt")


# ---- DPTrainer


class Augmented(Dataset):
    """Drops a token of every record, by a generator that nobody can seed."""

    generator = random.SystemRandom()

    def __len__(self) -> int:
        return len(RECORDS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = list(RECORDS[index]["input_ids"])
        ids.pop(self.generator.randrange(len(ids)))
        return {**RECORDS[index], "input_ids": ids}


def trainer_errors(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """What a DPTrainer on every rank hears of a failure on one."""
    world, second = ranks.world_size, ranks.rank == 1
    found = {"ledger": ledger_fails(folder / f"ledger-{world}", ranks), "budget": budget(folder / f"budget-{world}")}
    records = RECORDS[::-1] if second else RECORDS
    found["other data"] = failure(lambda: make(folder / f"data-{world}", records=records).train())
    split = random_split(RECORDS, (30, 10), torch.Generator().manual_seed(ranks.rank))[0]  # as without a seed
    found["other split"] = failure(lambda: make(folder / f"split-{world}", records=split).train())
    found["own generator"] = failure(lambda: make(folder / f"own-{world}", records=Augmented()).train())
    found["no checkpoint"] = failure(lambda: make(folder / f"none-{world}").train(resume_from_checkpoint=True))
    found["other seed"] = failure(lambda: make(folder / f"seed-{world}", seed=43 if second else 42).train())
    found["self-check"] = self_check_fails(folder / f"check-{world}", ranks)
    found["other weights"] = other_weights(folder / f"weights-{world}", ranks)
    return found


def other_weights(folder: Path, ranks: Ranks) -> str | None:
    """A trainer saves what another one has trained on; that one may save it on the first rank alone."""
    first = make(folder / "first")
    first.train()
    second = make(folder / "second", model=first.model)
    second.train()
    if ranks.rank == 0:
        second.save_model()
    return failure(first.save_model)


def self_check_fails(folder: Path, ranks: Ranks) -> str | None:
    made = make(folder)

    def unwell(*_: Any) -> None:
        raise RuntimeError("the second rank has no batch")

    if ranks.rank == 1:
        made.public_batch = unwell
    return failure(made.train)


def ledger_fails(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Rank 0's disk is full at the third step: no rank takes it."""
    made = make(folder)
    charge, kept = Run.charge, []

    def full(run: Run, event: Any) -> None:
        kept.append(training.weights(made.model))
        if len(kept) == 3 and ranks.rank == 0:
            raise LedgerError("the disk is full")
        charge(run, event)

    Run.charge = full
    error = failure(made.train)
    Run.charge = charge
    moved = not torch.equal(training.weights(made.model), kept[-1])
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
    running = again.spending._running

    def short(run: Run) -> Any:
        run.steps_left = 2
        return running(run)

    again.spending._running = short
    again.train()
    refused = failure(make(folder, key=None, dp={"noise_multiplier": None, "target_epsilon": 1.0}).train)
    return {
        "epsilon": left,
        "stopped_at": again.state.global_step,
        "refused": refused,
        "steps": training.steps(folder),
    }


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
