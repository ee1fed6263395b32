"""Trainer settings that a private run refuses, each with its reason and a remedy."""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, Seq2SeqTrainer, Trainer, TrainingArguments


class Refusal(NamedTuple):
    """A Trainer setting that would break or void the guarantee."""

    name: str
    applies: Callable[[Any], bool]  # of TrainingArguments, or a subclass of them
    reason: str
    remedy: str


def _parallel(args: TrainingArguments) -> bool:
    plan = args.parallelism_config
    return plan is not None and any((size or 1) > 1 for size in (plan.tp_size, plan.cp_size, plan.sp_size))


def _fsdp1(args: TrainingArguments) -> bool:
    settings = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    return bool(args.fsdp) and int(settings.get("version", 2)) == 1


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
        "each step of the loop is a whole private step, and all but the last would be discarded",
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
        _fsdp1,
        "FSDP1 flattens parameters, so gradients of single layers are not available",
        "Use FSDP2: fsdp_config={'version': 2}.",
    ),
    Refusal(
        "use_cpu",
        lambda a: not a.use_cpu and a.device.type == "mps",
        "Apple's GPUs have no float64, in which norms and noise are computed",
        "Set use_cpu=True.",
    ),
    Refusal("parallelism_config", _parallel, "records are split over devices", "Use data parallelism only."),
    Refusal(
        "n_gpu",
        lambda a: a.n_gpu > 1,
        "nn.DataParallel splits each batch over devices, and gradients of single records are lost",
        "Launch one process per GPU (torchrun, accelerate launch), or make one GPU visible.",
    ),
    Refusal(
        "auto_find_batch_size",
        lambda a: a.auto_find_batch_size,
        "it restarts training after an error, with the same noise",
        "Lower per_device_train_batch_size; with a fixed `expected_batch_size` it only changes speed and memory.",
    ),
    Refusal(
        "skip_memory_metrics",
        lambda a: not a.skip_memory_metrics,
        "it logs the peak of memory, which depends on the longest private record",
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
        "dataloader_drop_last",
        lambda a: a.dataloader_drop_last,
        "there is no last batch: every step takes a Poisson sample of all records",
        "Leave it at False.",
    ),
    Refusal(
        "packing",  # of TRL, whatever the strategy
        lambda a: bool(getattr(a, "packing", False)),
        "it puts several records into one row, so their gradients cannot be separated",
        "Set packing=False.",
    ),
    Refusal(
        "padding_free",  # of TRL
        lambda a: bool(getattr(a, "padding_free", False)),
        "it puts all records of a batch into one row, so their gradients cannot be separated",
        "Set padding_free=False.",
    ),
    Refusal(
        "num_generations",  # of TRL's online methods
        lambda a: hasattr(a, "num_generations"),
        "online methods (GRPO, RLOO) normalise advantages over a group or the batch, so that one record changes the"
        " weight of others, and use the rollouts of a record in several steps",
        "Use DPSFTTrainer or DPDPOTrainer of hf_private.integrations.trl, on public rollouts.",
    ),
    Refusal(
        "debug",
        lambda a: "underflow_overflow" in a.debug,
        "it prints activations of private records",
        "Leave it unset.",
    ),
)


def _launched() -> Iterator[str]:
    """Settings of `accelerate launch`, which TrainingArguments does not show."""

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
            "`fsdp_version` = 1 cannot be combined with privacy: FSDP1 flattens parameters, so gradients of single"
            " layers are not available. Launch with fsdp_version: 2."
        )


def refused_settings(args: Any, table: Iterable[Refusal]) -> Iterator[str]:
    """Why settings cannot be private: one line for each row of the table that applies."""
    for name, applies, reason, remedy in table:
        if applies(args):
            yield f"`{name}` = {getattr(args, name)!r} cannot be combined with privacy: {reason}. {remedy}"


def refusals(
    args: TrainingArguments,
    *,
    train_dataset: Any = None,
    data_collator: Any = None,
    compute_loss_func: Any = None,
    custom_compute_loss: bool = False,
) -> Iterator[str]:
    """Why this Trainer cannot run privately: one line per setting, with its reason and a remedy."""
    yield from refused_settings(args, REFUSED_ARGS)
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
            " records into one row, so their gradients cannot be separated. Use a collator that pads, such as"
            " DataCollatorWithPadding."
        )
    if getattr(data_collator, "seed", None) is not None:
        yield (
            f"`data_collator.seed` = {data_collator.seed!r} cannot be combined with privacy: whoever knows it knows"
            " which tokens were masked. Leave it unset: the generators are seeded by the operating system."
        )
    tokenizer = getattr(data_collator, "tokenizer", None)
    if getattr(tokenizer, "padding_side", "right") == "left":
        yield (
            "`padding_side` = 'left' cannot be combined with private training: left padding shifts a record's"
            " positions by the length of its neighbours. Give `data_collator` a tokenizer with padding_side='right';"
            " the one that you use for generation may keep 'left'."
        )


def refused_overrides(trainer: Trainer) -> Iterator[str]:
    """Overridden methods of Trainer that a private run would ignore, or that would void the guarantee."""
    if _origin(trainer, "_get_train_sampler") is not Trainer:
        yield (
            "`_get_train_sampler` cannot be overridden with privacy: the accountant's amplification holds for Poisson"
            " batches only. Remove it; set `expected_batch_size` of DPConfig."
        )
    if not _origin(trainer, "get_train_dataloader").__module__.startswith("hf_private."):
        yield (
            "`get_train_dataloader` cannot be overridden with privacy: the accountant's amplification holds for"
            " Poisson batches only. Pass `train_dataset` and `data_collator` instead."
        )
    if getattr(trainer.args, "predict_with_generate", False) and not isinstance(trainer, Seq2SeqTrainer):
        yield (
            "`predict_with_generate` = True has no effect on DPTrainer, which does not generate. Use"
            " `DPSeq2SeqTrainer`, or set it to False."
        )


def _origin(trainer: Trainer, name: str) -> type:
    """The class whose method a trainer calls; the trainer's own class for an attribute of the object."""
    if name in vars(trainer):
        return type(name, (), {"__module__": "object"})
    return next(parent for parent in type(trainer).__mro__ if name in vars(parent))
