"""What must be true of a run before its update is trusted: of its data, on all ranks, its optimizer, its gradients."""

from collections.abc import Mapping
from typing import Any

from datasets.fingerprint import Hasher
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import TrainingArguments, set_seed
from transformers.utils import logging

from hf_private.distributed.ranks import Ranks
from hf_private.gradients.bookkeeper import trainable

logger = logging.get_logger(__name__)

SAMPLES = 64  # records that are compared between ranks
SHARED = (  # settings by which ranks would come to different weights, or wait for each other for ever
    *("seed", "optim", "learning_rate", "weight_decay", "lr_scheduler_type", "warmup_steps", "max_steps"),
    *("num_train_epochs", "eval_strategy", "eval_steps", "save_strategy", "save_steps", "load_best_model_at_end"),
)


def check_ranks(ranks: Ranks, args: TrainingArguments) -> None:
    """The ranks that share out the draw must be those that add up the sums, and be set up alike."""
    if (ranks.rank, ranks.world_size) != (args.process_index, args.world_size):
        raise ValueError(
            f"`world_size` must be that of torch's process group, got {args.world_size} in TrainingArguments and"
            f" {ranks.world_size} there: a record would be taken by several ranks. Start the script with torchrun or"
            " `accelerate launch`, which tell both."
        )
    ranks.assert_equal(**{name: getattr(args, name) for name in SHARED})


def check_size(expected_batch_size: int, target_delta: float, num_records: int) -> None:
    """The batch must fit into the data, and delta should mean something for so many records."""
    if expected_batch_size > num_records:
        raise ValueError(
            f"`expected_batch_size` must be at most the number of records ({num_records}), got"
            f" {expected_batch_size}. Lower it, or gradient_accumulation_steps and the batch per device."
        )
    if target_delta >= 1 / num_records:
        logger.warning(
            f"`target_delta` = {target_delta} is not below 1 / {num_records} records: publishing one record at random"
            " would satisfy it. Choose it well below."
        )


def check_evaluation(evaluation: Any, training: Any) -> None:
    """No evaluation set may be the training set, as far as that can be seen: its metrics are logged without noise."""
    mark = getattr(training, "_fingerprint", None)  # of a datasets.Dataset: equal for equal contents and history
    for dataset in evaluation.values() if isinstance(evaluation, dict) else (evaluation,):
        same = dataset is training or (mark is not None and getattr(dataset, "_fingerprint", None) == mark)
        if dataset is not None and same:
            raise ValueError(
                "`eval_dataset` must not be the training set, got the same records: their loss would be logged without"
                " noise. Evaluate on other records, or set `log_nonprivate=True`, which makes the run NOT PRIVATE."
            )


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """The optimizer must update the very Parameter objects whose gradients are made private."""
    engine = {id(p): name for name, p in trainable(model).items()}
    held = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if missing := [name for key, name in engine.items() if key not in held]:
        raise ValueError(
            f"`optimizers` must hold every trainable parameter of the model, got one without `{missing[0]}`"
            f" ({len(missing)} in all). Build it from trainer.model.parameters(), or freeze them."
        )
    if strangers := held.keys() - engine.keys():
        raise ValueError(
            f"`optimizers` must hold parameters of the model only, got {len(strangers)} others. It was built for"
            " another copy of the model: build it from trainer.model.parameters()."
        )


def check_parameters(model: nn.Module, engine: Mapping[str, nn.Parameter]) -> None:
    """What is trainable must stay so in a run: the very parameters that the engine clips and adds noise to."""
    now = trainable(model)
    if odd := [name for name in {**engine, **now} if now.get(name) is not engine.get(name)]:
        what = "replaced" if odd[0] in now and odd[0] in engine else "unfrozen" if odd[0] in now else "frozen"
        raise RuntimeError(
            f"`{odd[0]}` must stay as it was when the run began, got {what} ({len(odd)} such parameters). The engine,"
            " the optimizer and the noise were made for the others. For a phase with other parameters build a new"
            " DPTrainer on the same output_dir: its spending goes on."
        )


def check_gradients(model: nn.Module, noised: bool) -> None:
    """Every trainable parameter must have got a gradient, finite and, if it is `noised`, not zero throughout."""
    for name, p in trainable(model).items():
        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad  # this rank's rows, maybe none
        ok = grad is not None and bool(grad.isfinite().all())
        if not ok or (noised and grad.numel() and not grad.any()):
            got = "none" if grad is None else "zero" if ok else "one that is not finite"
            raise RuntimeError(f"`{name}` must have a finite, non-zero gradient after a private step, got {got}.")


def order_of(dataset: Any) -> tuple[int, str | None] | None:
    """Number of records, and a hash of some, by which ranks see that they hold the same records in the same order.

    A draw is a set of positions, shared out among the ranks: with another order on each, one record could be in it
    twice. A dataset may augment what it gives, so the global generators are seeded first, to be seeded anew before
    training. The hash is None for one that draws from generators of its own.

    >>> order_of(["a", "b"]) == order_of(["b", "a"])
    False
    """
    if dataset is None:
        return None
    size = len(dataset)
    plain = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
    hashes = set()
    for _ in range(2):
        set_seed(0)
        hashes.add(Hasher.hash([plain[index] for index in range(0, size, max(1, size // SAMPLES))]))
    return size, hashes.pop() if len(hashes) == 1 else None


def check_order(ranks: Ranks, dataset: Any) -> None:
    """The ranks must hold the same records in the same order, and it must be possible to see that."""
    if ranks.world_size == 1:
        return
    order = order_of(dataset)
    ranks.assert_equal(train_dataset=order)
    if order is not None and order[1] is None:
        raise ValueError(
            f"`train_dataset` ({type(dataset).__name__}) must give equal records for equal seeds, got others each"
            " time: it cannot be seen whether the ranks hold the same records, and one on two of them would count"
            " twice. Augment in the data collator, or by the global generators of random, numpy or torch."
        )
