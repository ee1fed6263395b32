"""Cases, public records and formed gradients that the tests of GEP share."""

import math

import torch
from peft import LoraConfig, get_peft_model

from hf_private.gradients.bookkeeper import trainable
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from hf_private.methods.gep.config import AnchorConfig
from hf_private.methods.gep.public_data import AnchorBooks
from tests.support import oracle, zoo

RECORDS, ANCHORS = 4, 9


def lora_gpt2():
    model, _ = zoo.build("gpt2")
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)).double()
    return model, zoo.loss_of(model)


CASES: dict[str, tuple[str, dict]] = {  # model, config
    "MLP": ("mlp", {"k": 12}),
    "MLP, stages": ("mlp", {"k": 12, "groups": "stage", "power_iterations": 3}),
    "ResNet": ("resnet-gn", {"k": 12, "groups": ["stem|norm", "grouped|dilated|down", "classifier"]}),
    "BERT, head and last layer": ("bert", {"k": 16, "target_modules": "all-linear", "layers_to_transform": 1}),
    "GPT-2, tied": ("gpt2", {"k": 12, "target_modules": ["c_fc", "lm_head"]}),
    "LoRA on GPT-2": ("lora", {"k": 14}),
}


def prepare(case, **settings):
    """Model, loss, a private batch and the attached method, its subspace found from other, public records."""
    name, config = CASES[case]
    model, loss = lora_gpt2() if name == "lora" else zoo.build(name)
    model.eval()
    method = AnchorConfig(**{"num_anchors": ANCHORS, **config, **settings}).build(model)
    method.books = AnchorBooks(model, loss, public(model))
    method.attach(trainable(model))
    method.begin_step(0)
    return model, loss, zoo.make_batch(model, RECORDS), method


def public(model, count=ANCHORS, rows=4):
    """Public records in micro-batches; they do not depend on the step."""
    whole = zoo.make_batch(model, count, seed=7)
    parts = [{name: value[at : at + rows] for name, value in whole.items()} for at in range(0, count, rows)]
    return lambda step: parts


def basis_of(method):
    """The bases as one block-diagonal matrix (k, p), parameters in order."""
    total = sum(group.k for group in method.groups.values())
    blocks, first = [], {}
    for name, (_, k) in method.groups.items():
        first[name] = sum(first[other][1] for other in first), k
    for name, p in method.parameters.items():
        start, k = first[method.group_of[name]]
        block = torch.zeros(total, p.numel(), dtype=torch.float64)
        block[start : start + k] = method.basis[name].flatten(1)
        blocks.append(block)
    return torch.cat(blocks, 1)


def formed(gradients):
    """Oracle gradients as a matrix (N, p)."""
    return torch.stack([oracle.flat(one) for one in gradients])


def released(method, sums):
    """Embedding (k,) and residual (p,) of what a method gives."""
    w = torch.cat([sums[f"@{name}"] for name in method.groups])
    return w, torch.cat([sums[name].flatten() for name in method.parameters]) if method.residual else None


def clip(rows, clip_norm):
    return (rows * (clip_norm / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)


def run(model, loss, method, batches, noise_multiplier=0.0, clip_norm=math.inf, step=0, key=b"0" * 32):
    """The gradient of one step of the mechanism."""
    mechanism = Mechanism(
        model,
        loss,
        method=method,
        clipping=Clipping(clip_norm=clip_norm),
        noise=NoiseSource("fast", key),
        noise_multiplier=noise_multiplier,
        sample_rate=0.1,
        expected_batch_size=1,
        charge=lambda event: None,
    )
    mechanism.steps = step
    mechanism.step(batches)
    return torch.cat([p.grad.flatten() for p in trainable(model).values()])
