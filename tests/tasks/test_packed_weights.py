"""4-bit weights that are packed for inference at the first evaluation, without bitsandbytes."""

from typing import Any

import torch
from torch import nn

from hf_private.tasks.packed_weights import PACKS, keep_unpacked


class Packing(nn.Linear):
    """As bitsandbytes' 4-bit layer: packs its weights when it evaluates, and unpacks them for a state dict."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.packed = False
        setattr(self, PACKS, True)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.packed |= bool(getattr(self, PACKS)) and not self.training
        out = super().forward(input)
        return out.detach() if self.packed else out

    def _save_to_state_dict(self, *arguments: Any) -> None:
        self.packed = False
        super()._save_to_state_dict(*arguments)


def test_gradients_pass_after_an_evaluation() -> None:
    model, x = nn.Sequential(Packing(), Packing()), torch.ones(1, 2)
    model.eval()(x)
    assert not model.train()(x).requires_grad, "as it is without us"
    keep_unpacked(model)
    model.eval()(x)
    assert model.train()(x).requires_grad and not model[1].packed
