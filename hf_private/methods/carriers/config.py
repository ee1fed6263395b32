"""CarrierConfig: the settings of RGP and LSG, in PEFT's style, and the method that they give on a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from peft.utils.other import get_pattern_key
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from hf_private import _validate as validate
from hf_private.methods.targeting import Selection, TargetConfig, closest, described, freeze_rest, select

from .method import SOURCES, Carriers, Target

logger = logging.get_logger(__name__)

INPUTS_FIRST = (Conv1D, nn.Embedding)  # these store their weight as (in, out)


@dataclass(kw_only=True)
class CarrierConfig(TargetConfig):
    """Low-rank gradient carriers (RGP), optionally sparse (LSG). The saved model has no extra modules or weights.

    >>> config = CarrierConfig(r=8, target_modules="all-linear", sparsity=0.3)
    >>> config.save_pretrained(getfixture("tmp_path"))
    >>> CarrierConfig.from_pretrained(getfixture("tmp_path")) == config
    True
    >>> CarrierConfig(r=0)
    Traceback (most recent call last):
        ...
    ValueError: `r` must be a whole number >= 1, got 0.
    """

    FILE: ClassVar[str] = "carrier_config.json"

    r: int | None = described(
        8, "Rank of the carriers: 1 to 16. A higher rank keeps more of the gradient and adds more noise. None with"
        " `sparsity`: no carriers, only the important part of the gradient (Sparse DP-SGD).",
    )  # fmt: skip
    rank_pattern: dict[str, int] = field(
        default_factory=dict, metadata={"help": "Ranks of single modules: name ending or expression -> rank."}
    )
    source: str = described(
        "weight",
        "Carriers are principal directions of the 'weight' (LSG), of its 'history' W_t - W_0 (RGP), or 'random'.",
    )
    warmup_steps: int = described(100, "With source='history': first steps, which use the weight instead.")
    power_iterations: int = described(1, "Iterations of the power method; one is enough in the papers.")
    refresh: int = described(1, "Steps between two computations of the carriers.")
    sides: str = described("both", "'left' trains only the carrier of the outputs, which adds less noise.")
    sparsity: float = described(0.0, "LSG's p: share of the least important neurons, which get no update. 0 is RGP.")
    sparsity_start: int = described(0, "First step with `sparsity`; set it later when training from scratch.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.r is not None:
            validate.integer_at_least(1, r=self.r)
        validate.integer_at_least(1, **{f"rank_pattern[{key!r}]": rank for key, rank in self.rank_pattern.items()})
        validate.integer_at_least(1, power_iterations=self.power_iterations, refresh=self.refresh)
        validate.integer_at_least(0, warmup_steps=self.warmup_steps, sparsity_start=self.sparsity_start)
        validate.one_of(SOURCES, source=self.source)
        validate.one_of(("both", "left"), sides=self.sides)
        validate.non_negative(sparsity=self.sparsity)
        if self.sparsity >= 1:
            raise ValueError(f"`sparsity` must be at least 0 and below 1, got {self.sparsity!r}.")
        if self.r is None and (not self.sparsity or self.rank_pattern or self.sides != "both"):
            raise ValueError(
                "`r` must be a whole number >= 1, got None. Without carriers, set `sparsity` > 0 and neither"
                " `rank_pattern` nor `sides`. For the full gradient, leave out `carriers` in DPConfig."
            )

    def build(self, model: nn.Module, *, clipping: str = "flat", seed: int = 0) -> Carriers:
        method, selection = carriers_of(self, model, seed)
        freeze_rest(model, selection.full | method.targets.keys())
        _warn_about_noise(method, model)
        return method

    @staticmethod
    def describe(values: Mapping[str, Any]) -> str:
        rank = values.get("r")
        sparsity = values.get("sparsity") or 0
        if rank is None:
            return f"Sparse DP-SGD (sparsity={sparsity})"
        source = "" if values.get("source", "weight") == "weight" else f", source={values['source']}"
        if sparsity:
            return f"LSG: low-rank, sparse gradient carriers (r={rank}, sparsity={sparsity}{source})"
        return f"RGP: low-rank gradient carriers (r={rank}{source})"


def carriers_of(config: CarrierConfig, model: nn.Module, seed: int = 0) -> tuple[Carriers, Selection]:
    """The method of a config for a model, not attached yet. The model does not change."""
    selection = select(config, model)
    ranks = _ranks(config, selection.targets)
    first = {id(p): name for name, p in model.named_parameters()}
    targets: dict[str, Target] = {}
    for path, module in selection.targets.items():
        output_side = "R" if isinstance(module, INPUTS_FIRST) else "L"
        target = Target(ranks[path], ("L", "R") if config.sides == "both" else (output_side,))
        name = first[id(module.weight)]
        if targets.setdefault(name, target) != target:
            raise ValueError(f"`rank_pattern` must agree on all modules that share `{name}`, got different ranks.")
    method = Carriers(
        targets,
        source=config.source,
        power_iterations=config.power_iterations,
        refresh=config.refresh,
        warmup_steps=config.warmup_steps,
        sparsity=config.sparsity,
        sparsity_start=config.sparsity_start,
        seed=seed,
    )
    return method, selection


def _ranks(config: CarrierConfig, modules: Mapping[str, nn.Module]) -> dict[str, int | None]:
    """Rank of each targeted module. `r` is capped by the size of a small matrix, but must fit the largest one."""
    sizes = {path: _smaller_side(module) for path, module in modules.items()}
    for key in config.rank_pattern:
        if not any(get_pattern_key([key], path) == key for path in sizes):
            raise ValueError(f"`rank_pattern` must name targeted modules, got {key!r}. {closest(key, sizes)}")
    if config.r is not None and config.r > max(sizes.values()):
        raise ValueError(
            f"`r` must be at most {max(sizes.values())}, the size of the largest targeted matrix, got {config.r}."
        )
    ranks: dict[str, int | None] = {}
    for path, size in sizes.items():
        own = config.rank_pattern.get(get_pattern_key(list(config.rank_pattern), path))
        if own is not None and own > size:
            raise ValueError(f"`rank_pattern` must give `{path}` a rank of at most {size}, got {own}.")
        if own is not None:
            ranks[path] = own
        else:
            ranks[path] = None if config.r is None else min(config.r, size)
    return ranks


def _smaller_side(module: nn.Module) -> int:
    weight = module.get_parameter("weight")
    return min(weight.shape[0], weight.shape[1:].numel())


def _warn_about_noise(method: Carriers, model: nn.Module) -> None:
    """Warn where carriers do not help: they are larger than the weight, or most noise is elsewhere."""
    method.attach({name: p for name, p in model.named_parameters() if p.requires_grad})
    sizes = {block: shape.numel() for block, shape in method.blocks.items()}
    for name, target in method.targets.items():
        own = sum(sizes.get(f"{name}:{side}", 0) for side in "LR")
        if own > method.parameters[name].numel():
            logger.warning(
                f"`{name}` has {method.parameters[name].numel():,} numbers, its carriers of rank {target.rank} have"
                f" {own:,}: they add more noise than full rank. Lower the rank with `rank_pattern`, or put the module"
                " into `modules_to_save`."
            )
    full = {block: size for block, size in sizes.items() if block in method.parameters}
    if full and 2 * sum(full.values()) > sum(sizes.values()):
        largest = max(full, key=lambda name: full[name])
        logger.warning(
            f"{sum(full.values()):,} of {sum(sizes.values()):,} noised dimensions are parameters at full rank, most of"
            f" them in `{largest}`. If it does not need training, put its module into `exclude_modules`."
        )
