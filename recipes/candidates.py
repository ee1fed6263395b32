"""Ideas for accuracy at a fixed epsilon, as recipes/ablation.py tries them. What helps moves into the package.

Optimizers read noised gradients only, so whatever they do is post-processing. `Shaped` clips in other units, by
quantities that have their noise already, so that its sensitivity is the clip norm too.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_private.gradients.method import Full
from hf_private.gradients.persample import Dense, Outer, PerSample, Rows


class NoiseAwareAdam(torch.optim.Optimizer):
    """Adam that knows the noise of its gradients (DP-AdamBC, Tang et al. 2024) and may filter them (DOPPLER).

    The second moment is max(v - noise variance, floor^2), where `floor` is relative to the standard deviation of the
    noise. `lowpass` is the coefficient a of a filter g_t <- a g_(t-1) + (1 - a) (g_t + g_(t-1)) / 2 before Adam.
    `largest` is the most that one element moves, in learning rates. `noise_std`, by parameter, is set before the first
    step.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        floor: float | None = None,
        lowpass: float | None = None,
        largest: float | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.floor, self.lowpass, self.largest = floor, lowpass, largest
        self.noise_std: Mapping[Tensor, float] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state, g = self.state[p], p.grad
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                    state.update(filtered=torch.zeros_like(p), last=torch.zeros_like(p), weight=0.0, seen=0.0)
                state["step"] += 1
                if self.lowpass is not None:
                    a = self.lowpass
                    state["filtered"].mul_(a).add_(g + state["last"], alpha=(1 - a) / 2)
                    # the response to a gradient of ones, which corrects the bias of the start
                    state["weight"] = a * state["weight"] + (1 - a) / 2 * (1 + (state["step"] > 1))
                    state["last"].copy_(g)
                    g = state["filtered"] / state["weight"]
                state["mean"].lerp_(g, 1 - first)
                state["square"].lerp_(g**2, 1 - second)
                mean = state["mean"] / (1 - first ** state["step"])
                square = state["square"] / (1 - second ** state["step"])
                if self.floor is not None:
                    std = self.noise_std[p]
                    square = (square - std**2).clamp_(min=(self.floor * std) ** 2)
                update = mean / (square.sqrt() + group["eps"])
                if self.largest is not None:
                    update.clamp_(-self.largest, self.largest)
                p.sub_(group["lr"] * update)


class Shaped(Full):
    """BK that clips and adds noise in units in which noised gradients were of equal size: scale, clip, noise, unscale.

    After each step the energy of a block, or of each of its rows and columns, is estimated from the noised gradient:
    the mean square of its elements less that of the noise, averaged over steps by `decay`. To it comes the standard
    error of that estimate, so that what is not known to be small is not taken to be small. The scale is this energy
    to the power of -`power`: 0 is BK, 1/4 has the least noise in all for one clip norm, 1/2 makes all elements alike.
    It is normalised so that the estimated norm of the whole gradient stays.
    """

    takes_shards = False

    def __init__(self, per: str = "block", power: float = 0.25, decay: float = 0.9) -> None:
        self.per, self.power, self.decay = per, power, decay
        self.variance = 0.0  # of the noise on an element of the noised mean, in the scaled units; set by the recipe
        self.energies: dict[str, list[Tensor]] = {}  # by block: of its rows and columns, or one number
        self.errors: dict[str, list[Tensor]] = {}  # their variances
        self.factors: dict[str, list[Tensor]] = {}  # by block: along each axis, or one number
        self.weight = 0.0

    def describe(self) -> str:
        return f"BK in units of noised gradients (by {self.per}, power {self.power:g})"

    def observe(self, name: str, value: PerSample) -> dict[str, PerSample]:
        factors = self.factors.get(name)
        if factors is None:
            return super().observe(name, value)
        if isinstance(value, Outer):  # formed only after the scale, so that the choice of the smaller form stays
            left, *right = (f.to(value.left.dtype) for f in factors)
            value = Outer(value.left * left, value.right * right[0] if right else value.right, value.shape)
        elif isinstance(value, Rows) and len(factors) == 1:
            value = Rows(value.index, value.ds * factors[0].to(value.ds.dtype), value.shape)
        else:
            value = Dense(value.dense() * self._unit(name))
        return super().observe(name, value)

    def _unit(self, name: str) -> Tensor:
        factors = self.factors.get(name, [torch.ones(())])
        return torch.outer(*factors) if len(factors) == 2 else factors[0]

    def begin_step(self, step: int) -> None:
        if not self.energies:
            return
        sizes = {name: p.numel() for name, p in self.parameters.items()}
        found = {
            name: [
                e.clamp(min=0) / self.weight + v.sqrt() / self.weight
                for e, v in zip(energies, self.errors[name], strict=True)
            ]
            for name, energies in self.energies.items()
        }
        total, after, scales = 0.0, 0.0, {}
        for name, energies in found.items():
            if len(energies) == 2:  # rank one: rows x columns / mean
                rows, columns = energies
                columns = columns / columns.mean()
                scales[name] = [rows**-self.power, columns**-self.power]
                energy = torch.outer(rows, columns)
            else:
                scales[name] = [energies[0] ** -self.power]
                energy = energies[0]
            total += float(energy.mean()) * sizes[name]
            after += float((energy ** (1 - 2 * self.power)).mean()) * sizes[name]
        common = (total / after) ** 0.5
        self.factors = {name: [first * common, *rest] for name, (first, *rest) in scales.items()}

    def gradient(self, name: str, sums: Mapping[str, Tensor]) -> Tensor:
        unit = self._unit(name).to(sums[name].dtype)
        g = sums[name] / unit
        noise = torch.as_tensor(self.variance / unit**2, dtype=g.dtype).expand(g.shape)
        axes = (1, 0) if self.per == "row" and g.dim() == 2 and min(g.shape) > 8 else (None,)
        energies = self.energies.setdefault(name, [])
        errors = self.errors.setdefault(name, [])
        for place, axis in enumerate(axes):
            count = g.numel() if axis is None else g.shape[axis]
            e = (g**2 - noise).mean() if axis is None else (g**2 - noise).mean(axis)
            v = 2 / count * ((noise**2).mean() if axis is None else (noise**2).mean(axis))
            if place == len(energies):
                energies.append(torch.zeros_like(e))
                errors.append(torch.zeros_like(v))
            energies[place] = self.decay * energies[place] + (1 - self.decay) * e
            errors[place] = self.decay**2 * errors[place] + (1 - self.decay) ** 2 * v
        if name == next(iter(self.parameters)):
            self.weight = self.decay * self.weight + 1 - self.decay
        return g
