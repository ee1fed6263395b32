"""The losses of direct preference optimisation that are a function of one pair.

Symbols: c and r are the log-ratios of the chosen and the rejected answer, log pi(y|x) - log pi_ref(y|x); beta is the
strength of the KL penalty, epsilon the share of wrong preferences (`label_smoothing`). All values have shape (N,).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu


class Pairs(NamedTuple):
    """What the losses read of N pairs."""

    c: Tensor
    r: Tensor
    chosen_tokens: Tensor  # of the answer
    rejected_tokens: Tensor
    nll: Tensor  # of the chosen answer, mean over its tokens


Objective = Callable[[Pairs, Any], Tensor]


def _delta(p: Pairs) -> Tensor:
    return p.c - p.r


def _mean_delta(p: Pairs) -> Tensor:
    return p.c / p.chosen_tokens - p.r / p.rejected_tokens


def _exo(p: Pairs, a: Any) -> Tensor:
    """KL(p_theta || p_label) over the two answers, with label probabilities (1 - epsilon, epsilon)."""
    wins, loses = logsigmoid(a.beta * _delta(p)), logsigmoid(-a.beta * _delta(p))
    epsilon = torch.tensor(a.label_smoothing, dtype=p.c.dtype, device=p.c.device)
    return wins.exp() * (wins - torch.log1p(-epsilon)) + loses.exp() * (loses - epsilon.log())


def _robust(p: Pairs, a: Any) -> Tensor:
    epsilon, margin = a.label_smoothing, a.beta * _delta(p)
    return (epsilon * logsigmoid(-margin) - (1 - epsilon) * logsigmoid(margin)) / (1 - 2 * epsilon)


def _discopop(p: Pairs, a: Any) -> Tensor:
    margin = a.beta * _delta(p)
    share = torch.sigmoid(margin / a.discopop_tau)
    return share * torch.exp(-margin) - (1 - share) * logsigmoid(margin)


OBJECTIVES: dict[str, Objective] = {
    "sigmoid": lambda p, a: -logsigmoid(a.beta * _delta(p)),
    "hinge": lambda p, a: relu(1 - a.beta * _delta(p)),
    "ipo": lambda p, a: (_mean_delta(p) - 1 / (2 * a.beta)) ** 2,
    "exo_pair": _exo,
    "nca_pair": lambda p, a: -logsigmoid(a.beta * p.c) - (logsigmoid(-a.beta * p.c) + logsigmoid(-a.beta * p.r)) / 2,
    "robust": _robust,
    "bco_pair": lambda p, a: -logsigmoid(a.beta * p.c) - logsigmoid(-a.beta * p.r),
    "sppo_hard": lambda p, a: (p.c - 0.5 / a.beta) ** 2 + (p.r + 0.5 / a.beta) ** 2,
    "apo_zero": lambda p, a: 1 - torch.sigmoid(a.beta * p.c) + torch.sigmoid(a.beta * p.r),
    "apo_down": lambda p, a: torch.sigmoid(a.beta * p.c) + 1 - torch.sigmoid(a.beta * _delta(p)),
    "discopop": _discopop,
    "sft": lambda p, a: p.nll,
    "sigmoid_norm": lambda p, a: -logsigmoid(a.beta * _mean_delta(p)),
}
BATCH_LOSSES = {  # TRL's other loss types -> why they have no value for each pair
    "aot": "it sorts the log-ratios of the batch",
    "aot_unpaired": "it sorts the log-ratios of the batch",
}
