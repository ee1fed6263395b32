"""AnchorConfig: what of a model is trained with GEP, and how its parameters and basis vectors are shared out."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from hf_private import _validate as validate
from hf_private.methods.targeting import TargetConfig, closest, described, freeze_rest, select

from .method import Anchors, Group

GROUPS = ("layer", "stage")
TARGETING = ("exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save")


@dataclass(kw_only=True)
class AnchorConfig(TargetConfig):
    """Gradient embedding perturbation (GEP) in a subspace of public gradients, given by `DPTrainer(anchor_dataset=)`.

    All that is trained goes through GEP: the targeted modules, `modules_to_save` and the task's head, or, without
    `target_modules`, all trainable parameters. `DPConfig.clip_norm` is S1, the embeddings' clip norm.

    >>> config = AnchorConfig(k=100, num_anchors=500, target_modules=["classifier"])
    >>> config.save_pretrained(getfixture("tmp_path"))
    >>> AnchorConfig.from_pretrained(getfixture("tmp_path")) == config
    True
    >>> AnchorConfig(k=0)
    Traceback (most recent call last):
        ...
    ValueError: `k` must be a whole number >= 1, got 0.
    """

    FILE: ClassVar[str] = "anchor_config.json"

    target_modules: list[str] | str | None = described(
        None,
        "As in CarrierConfig: name endings of modules, a regular expression for whole names, or 'all-linear'."
        " None: all parameters that are trainable, such as those of a PEFT adapter.",
    )
    k: int = described(200, "Basis vectors in all, shared out over the groups by the square root of their size.")
    num_anchors: int = described(500, "Public records m whose gradients span the subspace, drawn at every refresh.")
    groups: list[str] | str = described(
        "layer",
        "Parameters with a basis of their own: those of a 'layer', of a 'stage' (all in one numbered block), or a list"
        " of expressions for parts of names, each one group. Smaller groups take less memory and time.",
    )
    power_iterations: int = described(1, "Iterations of the power method; the paper finds one enough.")
    refresh: int = described(1, "Compute the subspace every so many steps.")
    residual: bool = described(True, "False releases the embedding only (B-GEP): less noise, and biased.")
    residual_clip_norm: float | None = described(None, "S2, the residuals' clip norm. Default: a fifth of S1.")
    dataset_name: str | None = described(None, "Name of the public dataset; DPTrainer sets it.")
    dataset_fingerprint: str | None = described(None, "Hash of the public rows; DPTrainer sets it, or checks it.")

    def __post_init__(self) -> None:
        if self.target_modules is not None:
            super().__post_init__()
        elif given := [name for name in TARGETING if getattr(self, name) is not None] or self.bias != "none":
            name = given[0] if isinstance(given, list) else "bias"
            raise ValueError(
                f"`{name}` must come with `target_modules`, got {getattr(self, name)!r} without. Without both, what is"
                " trained is what has `requires_grad`."
            )
        validate.integer_at_least(1, k=self.k, num_anchors=self.num_anchors)
        validate.integer_at_least(1, power_iterations=self.power_iterations, refresh=self.refresh)
        validate.one_of((True, False), residual=self.residual)
        if self.residual_clip_norm is not None:
            validate.positive(residual_clip_norm=self.residual_clip_norm)
            if math.isinf(self.residual_clip_norm) or not self.residual:
                raise ValueError(
                    "`residual_clip_norm` must be finite, and None with residual=False, got"
                    f" {self.residual_clip_norm!r}."
                )
        if isinstance(self.groups, str):
            validate.one_of(GROUPS, groups=self.groups)
        elif not self.groups or not all(isinstance(pattern, str) for pattern in self.groups):
            raise ValueError(f"`groups` must be 'layer', 'stage' or a list of expressions, got {self.groups!r}.")

    def build(self, model: nn.Module, *, clipping: str = "flat", seed: int = 0) -> Anchors:
        validate.one_of(Anchors.CLIPPING, clipping=clipping)
        method = anchors_of(self, model, seed)
        freeze_rest(model, method.group_of.keys())
        return method

    @staticmethod
    def describe(values: Mapping[str, Any]) -> str:
        name = "GEP" if values.get("residual", True) else "B-GEP"
        data = f"`{values.get('dataset_name') or 'not named'}`, fingerprint {values.get('dataset_fingerprint')}"
        return f"{name}: gradients embedded in a subspace of public data (k={values.get('k')}; data: {data})"


def anchors_of(config: AnchorConfig, model: nn.Module, seed: int = 0) -> Anchors:
    """The method that a config means for a model, not attached yet; changes nothing."""
    parameters = {name: p for name, p in model.named_parameters() if name in trained(config, model)}
    names = group(config.groups, parameters)
    sizes = {key: sum(parameters[name].numel() for name in members) for key, members in names.items()}
    shares = share_out(config.k, sizes)
    largest = max(shares, key=shares.get)
    if shares[largest] > config.num_anchors:
        raise ValueError(
            f"`num_anchors` must be at least {shares[largest]}, the basis vectors of `{largest}`, got"
            f" {config.num_anchors}: fewer gradients do not span the subspace. Raise it, or lower `k`."
        )
    return Anchors(
        {key: Group(tuple(members), shares[key]) for key, members in names.items()},
        power_iterations=config.power_iterations,
        refresh=config.refresh,
        residual=config.residual,
        residual_clip_norm=config.residual_clip_norm,
        seed=seed,
    )


def trained(config: AnchorConfig, model: nn.Module) -> set[str]:
    """First names of the parameters that go through GEP."""
    if config.target_modules is None:
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        if not names:
            raise ValueError("`target_modules` must be given for a model whose parameters are all frozen, got None.")
        return names
    targets, full = select(config, model)
    first = {id(p): name for name, p in model.named_parameters()}
    return full | {first[id(module.weight)] for module in targets.values()}


def group(groups: str | list[str], names: Iterable[str]) -> dict[str, list[str]]:
    """Parameter names by group, in the paper's manner: by layer, by stage, or by the first expression that matches.

    >>> group("stage", ["embed.weight", "h.0.fc.weight", "h.0.fc.bias", "h.1.fc.weight"])
    {'embed': ['embed.weight'], 'h.0': ['h.0.fc.weight', 'h.0.fc.bias'], 'h.1': ['h.1.fc.weight']}
    """
    found: dict[str, list[str]] = {} if isinstance(groups, str) else {pattern: [] for pattern in groups}
    for name in (names := list(names)):
        if isinstance(groups, str):
            found.setdefault(_layer(name) if groups == "layer" else _stage(name), []).append(name)
            continue
        pattern = next((p for p in groups if re.match(rf"(.*\.)?({p})(\..*)?$", name)), None)
        if pattern is None:
            raise ValueError(
                f"`groups` must match every trained parameter, got none for `{name}`. Add '.*' at the end."
            )
        found[pattern].append(name)
    if empty := [pattern for pattern, members in found.items() if not members]:
        raise ValueError(f"`groups` must match trained parameters, got {empty[0]!r}. {closest(empty[0], names)}")
    return found


def _layer(name: str) -> str:
    return name.rpartition(".")[0] or name


def _stage(name: str) -> str:
    numbered = re.match(r"(.*?\.)?\d+(?=\.)", name)
    return numbered[0] if numbered else _layer(name)


def share_out(k: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Basis vectors by group: proportional to sqrt(size), at least one, never more than the group has numbers.

    >>> share_out(12, {"head": 100, "body": 10_000})
    {'head': 1, 'body': 11}
    >>> share_out(12, {"bias": 2, "weight": 8})
    {'bias': 2, 'weight': 8}
    """
    if k < len(sizes):
        raise ValueError(
            f"`k` must be at least {len(sizes)}, one for each group of parameters, got {k}. Raise it, or make fewer"
            " groups: groups='stage' or a list of expressions."
        )
    shares = dict.fromkeys(sizes, 1)
    for _ in range(k - len(sizes)):
        open_groups = [key for key, share in shares.items() if share < sizes[key]]
        if not open_groups:
            break
        # Webster's rule: each further vector goes where the quotient of weight and seats is largest.
        shares[max(open_groups, key=lambda key: math.sqrt(sizes[key]) / (2 * shares[key] + 1))] += 1
    return shares
