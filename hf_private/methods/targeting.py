"""Which modules of a model a config targets, by PEFT's rules, and what else is trained.

PEFT does the matching, so `target_modules` means the same as in PEFT. Everything that is not targeted, not in
`modules_to_save` and not part of the task head is frozen.
"""

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, cast

from peft import PeftModel
from peft.tuners.tuners_utils import _maybe_include_all_linear_layers, check_target_module_exists
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D
from transformers.utils import PushToHubMixin, cached_file, logging

from hf_private import __version__
from hf_private import _validate as validate
from hf_private.gradients.method import Method

logger = logging.get_logger(__name__)

ALL_LINEAR = "all-linear"
MATRICES = (nn.Linear, Conv1D, _ConvNd, nn.Embedding)


def described(default: Any, text: str) -> Any:
    """A config field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class TargetConfig(PushToHubMixin):
    """Base class of the method configs: the targeted modules, and a JSON file, saved and shared like PEFT's.

    Unlike PEFT's, these configs add no modules to a model: they shape gradients, so the saved model is a plain one.
    Pass them to `DPConfig`, not to `get_peft_model`.
    """

    FILE: ClassVar[str]
    METHOD_TYPE: ClassVar[str]  # the tag in the file, as `peft_type` is in PEFT's
    BEFORE: ClassVar[Mapping[str, Any]] = {}  # what a file means by leaving out a field that is newer than the file

    target_modules: list[str] | str | None = described(
        ALL_LINEAR, "Names or name endings of modules, a regular expression for whole names, or 'all-linear'."
    )
    exclude_modules: list[str] | str | None = described(
        None, "The same for modules that stay frozen; takes precedence."
    )
    layers_to_transform: list[int] | int | None = described(None, "Only layers with these numbers.")
    layers_pattern: list[str] | str | None = described(
        None, "Name of the list of layers, if the numbers are ambiguous."
    )
    modules_to_save: list[str] | None = described(
        None, "Modules to train at full rank, besides the task head, which always is."
    )
    bias: str = described("none", "'all' trains every bias of the model, 'none' only those of full-rank modules.")

    def __post_init__(self) -> None:
        for name in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save"):
            value = getattr(self, name)
            if isinstance(value, (set, frozenset, tuple)):
                value = sorted(value)
                setattr(self, name, value)
            single = isinstance(value, str) and name != "modules_to_save"
            if not (value is None or single or _is_names(value)):
                raise ValueError(f"`{name}` must be a list of names, got {value!r}.")
        if not self.target_modules:
            raise ValueError(f"`target_modules` must name modules, got {self.target_modules!r}. Try 'all-linear'.")
        validate.one_of(("none", "all"), bias=self.bias)
        if isinstance(self.target_modules, str) and self.target_modules.lower() == ALL_LINEAR:
            self.target_modules = ALL_LINEAR
        elif isinstance(self.target_modules, str) and self.layers_to_transform is not None:
            raise ValueError(
                "`layers_to_transform` must be None when `target_modules` is a regular expression, got"
                f" {self.layers_to_transform!r}. Put the numbers into the expression, or pass a list of names."
            )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError(
                f"`layers_pattern` must come with `layers_to_transform`, got {self.layers_pattern!r} without."
            )

    def build(self, model: nn.Module, *, clipping: str = "flat", seed: int = 0) -> Method:
        """Build the method for a model, and freeze every parameter that it does not train."""
        raise NotImplementedError

    @staticmethod
    def describe(values: Mapping[str, Any]) -> str:
        """The card's description of the method, from `values`, the `to_dict` of a config."""
        raise NotImplementedError

    @property
    def reads_public_data(self) -> bool:
        """Whether the method needs `DPTrainer(anchor_dataset=)`."""
        return False

    @property
    def base_model_name_or_path(self) -> NoReturn:
        """What `get_peft_model` reads first: the place for a clear error."""
        field_name = self.METHOD_TYPE.lower()
        raise TypeError(
            f"`peft_config` must be a PEFT config, got {type(self).__name__}, which shapes gradients and adds no"
            f" modules. Pass the plain model to DPTrainer, and this config to DPConfig({field_name}=...)."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write the config to its file in a folder; with `push_to_hub`, upload it too (`kwargs`, as in PEFT)."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        values = self.to_dict() | {"method_type": self.METHOD_TYPE, "hf_private_version": __version__}
        Path(folder, self.FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", folder.name), **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Self:
        """Read the config from a folder or a repository; `kwargs` go to the download."""
        path = cached_file(str(pretrained_model_name_or_path), cls.FILE, **kwargs)
        assert path is not None, "`cached_file` raises an error for a missing file"
        return cls.from_json_file(path)

    @classmethod
    def from_json_file(cls, path_json_file: str | Path) -> Self:
        """Read the config from a JSON file. Unknown fields are skipped with a warning."""
        values = json.loads(Path(path_json_file).read_text())
        values.pop("hf_private_version", None)
        kind = values.pop("method_type", cls.METHOD_TYPE)
        if kind != cls.METHOD_TYPE:
            raise ValueError(f"`method_type` must be {cls.METHOD_TYPE!r} for {cls.__name__}, got {kind!r}.")
        known = {item.name for item in fields(cls)}
        unknown = sorted(values.keys() - known)
        if unknown:
            logger.warning(
                f"{path_json_file}: {cls.__name__} has no field {', '.join(unknown)}; written by a newer version?"
            )
        return cls(**{**cls.BEFORE, **{name: value for name, value in values.items() if name in known}})


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


class Selection(NamedTuple):
    """The trained part of a model: `targets` by module name, and the first names of `full`-rank parameters."""

    targets: dict[str, nn.Module]
    full: set[str]


def select(config: TargetConfig, model: nn.Module) -> Selection:
    """Find the modules that a config names in a model, without changing it. Absent or frozen ones are an error."""
    if isinstance(model, PeftModel):
        raise ValueError(
            "`model` must not be a PEFT model, got one: its base weights are frozen, and its adapters are low-rank"
            " already. Train it without `carriers`, with `anchors` without `target_modules`, or merge the adapter."
        )
    modules = dict(model.named_modules())
    for name in ("target_modules", "exclude_modules", "modules_to_save"):
        listed = getattr(config, name)
        if isinstance(listed, list):
            _check_listed(name, listed, modules)
    first = {id(p): name for name, p in model.named_parameters()}
    saved = _below([path for path in modules if _listed(path, config.modules_to_save or ())], modules, first)
    head = _head(model, modules, first)
    targets = _matched(config, model)
    if config.target_modules == ALL_LINEAR:
        targets = {path: module for path, module in targets.items() if _name(module, first) not in head}
    if not targets:
        raise _nothing_matched(config, modules)
    weights = {_name(module, first) for module in targets.values()}
    for path, module in targets.items():
        _check_target(path, module, _name(module, first) in saved)
    parameters = dict(model.named_parameters())
    for name in sorted(saved):
        if not parameters[name].requires_grad:
            raise ValueError(_frozen("modules_to_save", name))
    head -= _below([path for path in modules if _excluded(config, path)], modules, first)
    biases = {name for name in parameters if config.bias == "all" and name.rpartition(".")[2] == "bias"}
    full = {name for name in saved | head | biases if parameters[name].requires_grad} - weights
    return Selection(targets, full)


def _matched(config: TargetConfig, model: nn.Module) -> dict[str, nn.Module]:
    """Modules that match `target_modules`, by PEFT's rules."""
    criteria: Any = SimpleNamespace(**config.to_dict(), target_parameters=None, task_type=None)
    criteria = cast(Any, _maybe_include_all_linear_layers(criteria, model))
    if config.target_modules == ALL_LINEAR and config.layers_to_transform is not None:
        # PEFT looks at layer numbers when a name *ends* in a target, not when it equals one.
        criteria.target_modules = {path.partition(".")[2] for path in criteria.target_modules if "." in path}
    return {path: m for path, m in model.named_modules() if path and check_target_module_exists(criteria, path)}


def _head(model: nn.Module, modules: dict[str, nn.Module], first: dict[int, str]) -> set[str]:
    """Names of the parameters of the task head: those outside the base model, and not shared with it."""
    base = modules.get(getattr(model, "base_model_prefix", ""))
    if base is None or base is model:
        return set()
    return set(first.values()) - {first[id(p)] for p in base.parameters()}


def head_of(model: nn.Module) -> set[str]:
    """Names of the parameters of the task head."""
    return _head(model, dict(model.named_modules()), {id(p): name for name, p in model.named_parameters()})


def _excluded(config: TargetConfig, path: str) -> bool:
    only = SimpleNamespace(
        exclude_modules=config.exclude_modules, target_modules=".*", target_parameters=None, modules_to_save=None
    )
    return not check_target_module_exists(only, path)


def _below(paths: Iterable[str], modules: dict[str, nn.Module], first: dict[int, str]) -> set[str]:
    return {first[id(p)] for path in paths for p in modules[path].parameters()}


def _name(module: nn.Module, first: dict[int, str]) -> str | None:
    """First name of the weight of a module in the model, however many modules share it."""
    return first.get(id(module._parameters.get("weight")))


def _listed(path: str, names: Collection[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _check_listed(field_name: str, names: list[str], modules: dict[str, nn.Module]) -> None:
    for name in names:
        if not any(_listed(path, [name]) for path in modules):
            raise ValueError(f"`{field_name}` must name modules of the model, got {name!r}. {closest(name, modules)}")


def closest(wanted: str, modules: Collection[str]) -> str:
    """The closest names, endings without numbers first, because users write these."""
    endings = {path.rpartition(".")[2] for path in modules} - {""}
    near = difflib.get_close_matches(wanted.rpartition(".")[2], sorted(e for e in endings if not e.isdigit()), 5, 0.3)
    near += difflib.get_close_matches(wanted, [path for path in modules if path not in near], 3, 0.5)
    return f"Closest names: {', '.join(map(repr, near))}." if near else f"Modules end in {', '.join(sorted(endings))}."


def _nothing_matched(config: TargetConfig, modules: Collection[str]) -> ValueError:
    wanted = config.target_modules
    assert wanted, "`__post_init__` refuses a config without targets"
    narrowing = ("exclude_modules", "layers_to_transform", "modules_to_save")
    given = [f"`{name}`" for name in narrowing if getattr(config, name) is not None]
    also = f" Perhaps {' or '.join(given)} excludes every module." if given else ""
    return ValueError(
        f"`target_modules` must match a module of the model, got {wanted!r}.{also}"
        f" {closest(wanted if isinstance(wanted, str) else wanted[0], modules)}"
    )


def _check_target(path: str, module: nn.Module, is_saved: bool) -> None:
    weight = module._parameters.get("weight")
    if not isinstance(module, MATRICES) or weight is None:
        raise ValueError(
            f"`target_modules` must match Linear, Conv1D, convolution or embedding modules, got `{path}`"
            f" ({type(module).__name__}). Name the modules inside it, or leave it out with `exclude_modules`."
        )
    if not weight.requires_grad:
        raise ValueError(_frozen("target_modules", path))
    if is_saved:
        raise ValueError(
            f"`{path}` must be in only one of `target_modules` and `modules_to_save`, got its weight in both (several"
            " modules may share one weight)."
        )


def _frozen(field_name: str, path: str) -> str:
    return (
        f"`{field_name}` must match trainable modules, got `{path}`, which is frozen. Call `requires_grad_(True)` on"
        " it, or leave it out with `exclude_modules`."
    )


def freeze_rest(model: nn.Module, trained: Collection[str]) -> None:
    """Freeze all parameters except those with these first names."""
    for name, parameter in model.named_parameters():
        if name not in trained:
            parameter.requires_grad_(False)
