"""The start-up self-check: is every per-sample gradient of *this* model exact, and do its records stay apart?

Rules know layer kinds; models combine them in ways that nobody listed. So before training the engine is held against
plain autograd, on synthetic inputs, for batches of 1 to 7 records: what is not exact is refused, never wrong.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .bookkeeper import BookKeeper, trainable
from .layers import REMEDY
from .tensors import unsharded

Batch = Mapping[str, Tensor]
LENGTH = 11  # prime: no axis is a multiple of another by chance
BATCH_SIZES = (1, 2, 3, 5, 7)  # an axis that has nothing to do with records is not a multiple of all of them


SAME_LOSS = 1e-5  # relative difference of two losses that ought to be the same number


class SelfCheckError(RuntimeError):
    """The model's per-sample gradients are not exact, or its records are not independent."""


def tolerance(dtype: torch.dtype) -> float:
    """Relative difference that rounding explains."""
    return {torch.float64: 1e-7, torch.float32: 2e-3}.get(dtype, 0.1)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode for the length of the check; modes, buffers and random state are put back."""
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
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
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])


def self_check(
    model: nn.Module,
    per_sample_loss: Callable[[nn.Module, Batch], Tensor],
    make_batch: Callable[..., Batch],
    records_meet: bool = True,
    dtype: torch.dtype | None = None,
) -> str:
    """Hold the engine against plain autograd on made-up records, `make_batch(batch_size, length, generator=None)`.

    `records_meet` is False if training will use micro-batches of one record only. `dtype` is what the model computes
    in, where autocast makes that coarser than its weights. Returns one line for the log; raises `SelfCheckError` or
    `UncoveredError` with the parameter's name and a remedy.
    """
    start = time.perf_counter()
    sizes = BATCH_SIZES if records_meet else BATCH_SIZES[:1]
    dtype = dtype or (next(iter(trainable(model).values())).dtype if trainable(model) else torch.float32)
    with _undisturbed(model):
        _check_state(model, per_sample_loss, make_batch(1, LENGTH))
        model.eval()
        batch = make_batch(sizes[-1], LENGTH)
        norms = _norms(model, per_sample_loss, batch)
        alone = torch.cat([_norms(model, per_sample_loss, _rows(batch, [n])) for n in range(sizes[-1])])
        _check_norms("alone", norms, alone, tolerance(dtype))
        trimmed = torch.cat([_norms(model, per_sample_loss, _trim(_rows(batch, [n]))) for n in range(sizes[-1])])
        _check_norms("without padding", alone, trimmed, tolerance(dtype))
        for size in sizes[1:-1]:
            some = _norms(model, per_sample_loss, _rows(batch, list(range(size))))
            _check_norms(f"in a batch of {size}", norms[:size], some, tolerance(dtype))
        if records_meet:
            other = make_batch(sizes[-1], LENGTH, torch.Generator().manual_seed(1))
            mixed = _exchanged(batch, other)
            others = _norms(model, per_sample_loss, mixed)
            _check_norms("beside another first record", norms[1:], others[1:], tolerance(dtype))
            _check_losses(model, per_sample_loss, batch, mixed)
            model.train()  # some models let records meet in training only; equal seeds drop out the same
            norms, others = (_norms(model, per_sample_loss, one, seed=0)[1:] for one in (batch, mixed))
            _check_norms("beside another first record in training mode", norms, others, tolerance(dtype))
            _check_losses(model, per_sample_loss, batch, mixed)
            model.eval()
        _check_sum(model, per_sample_loss, batch, tolerance(dtype))
    seconds = time.perf_counter() - start
    return (
        f"Self-check passed in {seconds:.1f} s: {len(trainable(model))} parameters exact for batches of {list(sizes)}."
    )


def _seed(seed: int) -> None:
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(seed)


def _exchanged(batch: Batch, other: Batch) -> dict[str, Tensor]:
    """The batch with another first record, one that differs in as much as possible, its label included."""
    differ = [
        sum(not torch.equal(other[key][n], rows[0]) for key, rows in batch.items()) for n in range(BATCH_SIZES[-1])
    ]
    n = differ.index(max(differ))
    return {key: torch.cat([other[key][n : n + 1], rows[1:]]) for key, rows in batch.items()}


def _norms(model: nn.Module, loss: Callable, batch: Batch, seed: int | None = None) -> Tensor:
    if seed is not None:
        _seed(seed)
    with BookKeeper(model) as book:
        book.backward(loss(model, batch))
        return book.norms()


def _check_sum(model: nn.Module, loss: Callable, batch: Batch, limit: float) -> None:
    """Hold the engine's weighted sum of all records against autograd's gradient.

    Every record has a weight of its own: of a gradient that is given to the wrong record the plain sum would be right.
    """
    wanted = _plain(model, loss, batch)
    distances, lengths = {}, {}
    with BookKeeper(model) as book:
        book.backward(loss(model, batch))
        weights, records = _weights(book.norms()), book.records()
        if unreached := [name for name, g in wanted.items() if g is None or name not in records]:
            raise SelfCheckError(
                f"{_list(unreached)} took no part in the loss, so it would be trained on noise alone. "
                "Remedy: freeze it (`parameter.requires_grad_(False)`)."
            )
        for name in wanted:  # one at a time, as a sharded model's gradients may not fit together
            g = unsharded(wanted[name])
            distances[name] = (records[name].weighted_sum(weights) - g).float().norm()
            lengths[name] = g.float().norm()
    scale = torch.stack(list(lengths.values())).norm()
    wrong = [name for name in wanted if distances[name] > limit * (lengths[name] + 1e-3 * scale)]
    if wrong:
        raise SelfCheckError(
            f"{_list(wrong)}: the sum of per-sample gradients is not autograd's gradient. Remedy: {REMEDY}."
        )


def _plain(model: nn.Module, loss: Callable, batch: Batch) -> dict[str, Tensor | None]:
    """Autograd's gradient of the weighted losses by parameter, None where it does not reach.

    Under FSDP2 in shards, for equal batches.
    """
    parameters = trainable(model)
    before = {name: p.grad for name, p in parameters.items()}
    try:
        for p in parameters.values():
            p.grad = None
        losses = loss(model, batch)
        (
            losses * _weights(losses)
        ).sum().backward()  # not autograd.grad, which cannot reach FSDP2's sharded parameters
        return {name: p.grad for name, p in parameters.items()}
    finally:
        for name, p in parameters.items():
            p.grad = before[name]


def _weights(like: Tensor) -> Tensor:
    """A weight for each record, the same on every rank, and no two alike."""
    return torch.arange(1, len(like) + 1, dtype=like.dtype, device=like.device) / len(like)


def _check_norms(where: str, norms: Tensor, others: Tensor, limit: float) -> None:
    difference = ((norms - others).abs() / (norms + others).clamp_min(1e-12)).max().item()
    if not difference <= limit:
        raise SelfCheckError(
            f"Records are not independent: gradient norms change by {difference:.1%} when a record is taken {where}. "
            "Something in the model or the loss (a batch statistic, padding, routing, a time-first layout) lets"
            " records meet. Remedy: `per_device_train_batch_size=1`, pad all records to one length, or another model."
        )


def _check_losses(model: nn.Module, loss: Callable, batch: Batch, mixed: Batch) -> None:
    """Losses of all records but the first, which alone is another: of the same shapes, they round the same way.

    So this is sharper than norms, of which a fresh model's are all alike, and coarse in half precision.
    """
    found = []
    for one in (batch, mixed):
        _seed(0)
        with torch.no_grad():
            found.append(loss(model, one)[1:].double())
    difference = ((found[0] - found[1]).abs() / (found[0].abs() + found[1].abs()).clamp_min(1e-12)).max().item()
    if not difference <= SAME_LOSS:
        raise SelfCheckError(
            f"Records are not independent: losses change by {difference:.2g} of themselves when the first record of"
            " their batch is another. Something in the model or the loss (a mean over the batch, weights that are"
            " divided by their sum) lets records meet. Remedy: `per_device_train_batch_size=1`, or another loss."
        )


def _check_state(model: nn.Module, loss: Callable, batch: Batch) -> None:
    """What a forward pass changes would carry un-noised statistics of the data into the checkpoint."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    written = _writes(model)
    model.train()
    with torch.no_grad():
        loss(model, batch)
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    changed += [name for name, count in _writes(model).items() if count != written.get(name, count)]
    if changed:
        raise SelfCheckError(
            f"{_list(changed)}: a buffer or a weight that a forward pass changes would leak data"
            f" ({type(model.get_submodule(changed[0].rpartition('.')[0])).__name__}). Remedy: replace the module"
            " (BatchNorm by GroupNorm), or build it without what changes it (a batch statistic, `max_norm`)."
        )


def _writes(model: nn.Module) -> dict[str, int]:
    """How often each parameter was written to, as torch counts; a copy to compare with would double a large model.

    Not of shards, which FSDP2 itself gathers and writes.
    """
    return {name: p._version for name, p in model.named_parameters() if not isinstance(p, DTensor)}


def _rows(batch: Batch, rows: list[int]) -> dict[str, Tensor]:
    return {key: value[rows] for key, value in batch.items()}


def _trim(batch: Batch) -> dict[str, Tensor]:
    """A single record without its padding (where the mask is a plain (1, T) one)."""
    mask = batch.get("attention_mask")
    if mask is None or mask.dim() != 2:
        return dict(batch)
    keep = int(mask.sum())
    aligned = {key for key, x in batch.items() if x.dim() > 1 and x.shape[1] == mask.shape[1]}
    if batch.get("input_ids") is not None and "labels" in aligned and batch["labels"].dtype == torch.long:
        # Encoder-decoder labels have a length of their own; they are marked by positions beyond the mask.
        if bool((batch["labels"][:, keep:] != -100).any()):
            aligned -= {"labels"}
    return {key: x[:, :keep] if key in aligned else x for key, x in batch.items()}


def _list(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
