"""DPConfig: what a user may ask of a private run."""

import difflib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from hf_private import _validate as validate
from hf_private.accounting.accountants import ACCOUNTANTS
from hf_private.mechanism.clipping import MODES
from hf_private.mechanism.noise import NOISE_KINDS
from hf_private.mechanism.units import SAMPLINGS
from hf_private.spending.stated_unit import draws_units, group_size

TRAIN_ONLY = ("bias", "head", "upper-half", "lora-B")  # `methods.presets`
METHODS = ("carriers", "anchors")  # fields with the config of a gradient method: `methods.registry.CONFIGS`
BUDGETS = ("target_epsilon", "target_risk", "noise_multiplier")  # exactly one of them is set

if TYPE_CHECKING:
    from hf_private.methods.targeting import TargetConfig


COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")  # what a card may print

# What other libraries call a field.
ALIASES = {
    "epsilon": "target_epsilon",
    "delta": "target_delta",
    "sigma": "noise_multiplier",
    "max_grad_norm": "clip_norm",
    "max_per_sample_grad_norm": "clip_norm",
    "batch_size": "expected_batch_size",
    "user_column": "unit_column",
}


def _help(default: Any, text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text, **metadata})


@dataclass
class DPConfig:
    """Privacy settings of a `DPTrainer`: say how much may be spent (`target_epsilon`, or `target_risk`) or how much
    noise is added (`noise_multiplier`), exactly one of them. Works with `HfArgumentParser`, and goes to JSON and back.

    >>> config = DPConfig(target_epsilon=8.0, target_delta=1e-5, clip_norm=1.0, expected_batch_size=1024)
    >>> DPConfig.from_dict(config.to_dict()) == config
    True
    >>> DPConfig(target_epsilon=8.0, clip_norm=-1)
    Traceback (most recent call last):
        ...
    ValueError: `clip_norm` must be > 0, got -1.
    """

    target_epsilon: float | None = _help(
        None, "Budget: the noise is calibrated so that the whole run, and what was spent before it, stays below."
    )
    target_delta: float = _help(1e-5, "Delta of the guarantee. Choose it well below 1 / (number of records).")
    noise_multiplier: float | None = _help(
        None, "Noise standard deviation divided by the clip norm, instead of a budget. 0: not private."
    )
    target_risk: float | None = _help(
        None,
        "Budget as the largest advantage of any attacker who guesses membership (true minus false positive rate: 0 is"
        " chance, 1 is certainty), instead of `target_epsilon`. 0.1: a guess at even odds is right 55 % of the time.",
    )
    clip_norm: float = _help(
        1.0, "Largest L2 norm that one record's gradient keeps. 'inf' only with `noise_multiplier=0` (not private)."
    )
    clipping: str = _help(
        "flat",
        "'flat': the whole gradient; 'automatic': normalise it, which spares tuning the clip norm; 'global': drop what"
        " is too long; 'per-layer', 'per-block', 'automatic-per-layer': each layer or numbered block by itself.",
        choices=list(MODES),
    )
    gamma: float = _help(0.01, "Stabiliser of automatic clipping, factor C / (norm + gamma): AUTO-S. 0 is AUTO-V.")
    expected_batch_size: int | None = _help(
        None,
        "Mean number of records (of units, if `unit_sampling` draws those) in a Poisson batch, over all devices."
        " Choose it as large as you can afford."
        " Default: per_device_train_batch_size * gradient_accumulation_steps * number of devices.",
    )
    unit_column: str | None = _help(
        None,
        "Column of the dataset that names who a record belongs to (patient, customer, conversation). Epsilon is then"
        " per unit, whatever the number of its records. The column does not reach the model.",
    )
    records_per_unit: int = _help(
        1,
        "With `unit_column`: the most records of one unit that count in a step, chosen anew each time. Without: the"
        " largest number of records that one person contributed; epsilon is then per person, not per record.",
    )
    unit_sampling: str = _help(
        "units",
        "With `unit_column`: 'units' draws units and clips the mean gradient of each; 'records' draws records, clips"
        " each, and accounts for a group of `records_per_unit`.",
        choices=list(SAMPLINGS),
    )
    disjoint_units: bool = _help(
        False,
        "State that no unit is in both the training and the evaluation data: equal ids there mean different people.",
    )
    augmentations: int = _help(
        1,
        "How often each drawn record is fetched, through the dataset's own random transform. The mean gradient is"
        " clipped (De et al. 2022). Costs as much computing, and no privacy.",
    )
    accountant: str = _help(
        "prv",
        "Which accountant enforces the budget. The card claims the larger of PRV and PLD: with 'pld' it may be a"
        " hundredth above.",
        choices=list(ACCOUNTANTS),
    )
    train_only: str | None = _help(
        None,
        "'bias': train all biases and the task head, and freeze the rest (BiTFiT); 'head': the task head;"
        " 'upper-half': the upper half of the layers and the head; 'lora-B': of a LoRA, all but A (FFA-LoRA). Default:"
        " what is trainable.",
        choices=list(TRAIN_ONLY),
    )
    carriers: dict | str | None = _help(
        None, "Low-rank gradient carriers (RGP, LSG): a `CarrierConfig`, a dict or a JSON string."
    )
    anchors: dict | str | None = _help(
        None, "Gradient embedding in a public subspace (GEP): an `AnchorConfig`, a dict or a JSON string."
    )
    noise: str = _help(
        "secure", "'secure': AES keystream; 'fast': torch's generator, not cryptographic.", choices=list(NOISE_KINDS)
    )
    log_nonprivate: bool = _help(
        False, "Log the training loss, which is not private, as `nonprivate_loss`. The card then says so."
    )
    micro_batch_tokens: int | None = _help(
        None, "Upper bound on rows * longest row of a micro-batch. Changes speed and memory only."
    )
    check_dataset: bool = _help(
        True,
        "Read all records before the first step is charged, and check lengths, labels and token ids. Set it to False"
        " where reading them takes too long.",
    )
    disjoint_data: bool = _help(
        False,
        "State that the base model was privately trained on other people's records. Its spending is then not added"
        " to this run's, and the card says so.",
    )

    def __new__(cls, *args: Any, **values: Any) -> "DPConfig":
        """Refuse unknown fields with a suggestion, before the dataclass's own `__init__` refuses them without."""
        if unknown := cls._unknown(values):
            raise TypeError(unknown)
        return super().__new__(cls)

    @classmethod
    def _unknown(cls, values: Iterable[str]) -> str | None:
        names = [item.name for item in fields(cls)]
        for name in sorted(set(values) - set(names)):
            meant = [ALIASES[name]] if name in ALIASES else difflib.get_close_matches(name, names, 1)
            hint = f": did you mean `{meant[0]}`?" if meant else "."
            return f"DPConfig has no field `{name}`{hint} Fields: {', '.join(names)}."
        return None

    def __post_init__(self) -> None:
        for name in ("clip_norm", "target_epsilon"):  # JSON has no infinity
            if getattr(self, name) == "inf":
                setattr(self, name, math.inf)
        self._check_values()
        self._check_combinations()
        for name in METHODS:
            value = getattr(self, name)
            if value is not None:
                from hf_private.methods.registry import parse_config  # only who asks for a method pays for its import

                setattr(self, name, parse_config(name, value))

    def _check_values(self) -> None:
        if self.target_epsilon is not None:
            validate.positive(target_epsilon=self.target_epsilon)
        if self.target_risk is not None:
            validate.probability(target_risk=self.target_risk)
        if self.noise_multiplier is not None:
            validate.non_negative(noise_multiplier=self.noise_multiplier)
            if math.isinf(self.noise_multiplier):
                raise ValueError("`noise_multiplier` must be finite, got inf.")
        if self.expected_batch_size is not None:
            validate.integer_at_least(1, expected_batch_size=self.expected_batch_size)
        if self.micro_batch_tokens is not None:
            validate.integer_at_least(1, micro_batch_tokens=self.micro_batch_tokens)
        validate.probability(target_delta=self.target_delta)
        validate.positive(clip_norm=self.clip_norm)
        validate.non_negative(gamma=self.gamma)
        validate.one_of((None, *TRAIN_ONLY), train_only=self.train_only)
        validate.integer_at_least(1, records_per_unit=self.records_per_unit, augmentations=self.augmentations)
        validate.one_of(MODES, clipping=self.clipping)
        validate.one_of(ACCOUNTANTS, accountant=self.accountant)
        validate.one_of(NOISE_KINDS, noise=self.noise)
        validate.one_of(SAMPLINGS, unit_sampling=self.unit_sampling)
        validate.one_of(
            (True, False),
            log_nonprivate=self.log_nonprivate,
            check_dataset=self.check_dataset,
            disjoint_data=self.disjoint_data,
            disjoint_units=self.disjoint_units,
        )
        if self.unit_column is not None and not COLUMN.fullmatch(str(self.unit_column)):
            raise ValueError(
                f"`unit_column` must be a name of letters, digits, '_', '.' and '-', because the card prints it, got"
                f" {self.unit_column!r}. Rename the column."
            )

    def _check_combinations(self) -> None:
        given = {name: getattr(self, name) for name in BUDGETS if getattr(self, name) is not None}
        if not given:
            raise ValueError(
                "One of `target_epsilon`, `target_risk` or `noise_multiplier` must be set, got none. Say how much"
                " privacy may be spent, for instance target_epsilon=8.0, and the noise is calibrated for you."
            )
        if len(given) > 1:
            names = " and ".join(f"`{name}` = {value!r}" for name, value in given.items())
            raise ValueError(
                "Only one of `target_epsilon`, `target_risk` and `noise_multiplier` may be set, got"
                f" {names}. A target fixes the noise; `hf-private calibrate` shows it."
            )
        if math.isinf(self.clip_norm) and self.noise_multiplier != 0:
            raise ValueError(
                "`clip_norm` must be finite, got inf. Noise cannot cover an unbounded gradient; only the non-private"
                " twin, noise_multiplier=0, runs without clipping."
            )
        if self.unit_column is None and (self.unit_sampling != "units" or self.disjoint_units):
            name = "disjoint_units" if self.disjoint_units else "unit_sampling"
            raise ValueError(
                f"`{name}` must be left at its default without `unit_column`, got {getattr(self, name)!r}. Name the"
                " column that says who each record belongs to."
            )
        if sum(getattr(self, name) is not None for name in METHODS) > 1:
            raise ValueError("Only one of `carriers` and `anchors` may be set, got both. Choose one method.")
        if self.train_only is not None and self.carriers is not None:
            raise ValueError(
                f"`train_only` must be None with `carriers`, got {self.train_only!r}: `target_modules` and"
                " `exclude_modules` of the carriers say what is trained. Leave out one of the two."
            )

    @property
    def method_config(self) -> "TargetConfig | None":
        """The config of the gradient method; None is BK."""
        parsed: Any = next((getattr(self, name) for name in METHODS if getattr(self, name) is not None), None)
        return parsed

    @property
    def is_private(self) -> bool:
        """False for the non-private twin, which adds no noise."""
        return self.noise_multiplier != 0

    @property
    def group_size(self) -> int:
        """Records of one unit that the accountant counts as a group: 1 where units are drawn and clipped as one."""
        return group_size(vars(self))

    @property
    def draws_units(self) -> bool:
        """Whether `expected_batch_size` counts units, not records."""
        return draws_units(vars(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in METHODS:
            if values[name] is not None:
                values[name] = values[name].to_dict()
        return {name: "inf" if value == math.inf else value for name, value in values.items()}

    def to_json_string(self) -> str:
        """The settings as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DPConfig":
        """The settings that `to_dict` wrote; an unknown name is an error."""
        if unknown := cls._unknown(values):
            raise ValueError(unknown)
        return cls(**values)
