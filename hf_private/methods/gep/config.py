"""AnchorConfig: the settings of GEP, its groups of parameters, and the distribution of basis vectors over them."""

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
LABELS = ("random", "own")
TARGETING = {  # fields that refine `target_modules`, and their defaults
    "exclude_modules": None,
    "layers_to_transform": None,
    "layers_pattern": None,
    "modules_to_save": None,
    "bias": "none",
}


@dataclass(kw_only=True)
class AnchorConfig(TargetConfig):
    """Gradient embedding perturbation (GEP) in a subspace of gradients of public data, `DPTrainer(anchor_dataset=)`.

    GEP handles everything that is trained: the targeted modules, `modules_to_save` and the task head, or, without
    `target_modules`, all trainable parameters. `DPConfig.clip_norm` is S1, the clip norm of the embeddings.

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
    METHOD_TYPE: ClassVar[str] = "ANCHORS"

    target_modules: list[str] | str | None = described(
        None,
        "As in CarrierConfig: name endings of modules, a regular expression for whole names, or 'all-linear'."
        " None: all parameters that are trainable, such as those of a PEFT adapter.",
    )
    k: int = described(200, "Total number of basis vectors; groups get them by the square root of their size.")
    num_anchors: int = described(500, "Public records m whose gradients span the subspace, drawn at every refresh.")
    groups: list[str] | str = described(
        "layer",
        "Parameters that share a basis: those of a 'layer', of a 'stage' (all in one numbered block), or a list of"
        " expressions for parts of names, one per group. Smaller groups need less memory and time.",
    )
    power_iterations: int = described(1, "Iterations of the power method; one is enough in the paper.")
    refresh: int = described(1, "Steps between two computations of the subspace.")
    labels: str = described(
        "random",
        "Labels of the public records: 'random', as in the paper, or their 'own', where they have the task's. Language"
        " models always use the text.",
    )
    residual: bool = described(True, "False releases only the embedding (B-GEP), with less noise and a bias.")
    residual_clip_norm: float | None = described(None, "S2, the clip norm of the residuals. Default: a fifth of S1.")
    dataset_name: str | None = described(None, "Name of the public dataset; DPTrainer sets it.")
    dataset_fingerprint: str | None = described(None, "Hash of the public rows; DPTrainer sets or checks it.")

    def __post_init__(self) -> None:
        if self.target_modules is not None:
            super().__post_init__()
        else:
            self._refuse_targeting()
        validate.integer_at_least(1, k=self.k, num_anchors=self.num_anchors)
        validate.integer_at_least(1, power_iterations=self.power_iterations, refresh=self.refresh)
        validate.one_of((True, False), residual=self.residual)
        validate.one_of(LABELS, labels=self.labels)
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

    @property
    def reads_public_data(self) -> bool:
        return True

    def _refuse_targeting(self) -> None:
        """Without `target_modules`, refuse the fields that refine it."""
        for name, default in TARGETING.items():
            if getattr(self, name) != default:
                raise ValueError(
                    f"`{name}` must come with `target_modules`, got {getattr(self, name)!r} without. Without both, all"
                    " parameters with `requires_grad` are trained."
                )

    def build(self, model: nn.Module, *, clipping: str = "flat", seed: int = 0) -> Anchors:
        validate.one_of(Anchors.CLIPPING, clipping=clipping)
        method = anchors_of(self, model, seed)
        freeze_rest(model, method.group_of.keys())
        return method

    @staticmethod
    def describe(values: Mapping[str, Any]) -> str:
        name = "GEP" if values.get("residual", True) else "B-GEP"
        data = f"`{values.get('dataset_name') or 'not named'}`, fingerprint {values.get('dataset_fingerprint')}"
        labels = ", with its own labels" if values.get("labels") == "own" else ""
        return f"{name}: gradients embedded in a subspace of public data (k={values.get('k')}; data: {data}{labels})"


def anchors_of(config: AnchorConfig, model: nn.Module, seed: int = 0) -> Anchors:
    """The method of a config for a model, not attached yet. The model does not change."""
    parameters = {name: p for name, p in model.named_parameters() if name in trained(config, model)}
    names = group(config.groups, parameters)
    sizes = {key: sum(parameters[name].numel() for name in members) for key, members in names.items()}
    shares = share_out(config.k, sizes)
    largest = max(shares, key=lambda key: shares[key])
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
    """First names of the parameters that GEP trains."""
    if config.target_modules is None:
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        if not names:
            raise ValueError("`target_modules` must be given for a model whose parameters are all frozen, got None.")
        return names
    targets, full = select(config, model)
    first = {id(p): name for name, p in model.named_parameters()}
    return full | {first[id(module.weight)] for module in targets.values()}


def group(groups: str | list[str], names: Iterable[str]) -> dict[str, list[str]]:
    """Parameter names by group, as in the paper: by layer, by stage, or by the first expression that matches.

    >>> group("stage", ["embed.weight", "h.0.fc.weight", "h.0.fc.bias", "h.1.fc.weight"])
    {'embed': ['embed.weight'], 'h.0': ['h.0.fc.weight', 'h.0.fc.bias'], 'h.1': ['h.1.fc.weight']}
    """
    names = list(names)
    if isinstance(groups, str):
        key_of = _layer if groups == "layer" else _stage
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(key_of(name), []).append(name)
        return found
    found = {pattern: [] for pattern in groups}
    for name in names:
        pattern = next((p for p in groups if re.match(rf"(.*\.)?({p})(\..*)?$", name)), None)
        if pattern is None:
            raise ValueError(
                f"`groups` must match every trained parameter, got none for `{name}`. Add '.*' at the end."
            )
        found[pattern].append(name)
    for pattern, members in found.items():
        if not members:
            raise ValueError(f"`groups` must match trained parameters, got {pattern!r}. {closest(pattern, names)}")
    return found


def _layer(name: str) -> str:
    return name.rpartition(".")[0] or name


def _stage(name: str) -> str:
    numbered = re.match(r"(.*?\.)?\d+(?=\.)", name)
    return numbered[0] if numbered else _layer(name)


def share_out(k: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Basis vectors by group: proportional to sqrt(size), at least one, and at most the size.

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
        # Webster's rule: the next vector goes to the group with the largest quotient of weight and seats.
        largest = max(open_groups, key=lambda key: math.sqrt(sizes[key]) / (2 * shares[key] + 1))
        shares[largest] += 1
    return shares
