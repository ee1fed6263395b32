"""Quantities that the papers plot: stable rank of gradients, projection residuals, and the noise of each method.

Gradients of private records are private, and so is every number computed from them here. Use public records, or accept
that the guarantee does not cover what you print.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.method import Full, Method
from hf_private.methods.carriers.config import CarrierConfig, carriers_of
from hf_private.methods.carriers.lowrank import LowRank
from hf_private.methods.carriers.method import Carriers


def stable_rank(gradient: Tensor) -> float:
    """|G|_F^2 / |G|_2^2 of a gradient (rows, columns...): its number of relevant directions (RGP, Fig. 2).

    >>> stable_rank(torch.eye(5))
    5.0
    """
    matrix = gradient.flatten(1)
    return ((matrix.norm() / torch.linalg.matrix_norm(matrix, 2)) ** 2).item()


def principal(matrix: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """The first r singular vectors of a matrix (rows, columns...): U (rows, r) and V^T (r, columns)."""
    u, _, vh = torch.linalg.svd(matrix.flatten(1), full_matrices=False)
    return u[:, :r], vh[:r]


def projection_residual(gradient: Tensor, left: Tensor, right: Tensor) -> float:
    """|(I - L L^T) G (I - R^T R)|_F / |G|_F: the part outside of orthonormal L (rows, r) and R (r, columns).

    With the directions of an earlier gradient, `principal(before, r)`, this is Eq. (5) of RGP, the historical
    residual. With those of the gradient itself it is Eq. (6), the self residual.

    >>> g = torch.diag(torch.tensor([4.0, 3.0, 0.0]))
    >>> round(projection_residual(g, *principal(g, r=1)), 4), round(projection_residual(g, *principal(g, r=2)), 4)
    (0.6, 0.0)
    """
    matrix = gradient.flatten(1)
    outside = matrix - left @ (left.t() @ matrix)
    outside = outside - (outside @ right.t()) @ right
    return (outside.norm() / matrix.norm()).item()


def gradient_report(
    model: nn.Module,
    per_sample_loss: Callable[[nn.Module, Mapping[str, Any]], Tensor],
    batch: Mapping[str, Any],
    method: Carriers,
    *,
    public: bool,
    before: Mapping[str, Tensor] | None = None,
) -> dict[str, dict[str, float]]:
    """Stable rank and residuals of the gradient of each targeted weight, on one batch.

    `public=True` states that the records are public, or that you accept that the numbers are not private. `before` are
    gradients of an earlier step by name, for the historical residual. The method must have begun a step.
    """
    if public is not True:
        raise ValueError(
            f"`public` must be True, got {public!r}. The guarantee does not cover gradients of private records, nor"
            " their ranks and residuals: use public records, or state that you accept this."
        )
    parameters = {name: trainable(model)[name] for name in method.targets}
    found = torch.autograd.grad(per_sample_loss(model, batch).sum(), list(parameters.values()))
    report = {}
    for name, gradient in zip(parameters, found, strict=True):
        carriers = method.carriers[name]
        row = {"stable_rank": stable_rank(gradient)}
        if isinstance(carriers, LowRank):
            rank = len(carriers.right)
            row["carrier_residual"] = projection_residual(gradient, carriers.left, carriers.right)
            row["self_residual"] = projection_residual(gradient, *principal(gradient, rank))
            if before is not None:
                row["historical_residual"] = projection_residual(gradient, *principal(before[name], rank))
        report[name] = row
    return report


def noise_energy(method: Method, noise_multiplier: float = 1.0, clip_norm: float = 1.0) -> float:
    """Expected squared norm of the noise of one step, over all released blocks of an attached method.

    >>> full = Full()
    >>> full.attach({"weight": nn.Parameter(torch.zeros(3, 4))})
    >>> noise_energy(full, noise_multiplier=2.0)
    48.0
    """
    stds = method.stds(noise_multiplier, clip_norm)
    return sum(stds[block] ** 2 * shape.numel() for block, shape in method.blocks.items())


def dimensions_by_method(model: nn.Module, config: CarrierConfig) -> dict[str, dict[str, int]]:
    """For the full gradient and for carriers: how many numbers are trained, and how many get noise.

    `start_bytes` is the memory of W_0, which only source="history" keeps. The model does not change.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> model = BertForSequenceClassification(BertConfig(num_hidden_layers=1, vocab_size=100))
    >>> for name, row in dimensions_by_method(model, CarrierConfig(r=8, sparsity=0.3)).items():
    ...     print(name, row["trainable"], row["noised"])
    DP-SGD 8153090 8153090
    RGP r=8 7669250 124418
    LSG r=8 sparsity=0.3 7669250 87586
    """
    parameters = trainable(model)
    full = Full()
    full.attach(parameters)
    rows: dict[str, Method] = {"DP-SGD": full}
    if config.r is None:
        rows[f"Sparse DP-SGD sparsity={config.sparsity}"] = _attached(config, model)
    else:
        rows[f"RGP r={config.r}"] = _attached(replace(config, sparsity=0.0), model)
        if config.sparsity:
            rows[f"LSG r={config.r} sparsity={config.sparsity}"] = _attached(config, model)
    result = {}
    for name, method in rows.items():
        blocks = method.blocks_at(method.sparsity_start) if isinstance(method, Carriers) else method.blocks
        result[name] = {
            "trainable": sum(p.numel() for p in method.parameters.values()),
            "noised": sum(shape.numel() for shape in blocks.values()),
            "start_bytes": method.start_bytes if isinstance(method, Carriers) else 0,
        }
    return result


def _attached(config: CarrierConfig, model: nn.Module) -> Carriers:
    """The method of `config` for the model, without freezing anything."""
    method, selection = carriers_of(config, model)
    trained = selection.full | method.targets.keys()
    method.attach({name: p for name, p in trainable(model).items() if name in trained})
    return method
