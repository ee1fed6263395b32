"""Keeps 4-bit weights in the form that gradients pass."""

from torch import nn

PACKS = "support_avx512bf16_for_cpu"  # bitsandbytes' flag of its 4-bit layers


def keep_unpacked(model: nn.Module) -> None:
    """Let evaluation leave 4-bit weights as they are.

    On processors with bfloat16, bitsandbytes (0.50) packs them for inference at the first evaluation, which the
    self-check is, too. Gradients do not pass packed weights, and nobody is told: the layers below learn too little.
    Weights that were packed before come back with scales that were rounded to bfloat16.
    """
    for module in model.modules():
        if getattr(module, PACKS, False):
            setattr(module, PACKS, False)
            module.state_dict()  # this is what unpacks weights of an earlier evaluation
