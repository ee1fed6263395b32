"""Settings of the recipes: a YAML file and the command line, which takes precedence.

A file holds fields of the recipe's options, of DPConfig and of TrainingArguments. Settings of single methods are under
`by_method`, so that one file serves a whole table:

    method: rgp
    learning_rate: 1.0e-3
    by_method:
      bk: {learning_rate: 5.0e-4}

    python recipes/glue.py --config recipes/configs/sst2_minilm.yaml --method bk --target_epsilon 3
"""

import argparse
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_private import DPConfig
from hf_private.config import BUDGETS

# The DPConfig fields of each method. Files and the command line change single fields.
METHODS: dict[str, dict[str, Any]] = {
    "np": {},  # not private: all weights, no clipping, no noise
    "bk": {},  # DP-SGD on all weights, by book-keeping
    "lora": {},  # DP-SGD on the adapters of a PEFT model
    "rgp": {"carriers": {"r": 8, "source": "history"}},  # the RGP paper's carriers
    "rgp-weight": {"carriers": {"r": 8, "source": "weight"}},  # what the LSG paper calls RGP: LSG without sparsity
    "rgp-momentum": {"carriers": {"r": 8, "source": "momentum"}},
    "rgp-public": {"carriers": {"r": 8, "source": "public"}},
    "rgp-random": {"carriers": {"r": 8, "source": "random"}},
    "lsg": {"carriers": {"r": 8, "sparsity": 0.3}},
    "sparse": {"carriers": {"r": None, "sparsity": 0.3}},
    "powersgd": {},  # a Method of its own, recipes/powersgd.py
    "gep": {"anchors": {"residual": True}},
    "b-gep": {"anchors": {"residual": False}},
}
PUBLIC = ("rgp-public", "gep", "b-gep")  # methods that read public records
NESTED = ("carriers", "anchors")


@dataclass
class RecipeOptions:
    """Options of all recipes, in addition to DPConfig and TrainingArguments."""

    method: str = field(
        default="bk", metadata={"help": "Gradient method, or np: not private.", "choices": list(METHODS)}
    )
    nonprivate: bool = field(
        default=False, metadata={"help": "Run the method without clipping and noise. NOT PRIVATE; for comparison."}
    )
    rank: int = field(default=8, metadata={"help": "Rank of LoRA and PowerSGD. (For carriers: `r`.)"})
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules that LoRA trains at full rank. (For carriers: `modules_to_save`.)"}
    )
    frozen_modules: str | None = field(
        default=None,
        metadata={
            "help": "Regular expression for full parameter names: matching parameters are frozen with every method."
            " Carriers need it too, as `exclude_modules`."
        },
    )
    data_dir: str | None = field(
        default=None, metadata={"help": "Folder with local files. Default: $HF_PRIVATE_DATA, then the Hub."}
    )
    anchor_data: str | None = field(
        default=None,
        metadata={"help": "Public records (GEP, rgp-public): local file. Default: generated records."},
    )
    max_train_records: int | None = field(default=None, metadata={"help": "Train on the first N records only."})
    max_eval_records: int | None = field(default=None, metadata={"help": "Evaluate on the first N records only."})
    holdout: int = field(
        default=0,
        metadata={
            "help": "Evaluate on N records, drawn from the training data with a fixed seed, instead of the dev set:"
            " to choose hyper-parameters without using the dev set."
        },
    )


def parse(
    options_class: type[RecipeOptions], description: str | None, argv: list[str] | None = None
) -> tuple[Any, DPConfig, TrainingArguments]:
    """The recipe's options, DPConfig and TrainingArguments, from `--config FILE` and the command line.

    Precedence, lowest first: METHODS, the file, its `by_method`, the command line. `carriers` and `anchors` are merged
    field by field. `--target_epsilon`, `--target_risk` and `--noise_multiplier` replace the file's budget.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("config", "method", *NESTED, *BUDGETS):
        early.add_argument(f"--{name}")
    early.add_argument("--nonprivate", nargs="?", const="true", default=None)
    given, rest = early.parse_known_args(argv)

    parser = HfArgumentParser(
        (options_class, DPConfig, TrainingArguments),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="YAML file with any of these settings")
    settings = read_settings(given.config, given.method, {action.dest for action in parser._actions})
    for name in NESTED:
        asked = _object(name, getattr(given, name))
        preset = METHODS[settings["method"]].get(name)
        if asked and preset is None:
            raise ValueError(f"`--{name}` must come with a method that uses them, got --method {settings['method']}.")
        settings[name] = preset and {**preset, **(settings.get(name) or {}), **asked}
    budget = {name: float(getattr(given, name)) for name in BUDGETS if getattr(given, name) is not None}
    if budget:
        settings |= {**dict.fromkeys(BUDGETS), **budget}
    nonprivate = given.nonprivate if given.nonprivate is not None else settings.get("nonprivate", False)
    if settings["method"] == "np" or str(nonprivate).lower() in ("true", "1", "yes"):
        settings |= {**dict.fromkeys(BUDGETS), "nonprivate": True, "noise_multiplier": 0.0, "clip_norm": math.inf}
    parser.set_defaults(**settings)
    if all(settings.get(name) is None for name in BUDGETS) and not {"-h", "--help"} & set(rest):
        raise ValueError("`--target_epsilon` must be given, on the command line or in a file (`--config`).")
    options, dp_config, args, _ = parser.parse_args_into_dataclasses(rest, look_for_args_file=False)
    if "output_dir" not in settings and not any(word.split("=")[0] == "--output_dir" for word in rest):
        raise ValueError("`--output_dir` must be given: all runs in one folder share its ledger and budget.")
    return options, dp_config, args


def _object(name: str, text: str | None) -> dict[str, Any]:
    """The fields of `--carriers` or `--anchors`, given as a JSON object."""
    try:
        return dict(json.loads(text or "{}"))
    except (ValueError, TypeError) as error:
        example = {"carriers": '{"r": 4}', "anchors": '{"k": 100}'}[name]
        raise ValueError(f"`--{name}` must be a JSON object such as '{example}', got {text!r}.") from error


def read_settings(path: str | None, method: str | None, known: set[str]) -> dict[str, Any]:
    """The settings of a file for one method (by default the file's); an unknown name is an error."""
    try:
        settings = yaml.safe_load(Path(path).read_text()) if path else {}
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"`--config` = {path!r} cannot be read as YAML: {error}") from error
    by_method = settings.pop("by_method", {})
    method = method or settings.get("method") or "bk"
    for name in (method, *by_method):
        if name not in METHODS:
            where = "`method`" if name == method else f"{path}: names under `by_method`"
            raise ValueError(f"{where} must be one of {', '.join(METHODS)}, got {name!r}.")
    own = by_method.get(method) or {}
    unknown = sorted((settings.keys() | own.keys()) - known)
    if unknown:
        raise ValueError(f"{path}: there is no setting `{unknown[0]}`. `--help` lists all settings.")
    for name in NESTED:
        if name in own:
            own = own | {name: {**(settings.get(name) or {}), **own[name]}}
    return settings | own | {"method": method}
