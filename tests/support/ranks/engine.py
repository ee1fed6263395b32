"""The engine on plain and on sharded models: five steps, noise alone, and the self-check."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_private.distributed.ranks import Ranks
from hf_private.gradients.bookkeeper import BookKeeper, trainable
from hf_private.gradients.method import Full, Method
from hf_private.gradients.persample import Dense, PerSample
from hf_private.gradients.selfcheck import self_check
from hf_private.gradients.tensors import unsharded
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from hf_private.methods.carriers.method import Carriers, Target
from hf_private.methods.gep.method import Anchors, Group
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch
from tests.support import training, zoo

KEY = bytes(range(32))
RECORDS = training.text()
DRAWS = ([3, 8, 9, 20, 21, 33, 39], [5], [], [0, 1, 2, 30, 31], [11, 12])  # some ranks empty, then all
STEPS = len(DRAWS)
SIGMA, CLIP, EXPECTED = 1.5, 0.25, 4


def llama() -> nn.Module:
    """Its norms are modules of their own, which are copied for each record."""
    return zoo.small("llama-cls", num_hidden_layers=2, head_dim=4)


def lora() -> nn.Module:
    model = get_peft_model(
        zoo.small("bert", num_hidden_layers=2),
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
    "bk": (lambda: zoo.small("bert", num_hidden_layers=2), lambda model: Full()),
    "bk-llama": (llama, lambda model: Full()),
    "lora": (lora, lambda model: Full()),
    "rgp": (lambda: zoo.small("bert", num_hidden_layers=2), lambda model: Carriers(weights_of(model))),
    "history": (
        lambda: zoo.small("bert", num_hidden_layers=2),
        lambda model: Carriers(weights_of(model), source="history", warmup_steps=2, power_iterations=2),
    ),
    "lsg": (lambda: zoo.small("bert", num_hidden_layers=2), lambda model: Carriers(weights_of(model), sparsity=0.4)),
    "gep": (lambda: zoo.small("bert", num_hidden_layers=2), anchors),
}


def batch_of(indices: list[int]) -> dict[str, torch.Tensor]:
    return training.Padding()([RECORDS[i] for i in indices])


def shard(model: nn.Module, mesh: dist.DeviceMesh | None = None) -> nn.Module:
    for module in list(model.modules()):
        if type(module).__name__ in ("BertLayer", "LlamaDecoderLayer"):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicated(ranks: Ranks) -> dist.DeviceMesh:
    """Shards of which every rank has a replica (HSDP)."""
    return dist.init_device_mesh("cpu", (ranks.world_size, 1), mesh_dim_names=("replicate", "shard"))


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


def engine(
    name: str, sharded: bool, ranks: Ranks, adam: bool = False, mesh: dist.DeviceMesh | None = None
) -> dict[str, Any]:
    """Weights before and after five steps, and the bytes that a step reduces."""
    make, method_of = METHODS[name]
    model = make().eval()
    method = method_of(model)
    before = {key: p.detach().clone() for key, p in trainable(model).items()}
    if sharded:
        model = shard(model, mesh)
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
    model = zoo.small("bert")
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


def checked() -> dict[str, Any]:
    """The self-check of a sharded model: what it says, what it leaves behind, and whether it sees what is wrong."""
    model = shard(zoo.small("bert", num_hidden_layers=2)).train()
    parameters = trainable(model)
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    before = {name: unsharded(p.detach()).clone() for name, p in parameters.items()}
    loss = PerSampleLoss(model)

    def check(loss: Callable = loss) -> str:
        return self_check(model, loss, partial(synthetic_batch, model))

    def too_long(self: Full, name: str, value: PerSample) -> dict[str, PerSample]:
        return {name: Dense(value.dense() * (1.01 if name == "classifier.weight" else 1))}

    found = {"report": check(), "coupled": failure(lambda: check(lambda m, b: loss(m, b) * len(b["labels"])))}
    with mock.patch.object(Full, "observe", too_long):
        found["wrong"] = failure(check)
    after = trainable(model)
    found["unharmed"] = {
        "parameters": all(p is parameters[name] for name, p in after.items()),
        "weights": all(torch.equal(unsharded(p.detach()), before[name]) for name, p in after.items()),
        "gradients": all(bool((unsharded(p.grad) == 1).all()) for p in after.values()),
        "modes": all(module.training for module in model.modules()),
    }
    return found
