"""The start-up self-check: is every per-sample gradient of *this* model exact, and do its records stay apart?

Rules know layer kinds; models combine them in ways that nobody listed. So before training the engine is compared with
plain autograd, and records with themselves: alone and in a batch, padded and trimmed, beside another record, in
evaluation and in training mode. Compared are losses and gradients (their projections, see sketch.py), on synthetic
inputs, in float32 or better whatever the training precision. What is not exact is refused, never wrong.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .bookkeeper import BookKeeper, rows_per_record, trainable
from .layers.tap import FREEZE, REMEDY
from .persample import Dense, PerSample, sq_norms
from .sketch import distances, sketch
from .tensors import full_precision, unsharded

Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
LENGTH = 11  # prime: no axis is a multiple of another by chance
BATCH_SIZES = (1, 3, 7)
COMPANY = 3  # records in a batch of training mode
GRADIENT_SEEDS = 2
LOSS_SEEDS = 8  # a coupling that happens in 3 of 10 forward passes is missed with probability 0.7^10 = 3 %

SAME_LOSS = 1e-5  # relative difference of two losses that ought to be the same number
SAME_GRADIENT = 1e-4  # distance of two gradients that ought to be the same, of the clip norm after clipping
COARSE = 1000  # times as much in half precision, which is left under FSDP2 only


class SelfCheckError(RuntimeError):
    """The model's per-sample gradients are not exact, or its records are not independent."""


def tolerance(dtype: torch.dtype) -> float:
    """Relative difference that rounding explains."""
    return {torch.float64: 1e-7, torch.float32: 2e-3}.get(dtype, 0.1)


@dataclass(frozen=True)
class Run:
    """What one backward pass of the engine gives: losses (N,), and by parameter squared norms (N,) and sketches."""

    losses: Tensor
    squares: dict[str, Tensor]
    sketches: dict[str, Tensor]

    @classmethod
    def of(cls, losses: Tensor, entries: Mapping[str, PerSample]) -> "Run":
        return cls(losses.detach(), sq_norms(entries), {name: sketch(value) for name, value in entries.items()})

    @property
    def norms(self) -> Tensor:
        return torch.stack(list(self.squares.values())).sum(0).sqrt()

    def rows(self, rows: slice) -> "Run":
        squares, sketches = ({name: x[rows] for name, x in part.items()} for part in (self.squares, self.sketches))
        return Run(self.losses[rows], squares, sketches)


@dataclass(frozen=True)
class _Check:
    """The settings of one check."""

    model: nn.Module
    loss: Loss
    dtype: torch.dtype  # that the model computes in
    floor: float  # norm up to which clipping leaves gradients as they are, or scales them all alike (AUTO-S)

    @property
    def coarse(self) -> float:
        return 1 if self.dtype in (torch.float32, torch.float64) else COARSE

    def run(self, batch: Batch, seed: int = 0) -> Run:
        _seed(seed)
        with BookKeeper(self.model, rows_per_record=rows_per_record(self.loss)) as book:
            losses = self.loss(self.model, batch)
            book.backward(losses)
            return Run.of(losses, book.entries())

    def losses(self, batch: Batch, seed: int) -> Tensor:
        _seed(seed)
        with torch.no_grad():
            return self.loss(self.model, batch)

    def same(self, where: str, run: Run, other: Run) -> None:
        """Demand that two runs give the same records the same losses and gradients."""
        self.same_losses(where, run.losses, other.losses)
        names = run.sketches.keys() | other.sketches.keys()
        one, two = ({name: r.sketches.get(name, torch.zeros(1, 1)) for name in names} for r in (run, other))
        difference = distances(one, two)
        norms = torch.maximum(run.norms, other.norms).double()
        if not bool((difference <= SAME_GRADIENT * self.coarse * (norms + self.floor)).all()):
            worst = (difference / norms.clamp_min(1e-30)).max().item()
            raise SelfCheckError(
                f"Records are not independent: gradients change by {worst:.2g} of their norm when a record is taken"
                f" {where}. Something in the model or the loss (a batch statistic, padding, routing) couples records."
                " Remedy: `per_device_train_batch_size=1`, pad all records to one length, or another model."
            )

    def same_losses(self, where: str, losses: Tensor, others: Tensor) -> None:
        """Demand the same losses. Where shapes are the same they round alike, so this is sharper than gradients."""
        one, two = losses.double(), others.double()
        difference = ((one - two).abs() / (one.abs() + two.abs()).clamp_min(1e-12)).max().item()
        if not difference <= SAME_LOSS * self.coarse:
            raise SelfCheckError(
                f"Records are not independent: losses change by {difference:.2g} of themselves when a record is taken"
                f" {where}. Something in the model or the loss (a mean over the batch, weights that are divided by"
                " their sum, padding) couples records. Remedy: `per_device_train_batch_size=1`, or another loss."
            )


def self_check(
    model: nn.Module,
    per_sample_loss: Loss,
    make_batch: Callable[..., Batch],
    records_meet: bool = True,
    clip_norm: float = 1.0,
    gamma: float = 0.01,
) -> str:
    """Compare the engine with plain autograd on made-up records, `make_batch(batch_size, length, generator=None)`.

    `records_meet` is False if training will use micro-batches of one record only. A record's gradient may change by
    1e-4 of its norm, or of `clip_norm` or AUTO-S's `gamma` where the norm is smaller: rounding of tiny gradients is no
    coupling, as long as clipping does not scale it up. Returns one line for the log; raises `SelfCheckError` or
    `UncoveredError` with the parameter's name and a remedy.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        sys.stderr.write("Checking per-sample gradients against autograd ...\n")
    start = time.perf_counter()
    sizes = BATCH_SIZES if records_meet else BATCH_SIZES[:1]
    with _undisturbed(model), _wide(model) as dtype:
        _check_weights(model)
        check = _Check(model, per_sample_loss, dtype, floor=min(clip_norm, gamma))
        batch = make_batch(sizes[-1], LENGTH)
        _check_state(model, per_sample_loss, _rows(batch, [0]))
        model.eval()
        _check_deterministic(check, _rows(batch, [0]))
        whole = _check_against_autograd(check, batch)
        for n in range(sizes[-1]):
            _check_alone(check, _rows(batch, [n]), whole.rows(slice(n, n + 1)))
        for size in sizes[1:-1]:
            some = check.run(_rows(batch, list(range(size))))
            check.same(f"in a batch of {size}", whole.rows(slice(size)), some)
        _check_norms(check, _rows(batch, [0]), whole)
        if records_meet:
            others = make_batch(sizes[-1], LENGTH, torch.Generator().manual_seed(1))
            mixed = _exchanged(batch, others)
            check.same(
                "beside another first record", whole.rows(slice(1, None)), check.run(mixed).rows(slice(1, None))
            )
            model.train()  # some models let records meet in training only; equal seeds drop out the same
            _check_training(check, *(_rows(one, list(range(COMPANY))) for one in (batch, mixed)))
    seconds = time.perf_counter() - start
    return (
        f"Self-check passed in {seconds:.1f} s: {len(trainable(model))} parameters exact for batches of {list(sizes)}."
    )


# -- what is left as it was


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Put modes, buffers and random state back, whatever happens."""
    modes = {module: module.training for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in model.modules()}
    values = {id(x): x.clone() for owned in buffers.values() for x in owned.values() if x is not None}
    generators = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for module, owned in buffers.items():
                module._buffers.clear()
                module._buffers.update(owned)
                for x in owned.values():
                    if x is not None:
                        x.copy_(values[id(x)])


@contextmanager
def _wide(model: nn.Module) -> Iterator[torch.dtype]:
    """Let the model compute in float32 or better, without autocast; yields the coarsest type that is left.

    Half precision would hide a coupling in its rounding. FSDP2 casts weights itself, which stays as it is.
    """
    weights = [x for x in (*model.parameters(), *model.buffers()) if not isinstance(x, DTensor)]
    half = [(x, x.data) for x in weights if x.dtype in (torch.bfloat16, torch.float16)]
    wrapped = model.__dict__.get("forward")
    some = next(iter(model.parameters()), torch.zeros(()))
    with ExitStack() as undo:
        if "_original_forward" in model.__dict__:  # Accelerate's autocast around the model
            undo.callback(model.__dict__.__setitem__, "forward", wrapped)
            model.__dict__["forward"] = model.__dict__["_original_forward"]
        for x, data in half:
            undo.callback(setattr, x, "data", data)
            x.data = data.float()
        undo.enter_context(full_precision(some.device))
        convolutions = torch.backends.cudnn.conv  # pyrefly: ignore[missing-attribute]  (torch sets it at run time)
        undo.callback(setattr, convolutions, "fp32_precision", convolutions.fp32_precision)
        convolutions.fp32_precision = "ieee"
        yield _computes_in(model)


def _computes_in(model: nn.Module) -> torch.dtype:
    """The coarsest type among trainable weights, and of FSDP2's mixed precision."""
    dtypes = {p.dtype for p in trainable(model).values()}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            dtypes.add(module._get_fsdp_state()._mp_policy.param_dtype or torch.float64)
    return max(dtypes, key=tolerance, default=torch.float32)


# -- checks, in their order


def _check_weights(model: nn.Module) -> None:
    """Weights that are not finite make every comparison fail, and every record's gradient is removed."""
    bad = []
    for name, p in model.named_parameters():
        local = p.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        if local.is_floating_point() and local.numel() and not torch.isfinite(torch.stack(torch.aminmax(local))).all():
            bad.append(name)
    if any(isinstance(p, DTensor) for p in model.parameters()):  # each rank sees its shards
        found = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, bad)
        bad = sorted(set().union(*found))
    if bad:
        raise SelfCheckError(f"{_list(bad)}: has weights that are not finite. Remedy: load or initialise it again.")


def _check_state(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """What a forward pass changes would carry un-noised statistics of the data into the checkpoint."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    written = _writes(model)
    model.train()
    with torch.no_grad():
        loss(model, batch)
    after = dict(model.named_buffers())
    changed = [name for name in after.keys() | before.keys() if not _equal(after.get(name), before.get(name))]
    changed += [name for name, count in _writes(model).items() if count != written.get(name, count)]
    if changed:
        owner = model.get_submodule(changed[0].rpartition(".")[0])
        raise SelfCheckError(
            f"{_list(sorted(changed))}: a buffer or a weight that a forward pass changes would leak data"
            f" ({type(owner).__name__}). Remedy: replace the module"
            " (BatchNorm by GroupNorm), or build it without what changes it (a batch statistic, `max_norm`)."
        )


def _equal(x: Tensor | None, y: Tensor | None) -> bool:
    return x is not None and y is not None and torch.equal(x, y)


def _writes(model: nn.Module) -> dict[str, int]:
    """How often each parameter was written to, as torch counts; a copy to compare with would double a large model.

    Not of shards, which FSDP2 itself gathers and writes.
    """
    return {name: p._version for name, p in model.named_parameters() if not isinstance(p, DTensor)}


def _check_deterministic(check: _Check, batch: Batch) -> None:
    one, two = (check.losses(batch, seed) for seed in (0, 1))
    if not torch.isfinite(one).all():
        raise SelfCheckError(
            f"The loss of a synthetic record is {one[0].item():g}, and its gradient would be removed. Remedy: look for"
            " an overflow in the model (weights, a mask of minus infinity), or for labels that it cannot take."
        )
    if not bool(((one - two).abs() <= SAME_LOSS * one.abs() + 1e-12).all()):
        raise SelfCheckError(
            f"The model is random in evaluation mode: the loss of one record is {one[0].item():.6g} and then"
            f" {two[0].item():.6g}, so records cannot be compared. Remedy: switch the randomness off in that mode"
            " (dropout that ignores `self.training`, hashing, sampled noise), or another model."
        )


def _check_against_autograd(check: _Check, batch: Batch) -> Run:
    """Compare the engine's weighted sum over all records with autograd's gradient.

    Every record has a weight of its own: the plain sum would not change if gradients went to the wrong records.
    """
    model, loss = check.model, check.loss
    wanted = _plain(model, loss, batch)
    distance, length = {}, {}
    with BookKeeper(model, rows_per_record=rows_per_record(loss)) as book:
        losses = loss(model, batch)
        book.backward(losses)
        entries = book.entries()
        if unreached := [name for name, g in wanted.items() if g is None or name not in entries]:
            raise SelfCheckError(
                f"{_list(unreached)} took no part in the loss, so it would be trained on noise alone."
                f" Remedy: {FREEZE}."
            )
        weights = _weights(losses)
        for name, expected in wanted.items():  # one at a time, as a sharded model's gradients may not fit together
            assert expected is not None
            g = unsharded(expected)
            distance[name] = (entries[name].weighted_sum(weights) - g).float().norm()
            length[name] = g.float().norm()
        run = Run.of(losses, entries)
    _refuse_wrong("the sum of per-sample gradients is not autograd's gradient", distance, length, check)
    return run


def _check_norms(check: _Check, record: Batch, inside: Run) -> None:
    """Compare the norms of one record's gradient, parameter by parameter, with those of autograd's gradient.

    A norm that underflows is in no sum.
    """
    distance, length = {}, {}
    for name, expected in _plain(check.model, check.loss, record).items():
        if expected is not None:
            length[name] = Dense(unsharded(expected).unsqueeze(0)).sq_norm().sqrt()[0]
            distance[name] = (inside.squares[name][0].sqrt() - length[name]).abs()
    _refuse_wrong("the norm of a record's gradient is not autograd's", distance, length, check)


def _refuse_wrong(what: str, distance: dict[str, Tensor], length: dict[str, Tensor], check: _Check) -> None:
    scale = torch.stack(list(length.values())).norm()
    wrong = [
        name
        for name in distance
        if not distance[name] <= tolerance(check.dtype) * (length[name] + 1e-3 * (scale + check.floor))
    ]
    if wrong:
        raise SelfCheckError(f"{_list(wrong)}: {what}. Remedy: {REMEDY}.")


def _plain(model: nn.Module, loss: Loss, batch: Batch) -> dict[str, Tensor | None]:
    """Autograd's gradient of the weighted losses by parameter, None where it does not reach.

    Under FSDP2 in shards, for equal batches.
    """
    parameters = trainable(model)
    before = {name: p.grad for name, p in parameters.items()}
    try:
        for p in parameters.values():
            p.grad = None
        _seed(0)
        losses = loss(model, batch)
        (losses * _weights(losses)).sum().backward()  # not autograd.grad, which cannot reach FSDP2's shards
        return {name: p.grad for name, p in parameters.items()}
    finally:
        for name, p in parameters.items():
            p.grad = before[name]


def _weights(like: Tensor) -> Tensor:
    """A weight for each record, the same on every rank, and no two alike."""
    return torch.arange(1, len(like) + 1, dtype=like.dtype, device=like.device) / len(like)


def _check_alone(check: _Check, record: Batch, inside: Run) -> None:
    """A record alone and without its padding, against the same in a batch; if they differ, say which of both it is."""
    try:
        check.same("without padding", inside, check.run(_trim(record)))
    except SelfCheckError:
        check.same("alone", inside, check.run(record))
        raise


def _exchanged(batch: Batch, other: Batch) -> dict[str, Tensor]:
    """The batch with another first record, one that differs in as much as possible, its label included."""
    differ = [
        sum(not torch.equal(other[key][n], rows[0]) for key, rows in batch.items()) for n in range(BATCH_SIZES[-1])
    ]
    n = differ.index(max(differ))
    return {key: torch.cat([other[key][n : n + 1], rows[1:]]) for key, rows in batch.items()}


def _check_training(check: _Check, batch: Batch, mixed: Batch) -> None:
    """Records beside another first record in training mode: gradients for some seeds, losses for more."""
    where, others = "beside another first record in training mode", slice(1, None)
    for seed in range(GRADIENT_SEEDS):
        check.same(where, *(check.run(one, seed).rows(others) for one in (batch, mixed)))
    for seed in range(GRADIENT_SEEDS, GRADIENT_SEEDS + LOSS_SEEDS):
        one, two = (check.losses(x, seed)[others] for x in (batch, mixed))
        check.same_losses(where, one, two)


def _seed(seed: int) -> None:
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(seed)


def _rows(batch: Batch, rows: list[int]) -> dict[str, Tensor]:
    return {key: value[rows] for key, value in batch.items()}


def _trim(batch: Batch) -> dict[str, Tensor]:
    """A single record without its padding, where the mask is (1, T), or (1, R, T) for the R rows of a record."""
    mask = batch.get("attention_mask")
    if mask is None or mask.dim() < 2:
        return dict(batch)
    keep = int(mask.sum(-1).max())
    axis = mask.dim() - 1
    aligned = {key for key, x in batch.items() if x.shape[: axis + 1] == mask.shape}
    if batch.get("input_ids") is not None and "labels" in aligned and batch["labels"].dtype == torch.long:
        # Encoder-decoder labels have a length of their own; they are marked by positions beyond the mask.
        if bool((batch["labels"][..., keep:] != -100).any()):
            aligned -= {"labels"}
    return {key: x.narrow(axis, 0, keep) if key in aligned else x for key, x in batch.items()}


def _list(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
