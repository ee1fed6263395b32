"""What a user may ask for: `DPConfig`, and the list of Trainer settings that a private run has to refuse."""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, TrainingArguments

from . import validate
from .clipping import MODES

ACCOUNTANTS = ("prv", "pld", "rdp")
NOISES = ("secure", "fast")


def _help(default: Any, text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text, **metadata})


@dataclass
class DPConfig:
    """Privacy settings of a `DPTrainer`: say how much may be spent (`target_epsilon`) or how much noise is added
    (`noise_multiplier`), never both. Works with `HfArgumentParser`, and goes to JSON and back.

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
        None, "Noise standard deviation divided by the clip norm, instead of `target_epsilon`. 0: not private."
    )
    clip_norm: float = _help(
        1.0, "Largest L2 norm that one record's gradient keeps. 'inf' only with `noise_multiplier=0` (not private)."
    )
    clipping: str = _help(
        "flat",
        "'flat': the whole gradient; 'automatic': normalise it, which spares tuning the clip norm; 'per-layer': each"
        " layer by itself.",
        choices=list(MODES),
    )
    expected_batch_size: int | None = _help(
        None,
        "Mean number of records in a Poisson batch, over all devices. Large is good: as large as you can afford."
        " Default: per_device_train_batch_size * gradient_accumulation_steps * number of devices.",
    )
    records_per_unit: int = _help(
        1, "Largest number of records that one person contributed; epsilon is then per person, not per record."
    )
    accountant: str = _help(
        "prv",
        "Which accountant enforces the budget. The card claims the larger of PRV and PLD: with 'pld' it may be a"
        " hundredth above.",
        choices=list(ACCOUNTANTS),
    )
    carriers: dict | str | None = _help(
        None, "Low-rank gradient carriers (RGP, LSG): a `CarrierConfig`, a dict or a JSON string."
    )
    anchors: dict | str | None = _help(
        None, "Gradient embedding in a public subspace (GEP): an `AnchorConfig`, a dict or a JSON string."
    )
    noise: str = _help(
        "secure", "'secure': AES keystream; 'fast': torch's generator, not cryptographic.", choices=list(NOISES)
    )
    log_nonprivate: bool = _help(
        False, "Log the training loss, which is not private, as `nonprivate_loss`. The card then says so."
    )
    micro_batch_tokens: int | None = _help(
        None, "Upper bound on rows * longest row of a micro-batch. Changes speed and memory only."
    )
    disjoint_data: bool = _help(
        False,
        "State that the base model was privately trained on other people's records. Its spending is then not added"
        " to this run's, and the card says so.",
    )

    def __post_init__(self) -> None:
        for name in ("clip_norm", "target_epsilon"):  # JSON has no infinity
            if getattr(self, name) == "inf":
                setattr(self, name, math.inf)
        self._check_values()
        self._check_combinations()
        self.carriers = _nested("CarrierConfig", "carriers", self.carriers)
        self.anchors = _nested("AnchorConfig", "anchors", self.anchors)

    def _check_values(self) -> None:
        if self.target_epsilon is not None:
            validate.positive(target_epsilon=self.target_epsilon)
        if self.noise_multiplier is not None:
            validate.non_negative(noise_multiplier=self.noise_multiplier)
            if math.isinf(self.noise_multiplier):
                raise ValueError("`noise_multiplier` must be finite, got inf.")
        if self.expected_batch_size is not None:
            validate.whole(1, expected_batch_size=self.expected_batch_size)
        if self.micro_batch_tokens is not None:
            validate.whole(1, micro_batch_tokens=self.micro_batch_tokens)
        validate.probability(target_delta=self.target_delta)
        validate.positive(clip_norm=self.clip_norm)
        validate.whole(1, records_per_unit=self.records_per_unit)
        validate.one_of(MODES, clipping=self.clipping)
        validate.one_of(ACCOUNTANTS, accountant=self.accountant)
        validate.one_of(NOISES, noise=self.noise)
        validate.one_of((True, False), log_nonprivate=self.log_nonprivate, disjoint_data=self.disjoint_data)

    def _check_combinations(self) -> None:
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise ValueError(
                "One of `target_epsilon` or `noise_multiplier` must be set, got neither. Say how much privacy may be"
                " spent, for instance target_epsilon=8.0, and the noise is calibrated for you."
            )
        if self.target_epsilon is not None and self.noise_multiplier is not None:
            raise ValueError(
                f"Only one of `target_epsilon` and `noise_multiplier` may be set, got {self.target_epsilon!r} and"
                f" {self.noise_multiplier!r}. A target fixes the noise; `hf-private calibrate` shows it."
            )
        if math.isinf(self.clip_norm) and self.noise_multiplier != 0:
            raise ValueError(
                "`clip_norm` must be finite, got inf. Noise cannot cover an unbounded gradient; only the non-private"
                " twin, noise_multiplier=0, runs without clipping."
            )
        if self.carriers is not None and self.anchors is not None:
            raise ValueError("Only one of `carriers` and `anchors` may be set, got both. Choose one method.")

    @property
    def is_private(self) -> bool:
        """False for the non-private twin, which adds no noise."""
        return self.noise_multiplier != 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in ("carriers", "anchors"):
            if values[name] is not None:
                values[name] = values[name].to_dict()
        return {name: "inf" if value == math.inf else value for name, value in values.items()}

    def to_json_string(self) -> str:
        """The settings as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DPConfig":
        """The settings that `to_dict` wrote; an unknown name is an error."""
        unknown = sorted(set(values) - {item.name for item in fields(cls)})
        if unknown:
            raise ValueError(
                f"DPConfig has no field `{unknown[0]}`. Fields: {', '.join(f.name for f in fields(cls))}."
            )
        return cls(**values)


def _nested(class_name: str, name: str, value: Any) -> Any:
    """`carriers` and `anchors` as the config object that they stand for."""
    if value is None:
        return None
    from . import targets  # only who asks for a method pays for its import

    wanted = getattr(targets, class_name)
    if isinstance(value, wanted):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"`{name}` must be a {class_name}, a dict or JSON, got {value!r}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` must be a {class_name}, a dict or JSON, got {value!r}.")
    try:
        return wanted(**value)
    except TypeError as error:
        raise ValueError(f"`{name}` must name fields of {class_name}: {error}.") from error


class Refusal(NamedTuple):
    """A Trainer setting that would break or void the guarantee."""

    name: str
    applies: Callable[[TrainingArguments], bool]
    reason: str
    remedy: str


def _parallel(args: TrainingArguments) -> bool:
    plan = args.parallelism_config
    return plan is not None and max(plan.tp_size, plan.cp_size, plan.sp_size) > 1


REFUSED_ARGS = (
    Refusal("fp16", lambda a: a.fp16, "its loss scaler skips steps when private gradients overflow", "Use bf16=True."),
    Refusal(
        "mixed_precision",  # of a launcher
        lambda a: not a.fp16 and a.mixed_precision not in ("no", "bf16"),
        "it scales the loss, and skips steps when private gradients overflow",
        "Use bf16.",
    ),
    Refusal(
        "gradient_accumulation_steps",  # the loop's own, which DPTrainer sets to 1
        lambda a: a.gradient_accumulation_steps != 1,
        "each step of the loop is a whole private step, and all but the last would be thrown away",
        "Set it before DPTrainer is built, or set `expected_batch_size` of DPConfig.",
    ),
    Refusal(
        "torch_compile", lambda a: a.torch_compile, "per-record gradients are not traced", "Set torch_compile=False."
    ),
    Refusal(
        "use_liger_kernel",
        lambda a: a.use_liger_kernel,
        "its fused loss computes weight gradients of the whole batch in the forward pass",
        "Set use_liger_kernel=False.",
    ),
    Refusal("deepspeed", lambda a: bool(a.deepspeed), "it owns backward and the gradients", "Use DDP or FSDP2."),
    Refusal(
        "fsdp",
        lambda a: bool(a.fsdp) and int((a.fsdp_config or {}).get("version", 2)) == 1,
        "FSDP1 flattens parameters, so that layers cannot be told apart",
        "Use FSDP2: fsdp_config={'version': 2}.",
    ),
    Refusal("parallelism_config", _parallel, "records are split over devices", "Use data parallelism only."),
    Refusal(
        "n_gpu",
        lambda a: a.n_gpu > 1,
        "nn.DataParallel splits batches behind the accountant's back",
        "Launch one process per GPU (torchrun, accelerate launch), or show one GPU only.",
    ),
    Refusal(
        "auto_find_batch_size",
        lambda a: a.auto_find_batch_size,
        "it restarts training in the middle",
        "Lower per_device_train_batch_size; with a fixed `expected_batch_size` it only changes speed and memory.",
    ),
    Refusal(
        "skip_memory_metrics",
        lambda a: not a.skip_memory_metrics,
        "it logs the peak of memory, which the longest private record decides",
        "Leave it at True.",
    ),
    Refusal(
        "train_sampling_strategy",
        lambda a: a.train_sampling_strategy in ("group_by_length", "batch_rebalance"),
        "the accountant's amplification holds for Poisson batches only",
        "Leave it at 'random'; micro-batches are sorted by length anyway.",
    ),
    Refusal(
        "max_grad_norm",
        lambda a: a.max_grad_norm not in (None, 0, 1.0),
        "gradients are clipped per record, before the noise, by `DPConfig.clip_norm`",
        "Leave it at its default and set `clip_norm` of DPConfig.",
    ),
    Refusal(
        "neftune_noise_alpha",
        lambda a: a.neftune_noise_alpha is not None,
        "its scale depends on the longest record of the batch, which couples records",
        "Leave it unset.",
    ),
    Refusal(
        "optim",
        lambda a: "lomo" in a.optim or "layerwise" in a.optim,
        "it updates weights during backward, before noise is added",
        "Use any optimizer that steps after backward, such as 'adamw_torch'.",
    ),
    Refusal(
        "hub_strategy",
        lambda a: a.hub_strategy in ("checkpoint", "all_checkpoints"),
        "it uploads whole checkpoint folders, local files included",
        "Use 'every_save' or 'end'.",
    ),
    Refusal(
        "debug",
        lambda a: "underflow_overflow" in a.debug,
        "it prints activations of private records",
        "Leave it unset.",
    ),
)


def _launched() -> Iterator[str]:
    """What `accelerate launch` has set up without TrainingArguments knowing of it."""

    def on(name: str) -> bool:
        return os.environ.get(name, "").lower() in ("1", "true", "yes")

    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"):
        if on(name):
            yield f"`{name}` cannot be combined with privacy: it owns backward and the gradients. Launch DDP or FSDP2."
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        yield (
            "`ACCELERATE_DYNAMO_BACKEND` cannot be combined with privacy: per-record gradients are not traced. Launch"
            " with dynamo_backend: 'no'."
        )
    if on("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "1") != "2":
        yield (
            "`fsdp_version` = 1 cannot be combined with privacy: FSDP1 flattens parameters, so that layers cannot be"
            " told apart. Launch with fsdp_version: 2."
        )


def refusals(
    args: TrainingArguments,
    *,
    train_dataset: Any = None,
    data_collator: Any = None,
    compute_loss_func: Any = None,
    custom_compute_loss: bool = False,
) -> Iterator[str]:
    """Why this Trainer cannot run privately: one line for each setting, with its reason and a remedy."""
    for name, applies, reason, remedy in REFUSED_ARGS:
        if applies(args):
            yield f"`{name}` = {getattr(args, name)!r} cannot be combined with privacy: {reason}. {remedy}"
    yield from _launched()
    if compute_loss_func is not None or custom_compute_loss:
        yield (
            f"`{'compute_loss_func' if compute_loss_func is not None else 'compute_loss'}` cannot be combined with"
            " privacy: a loss of the whole batch couples its records. Pass"
            " `per_sample_loss=fn(outputs, labels) -> (B,)` to DPTrainer, one loss for each record."
        )
    stream = isinstance(train_dataset, IterableDataset) or not hasattr(train_dataset, "__len__")
    if train_dataset is not None and stream:
        yield (
            f"`train_dataset` must have a length and random access, got {type(train_dataset).__name__}: a stream"
            " cannot be Poisson sampled. Load it as a map-style dataset (streaming=False)."
        )
    if isinstance(data_collator, DataCollatorWithFlattening) or getattr(data_collator, "padding_free", False):
        yield (
            f"`data_collator` = {type(data_collator).__name__} cannot be combined with privacy: it packs several"
            " records into one row, so that their gradients cannot be told apart. Use a collator that pads, such as"
            " DataCollatorWithPadding."
        )
    tokenizer = getattr(data_collator, "tokenizer", None)
    if getattr(tokenizer, "padding_side", "right") == "left":
        yield (
            "`padding_side` = 'left' cannot be combined with private training: left padding shifts a record's"
            " positions by the length of its neighbours. Give `data_collator` a tokenizer with padding_side='right';"
            " the one that you use for generation may keep 'left'."
        )
