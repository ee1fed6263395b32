"""Other libraries as engines of the benchmark, on the same models, batches and losses.

They are installed in a separate environment (`make bench-peers`); nothing else here depends on them.
"""

from collections.abc import Callable
from contextlib import suppress

import torch
import torch.nn.functional as F
from engines import Step
from torch import Tensor, nn
from torch.func import functional_call

from hf_private.gradients.bookkeeper import trainable
from hf_private.tasks.losses import PerSampleLoss


def freeze_positions(model: nn.Module) -> None:
    """Freeze position embeddings: neither library supports position ids with one row for the whole batch."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings in (512, 514, 1024):
            module.requires_grad_(False)


class Wrapped:
    """A wrapped model with the attributes of the model: Opacus hides `config`, which the loss reads."""

    def __init__(self, wrapper: nn.Module, model: nn.Module) -> None:
        self.wrapper = wrapper
        self.model = model

    def __call__(self, *args, **kwargs):
        return self.wrapper(*args, **kwargs)

    def __getattr__(self, name: str):
        return getattr(self.model, name)


def opacus_hooks(model: nn.Module, batch: dict) -> Step:
    """Per-sample gradients of all parameters, stored."""
    from opacus.grad_sample import GradSampleModule

    freeze_positions(model)
    loss = PerSampleLoss(model)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    parameters = list(trainable(model).values())

    def step() -> None:
        loss(Wrapped(wrapped, model), batch).sum().backward()
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in parameters]).norm(dim=0)
        for p in parameters:
            p.grad = torch.einsum("n,n...->...", (1 / norms).clamp(max=1), p.grad_sample)
            p.grad_sample = None
        for p in parameters:
            p.grad = None

    return step


def opacus_ghost(model: nn.Module, batch: dict) -> Step:
    """Ghost clipping: norms in one backward pass, the clipped sum in a second one."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    freeze_positions(model)
    if "bert" in model.config.model_type:  # the default is an expanded row, which Opacus cannot view
        batch = batch | {"token_type_ids": torch.zeros_like(batch["input_ids"])}
    loss = PerSampleLoss(model)
    wrapped = GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=1.0, use_ghost_clipping=True
    )
    parameters = list(trainable(model).values())

    def step() -> None:
        losses = loss(Wrapped(wrapped, model), batch)
        losses.sum().backward(retain_graph=True)
        factors = wrapped.get_clipping_coef()
        for p in parameters:
            p.grad = None
        wrapped.disable_hooks()
        (losses * factors).sum().backward()
        wrapped.enable_hooks()
        for p in parameters:
            p.grad = None

    return step


def opake(model: nn.Module, batch: dict) -> Step:
    """`vmap` of `grad`, as in the example of the library, with its patches of the model."""
    from opake.dpsgd.clipping import clipped_grad
    from opake.exceptions import ConfigurationError
    from opake.patches import apply_model_patches, apply_runtime_patches

    model.set_attn_implementation("eager")  # fused attention has no rule for vmap
    apply_runtime_patches()
    with suppress(ConfigurationError):  # it patches language models only
        apply_model_patches(model)
    parameters = {name: p.detach() for name, p in trainable(model).items()}
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "attention_mask")}
    (name,) = inputs  # no mask, which vmap cannot handle; all records have the same length

    def loss_of_one(parameters: dict, record: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, parameters, (), {name: record.unsqueeze(0)}).logits[0]
        if logits.dim() == 2:  # a language model
            logits, label = logits[:-1], label[1:]
        return F.cross_entropy(logits, label)

    gradient, state = clipped_grad(loss_of_one, clipping_norm=1.0, batch_argnums=(1, 2))

    def step() -> None:
        nonlocal state
        _, state = gradient(parameters, inputs[name], batch["labels"], state=state)

    return step


PEERS: dict[str, Callable[[nn.Module, dict], Step]] = {
    "opacus-hooks": opacus_hooks,
    "opacus-ghost": opacus_ghost,
    "opake": opake,
}
