"""CarrierConfig: the settings of RGP and LSG, in PEFT's style, and the method that they give on a model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from peft.utils.other import get_pattern_key
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from hf_private import _validate as validate
from hf_private.methods.targeting import Selection, TargetConfig, closest, described, freeze_rest, select

from .method import MASKS, SOURCES, Carriers, Target

logger = logging.get_logger(__name__)

INPUTS_FIRST = (Conv1D, nn.Embedding)  # these store their weight as (in, out)


@dataclass(kw_only=True)
class CarrierConfig(TargetConfig):
    """Low-rank gradient carriers (RGP), optionally sparse (LSG). The saved model has no extra modules or weights.

    Files without `head_scale` are older than it, and mean 1. Its default and that of `refresh` come from short private
    runs on SST-2 with MiniLM: accuracy 84.4 and 83.2 % for two seeds, against 82.8 and 82.2 % with 1.0 and 1 (a
    standard error is 0.8 points). Carriers that stay for the whole run were level with refresh=20.

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
    METHOD_TYPE: ClassVar[str] = "CARRIERS"
    BEFORE: ClassVar[Mapping[str, Any]] = {"head_scale": 1.0}
    num_anchors: ClassVar[int] = 500  # public records of source="public" at a refresh, as in the RGP paper's Figure 3
    labels: ClassVar[str] = "any"  # their own, or else random ones

    r: int | None = described(
        8, "Rank of the carriers: 1 to 16. A higher rank keeps more of the gradient and adds more noise. None with"
        " `sparsity`: no carriers, only the important part of the gradient (Sparse DP-SGD).",
    )  # fmt: skip
    rank_pattern: dict[str, int] = field(
        default_factory=dict, metadata={"help": "Ranks of single modules: name ending or expression -> rank."}
    )
    source: str = described(
        "weight",
        "Carriers are principal directions of the 'weight' (LSG), of its 'history' W_t - W_0 (RGP), of an average of"
        " the noised gradients so far ('momentum'), of the gradient of `anchor_dataset` ('public'), or 'random'.",
    )
    head_scale: float = described(
        0.3,
        "Public factor on the gradients of full-rank parameters (heads, `modules_to_save`) before the joint clip,"
        " undone after the noise. Below 1 it leaves more of the clip norm to the carriers. The RGP authors use 0.1 for"
        " BERT and 0.01 for a Wide ResNet; 1 is off.",
    )
    warmup_steps: int = described(100, "With source='history': first steps, which use the weight instead.")
    power_iterations: int = described(1, "Iterations of the power method; one is enough in the papers.")
    refresh: int = described(
        20,
        "Steps between two computations of the carriers. The papers use 1, but Adam's moments belong to the whole"
        " weight: carriers that change at every step leave them behind.",
    )
    sides: str = described("both", "'left' trains only the carrier of the outputs, which adds less noise.")
    sparsity: float = described(0.0, "LSG's p: share of the least important neurons, which get no update. 0 is RGP.")
    mask: str = described(
        "neurons",
        "With r=None, what Sparse DP-SGD keeps: important 'neurons' (rows and columns, fast), or 'elements' with large"
        " |W| as in the LSG paper, which forms the gradients of a micro-batch.",
    )
    sparsity_start: int = described(0, "First step with `sparsity`; set it later when training from scratch.")
    dataset_name: str | None = described(None, "Name of the public dataset of source='public'; DPTrainer sets it.")
    dataset_fingerprint: str | None = described(None, "Hash of its rows; DPTrainer sets or checks it.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.r is not None:
            validate.integer_at_least(1, r=self.r)
        validate.integer_at_least(1, **{f"rank_pattern[{key!r}]": rank for key, rank in self.rank_pattern.items()})
        validate.integer_at_least(1, power_iterations=self.power_iterations, refresh=self.refresh)
        validate.integer_at_least(0, warmup_steps=self.warmup_steps, sparsity_start=self.sparsity_start)
        validate.one_of(SOURCES, source=self.source)
        validate.positive(head_scale=self.head_scale)
        if math.isinf(self.head_scale):
            raise ValueError("`head_scale` must be finite, got inf.")
        validate.one_of(("both", "left"), sides=self.sides)
        validate.one_of(MASKS, mask=self.mask)
        if self.mask != "neurons" and self.r is not None:
            raise ValueError(f"`mask` must be 'neurons' with carriers, got {self.mask!r}: it is for r=None.")
        validate.non_negative(sparsity=self.sparsity)
        if self.sparsity >= 1:
            raise ValueError(f"`sparsity` must be at least 0 and below 1, got {self.sparsity!r}.")
        if self.r is None and (not self.sparsity or self.rank_pattern or self.sides != "both"):
            raise ValueError(
                "`r` must be a whole number >= 1, got None. Without carriers, set `sparsity` > 0 and neither"
                " `rank_pattern` nor `sides`. For the full gradient, leave out `carriers` in DPConfig."
            )
        if self.source in ("momentum", "public") and self.r is None:
            raise ValueError(f"`source` must be 'weight' without carriers (r=None), got {self.source!r}.")
        if self.source == "momentum" and self.sides != "both":
            raise ValueError(
                f"`sides` must be 'both' with source='momentum', got {self.sides!r}: the gradient on one carrier says"
                " nothing about better directions for it."
            )

    @property
    def reads_public_data(self) -> bool:
        return self.source == "public"

    def build(self, model: nn.Module, *, clipping: str = "flat", seed: int = 0) -> Carriers:
        method, selection = carriers_of(self, model, seed)
        freeze_rest(model, selection.full | method.targets.keys())
        _warn_about_noise(method, model)
        return method

    @staticmethod
    def describe(values: Mapping[str, Any]) -> str:
        rank = values.get("r")
        sparsity = values.get("sparsity") or 0
        source = values.get("source", "weight")
        if "head_scale" not in values:
            return _describe_before(rank, sparsity, source)
        settings = [] if rank is None else [f"r={rank}"]
        settings += [f"sparsity={sparsity}"] if sparsity else []
        settings += [] if rank is None else [f"refresh={values.get('refresh')}"]
        settings += [f"head_scale={values['head_scale']}"] if values["head_scale"] != 1 else []
        if source == "public" and rank is not None:
            data = values.get("dataset_name") or "not named"
            settings.append(f"data: `{data}`, fingerprint {values.get('dataset_fingerprint')}")
        if rank is None:
            part = "largest elements' part" if values.get("mask") == "elements" else "important neurons' part"
            name = f"Sparse DP-SGD: the {part} of the gradient"
        elif sparsity:
            name = f"LSG: low-rank, sparse gradient carriers, from {DIRECTIONS[source]}"
        else:
            name = f"{NAMES.get(source, 'RGP')}: low-rank gradient carriers, from {DIRECTIONS[source]}"
        return f"{name} ({', '.join(settings)})"


DIRECTIONS = {
    "weight": "the weight",
    "history": "the weight's history",
    "momentum": "noised gradients of earlier steps",
    "public": "gradients of public data",
    "random": "random directions",
}
NAMES = {"weight": "RGP on the weight (LSG without sparsity)", "random": "RGP-random"}  # else RGP


def _describe_before(rank: int | None, sparsity: float, source: str) -> str:
    """The text of statements from before `head_scale`, whose cards must still follow from them."""
    if rank is None:
        return f"Sparse DP-SGD (sparsity={sparsity})"
    shown = "" if source == "weight" else f", source={source}"
    if sparsity:
        return f"LSG: low-rank, sparse gradient carriers (r={rank}, sparsity={sparsity}{shown})"
    return f"RGP: low-rank gradient carriers (r={rank}{shown})"


def carriers_of(config: CarrierConfig, model: nn.Module, seed: int = 0) -> tuple[Carriers, Selection]:
    """The method of a config for a model, not attached yet. The model does not change."""
    selection = select(config, model)
    ranks = _ranks(config, selection.targets)
    first = {id(p): name for name, p in model.named_parameters()}
    targets: dict[str, Target] = {}
    for path, module in selection.targets.items():
        inputs_first = isinstance(module, INPUTS_FIRST)
        output_side = "R" if inputs_first else "L"
        target = Target(ranks[path], ("L", "R") if config.sides == "both" else (output_side,), inputs_first)
        name = first[id(module.weight)]
        # Of a tied weight, one module may be an embedding: which layout is taken for it does not matter.
        if replace(targets.setdefault(name, target), inputs_first=inputs_first) != target:
            raise ValueError(f"`rank_pattern` must agree on all modules that share `{name}`, got different ranks.")
    method = Carriers(
        targets,
        source=config.source,
        power_iterations=config.power_iterations,
        refresh=config.refresh,
        warmup_steps=config.warmup_steps,
        sparsity=config.sparsity,
        sparsity_start=config.sparsity_start,
        mask=config.mask,
        head_scale=config.head_scale,
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
