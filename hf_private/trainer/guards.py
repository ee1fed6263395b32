"""Checks of a run before and while it trains: its data, its ranks, its optimizer, its gradients."""

from collections.abc import Mapping
from typing import Any

from datasets.fingerprint import Hasher
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainingArguments, set_seed
from transformers.utils import logging

from hf_private.distributed.ranks import Ranks
from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.tensors import local
from hf_private.spending.fingerprints import Probe
from hf_private.tasks.training_records import MOST_NATURAL, TrainingRecords

logger = logging.get_logger(__name__)

TRAINED_ON = (
    "`eval_dataset` must not be the training set, got the same records: their loss would be logged without noise."
    " Evaluate on other records, or set `log_nonprivate=True`, which makes the run NOT PRIVATE."
)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
SAMPLES = 64  # records that are compared between ranks
SHARED = (  # settings that must be equal, or ranks end with different weights or wait for each other for ever
    *("seed", "optim", "learning_rate", "weight_decay", "lr_scheduler_type", "warmup_steps", "max_steps"),
    *("num_train_epochs", "eval_strategy", "eval_steps", "save_strategy", "save_steps", "load_best_model_at_end"),
)


def check_ranks(ranks: Ranks, args: TrainingArguments) -> None:
    """The ranks that split the draw must be those that add up the sums, with the same settings."""
    if (ranks.rank, ranks.world_size) != (args.process_index, args.world_size):
        raise ValueError(
            f"`world_size` must be that of torch's process group, got {args.world_size} in TrainingArguments and"
            f" {ranks.world_size} there: a record would be taken by several ranks. Start the script with torchrun or"
            " `accelerate launch`, which set both."
        )
    ranks.assert_equal(**{name: getattr(args, name) for name in SHARED})


def check_size(expected_batch_size: int, target_delta: float, num_records: int) -> None:
    """The batch must not exceed the data, and delta should be meaningful for this number of records."""
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
            raise ValueError(TRAINED_ON)


def warn_of_copies(recurring: float) -> None:
    """Warn if so large a share of the training records recurs that they may be copies of each other."""
    if recurring > MOST_NATURAL:
        logger.warning_once(
            f"{recurring:.0%} of the training records have the content of another one. If they are copies of"
            " one record, each person is protected less than epsilon says: use every record once, or set"
            " `records_per_unit`."
        )


def check_content(evaluation: Any, known: TrainingRecords) -> None:
    """Refuse an evaluation set that shares more records with the training set than recur within the training set."""
    for dataset in evaluation.values() if isinstance(evaluation, dict) else (evaluation,):
        if dataset is None or isinstance(dataset, str):
            continue
        found = known.overlap(dataset)
        warn_of_copies(found.natural)
        if found.share > found.allowed:
            raise ValueError(
                f"`eval_dataset` must hold other records than the training set, got {found.share:.0%} of its records"
                f" in both (at most {found.allowed:.0%} is explained by the {found.natural:.0%} that occur more than"
                " once in the training set): their loss would be logged without noise. Evaluate on other records, or"
                " set `log_nonprivate=True`, which makes the run NOT PRIVATE."
            )
        if found.share:
            logger.warning_once(
                "Some evaluation records have the same content as a training record, as short texts often do. Their"
                " metrics are logged without noise: remove them if they come from the same people."
            )


class PrivateStepGuard(TrainerCallback):
    """Stops a step whose gradient is not the mechanism's, as of a subclass with its own `training_step`."""

    def __init__(self) -> None:
        self.released = 0  # by the mechanism, since the optimizer's last step
        self._gradients: dict[str, Tensor] = {}
        self._probe: Probe | None = None
        self._seen: Any = None

    def note_release(self, model: nn.Module) -> None:
        """Called when the mechanism has written the gradients."""
        self.released += 1
        self._gradients = {name: p.grad for name, p in trainable(model).items() if p.grad is not None}
        self._probe = Probe(self._gradients)
        self._seen = self._probe.read()

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        """Between `training_step` and the optimizer: there must have been one private release, or no gradient.

        It comes before the user's callbacks, which may change gradients that are private.
        """
        released, self.released = self.released, 0
        noted, self._gradients = self._gradients, {}
        probe, self._probe = self._probe, None
        now = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if released != 1 and now:
            raise RuntimeError(
                f"`training_step` must run the mechanism once for each step, got {released} times. An overriding"
                " method has to call DPTrainer's with `super().training_step(...)`."
            )
        changed = [
            name for name, x in now.items() if noted.get(name.removeprefix("module."), noted.get(name)) is not x
        ]
        if probe is not None and not changed:  # what is written to `.data` leaves the object and its counter
            changed = [name for name in (probe.difference(self._seen),) if name is not None]
        self._seen = None
        if changed:
            raise RuntimeError(
                f"`training_step` must leave the gradients as the mechanism wrote them, got another one for"
                f" `{changed[0]}`: what is added after the noise is not private. A callback may change private"
                " gradients in its `on_pre_optimizer_step`; the loss is `per_sample_loss`."
            )


class ForwardGuard:
    """Notices hooks, forward methods and modules that come to a model after its self-check, and may couple records.

    Those of transformers, accelerate and PEFT are let in: evaluations install some.
    """

    TRUSTED = ("transformers.", "accelerate.", "peft.", "torch.")

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._known = self._find()

    def _find(self) -> dict[tuple[str, int], Any]:
        """Modules, hooks and replaced forward methods, by path and identity."""
        found: dict[tuple[str, int], Any] = {}
        for path, module in self.model.named_modules():
            for own in (module, type(module), type(module).forward):
                found[path, id(own)] = own
            hooks = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
            for hook in (*hooks, module.__dict__.get("forward")):
                if hook is not None:
                    found[path, id(hook)] = hook
        return found

    def _trusted(self, path: str, hook: Any) -> bool:
        """Whether an evaluation may have left it: a hook, or the `forward` of one object."""
        module = self.model.get_submodule(path)
        if any(hook is own for own in (module, type(module), type(module).forward)):
            return False
        return (getattr(hook, "__module__", None) or "").startswith(self.TRUSTED)

    def check(self) -> None:
        """Refuse a step with what was not there when the model was checked."""
        for (path, key), hook in self._find().items():
            if (path, key) not in self._known and not self._trusted(path, hook):
                raise RuntimeError(
                    f"`{path}` must run as it did when records were found to be independent, got a new hook, method or"
                    " module, which may couple records. Set it before `train()`, so that it is checked too, or remove"
                    " it before the next step."
                )


def check_optimizer(optimizer: Optimizer, model: nn.Module, first: bool = False) -> None:
    """The optimizer must update exactly the Parameter objects whose gradients are made private.

    Before the `first` step of a trainer it must not have taken a step: its momentum would be made of other gradients.
    """
    if first and any(state and float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ValueError(
            "`optimizers` must hold an optimizer without a state, got one that has taken steps: its momentum may be"
            " made of gradients without noise. Build a new one, or resume from a checkpoint."
        )
    engine = {id(p): name for name, p in trainable(model).items()}
    held = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    missing = [name for key, name in engine.items() if key not in held]
    if missing:
        raise ValueError(
            f"`optimizers` must hold every trainable parameter of the model, got one without `{missing[0]}`"
            f" ({len(missing)} in all). Build it from trainer.model.parameters(), or freeze them."
        )
    strangers = held.keys() - engine.keys()
    if strangers:
        raise ValueError(
            f"`optimizers` must hold parameters of the model only, got {len(strangers)} others. It was built for"
            " a different copy of the model: build it from trainer.model.parameters()."
        )


def check_parameters(model: nn.Module, engine: Mapping[str, nn.Parameter]) -> None:
    """The trainable parameters must not change during a run: the engine clips and adds noise to exactly these."""
    now = trainable(model)
    odd = [name for name in {**engine, **now} if now.get(name) is not engine.get(name)]
    if odd:
        what = "replaced"
        if odd[0] not in now:
            what = "frozen"
        elif odd[0] not in engine:
            what = "unfrozen"
        raise RuntimeError(
            f"`{odd[0]}` must stay as it was when the run began, got {what} ({len(odd)} such parameters). The engine"
            " and the optimizer hold the earlier ones. To train other parameters, build a new DPTrainer on the same"
            " output_dir: it continues the spending."
        )


def check_gradients(model: nn.Module, noised: bool) -> None:
    """Every trainable parameter must have a finite gradient and, if it is `noised`, one that is not all zero."""
    for name, p in trainable(model).items():
        grad = None if p.grad is None else local(p.grad)  # this rank's rows, maybe none
        got = None
        if grad is None:
            got = "none"
        elif not grad.isfinite().all():
            got = "one that is not finite"
        elif noised and grad.numel() and not grad.any():
            got = "zero"
        if got is not None:
            raise RuntimeError(f"`{name}` must have a finite, non-zero gradient after a private step, got {got}.")


def order_of(dataset: Any) -> tuple[int, str | None] | None:
    """Number of records and a hash of some of them. Ranks compare it to see that they hold the same records in order.

    A draw is a set of positions, split among the ranks: if their orders differ, one record can be drawn twice. A
    dataset may augment its records, so the global generators are seeded first (and again before training). The hash is
    None for a dataset that draws from its own generators.

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
    """The ranks must hold the same records in the same order, and it must be possible to check that."""
    if ranks.world_size == 1:
        return
    order = order_of(dataset)
    ranks.assert_equal(train_dataset=order)
    if order is not None and order[1] is None:
        raise ValueError(
            f"`train_dataset` ({type(dataset).__name__}) must give equal records for equal seeds, got different"
            " ones: whether the ranks hold the same records cannot be checked, and a record on two ranks would count"
            " twice. Augment in the data collator, or with the global generators of random, numpy or torch."
        )
