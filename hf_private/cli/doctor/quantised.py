"""The memory of a model whose linear layers have 4 or 8 bits, from its architecture alone.

As bitsandbytes and PEFT have it (`BitsAndBytesConfig`, `prepare_model_for_kbit_training`): linear layers but the
output head are quantised, everything else is float32, and a layer computes in bfloat16 on its dequantised weight.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

BITS = (4, 8)
BLOCK = 64  # entries of a weight that share a scale, with 4 bits
SCALES = 256  # scales of one byte that share a float32 (double quantisation)
OVERHEAD = 256 * 4 + 16 * 4 + 4  # tables of both codes, and the mean of the scales, of a layer of 4 bits


def quantised_layers(model: PreTrainedModel) -> list[nn.Linear | Conv1D]:
    """The layers that are stored with fewer bits: all linear ones but the output head."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    head = model.get_output_embeddings() or layers[-1]
    return [layer for layer in layers if layer is not head]


def layer_bytes(layer: nn.Linear | Conv1D, bits: int) -> int:
    """Bytes of a quantised weight with its scales.

    >>> layer_bytes(nn.Linear(64, 128), 8)  # a byte for each entry, a float32 for each row
    8704
    """
    entries, rows = layer.weight.numel(), layer.weight.shape[1 if isinstance(layer, Conv1D) else 0]
    if bits == 8:
        return entries + 4 * rows
    blocks = -(-entries // BLOCK)
    return -(-entries // 2) + blocks + 4 * -(-blocks // SCALES) + OVERHEAD


def prepare(model: PreTrainedModel, bits: int) -> tuple[int, int]:
    """Let a model compute as a quantised one does; returns the bytes of its weights, and of the largest as bfloat16.

    The weights stay, as bfloat16, for the dry run.
    """
    layers = quantised_layers(model)
    stored = sum(layer_bytes(layer, bits) for layer in layers)
    largest = 2 * max(layer.weight.numel() for layer in layers)
    model.float().requires_grad_(False)
    for layer in layers:
        layer.weight.data = layer.weight.data.bfloat16()
        if layer.bias is not None:
            layer.bias.data = layer.bias.data.bfloat16()
        layer.register_forward_pre_hook(_narrow)
        layer.register_forward_hook(_widen)
    weights = {layer.weight for layer in layers}
    rest = sum(p.numel() * p.element_size() for p in model.parameters() if p not in weights)
    return stored + rest, largest


def _narrow(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    return tuple(x.to(torch.bfloat16) for x in inputs)


def _widen(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.float()
