"""The start-up self-check: is every per-sample gradient of *this* model exact, and do its records stay apart?

Rules know layer kinds; models combine them in ways that nobody listed. So before training the engine is held against
plain autograd, on synthetic inputs, for batches of 1, 2 and 5 records: what is not exact is refused, never wrong.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .bookkeeping import BookKeeper, trainable
from .layers import REMEDY
from .methods.full import unsharded

Batch = Mapping[str, Tensor]
LENGTH = 11  # prime: no axis is a multiple of another by chance
BATCH_SIZES = (1, 2, 5)


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
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])


def self_check(
    model: nn.Module,
    per_sample_loss: Callable[[nn.Module, Batch], Tensor],
    make_batch: Callable[[int, int], Batch],
    perturb: Callable[[Batch, int], Batch],
    max_rows: int = BATCH_SIZES[-1],
    dtype: torch.dtype | None = None,
) -> str:
    """Hold the engine against plain autograd on `make_batch(batch_size, length)`; `perturb(batch, row)` redraws one.

    `max_rows` is the largest micro-batch that training will use: with 1, records never share a batch. `dtype` is what
    the model computes in, where autocast makes that coarser than its weights. Returns one line for the log; raises
    `SelfCheckError` or `UncoveredError` with the parameter's name and a remedy.
    """
    start = time.perf_counter()
    sizes = [size for size in BATCH_SIZES if size <= max_rows]
    dtype = dtype or (next(iter(trainable(model).values())).dtype if trainable(model) else torch.float32)
    with _undisturbed(model):
        _check_buffers(model, per_sample_loss, make_batch(1, LENGTH))
        model.eval()
        batch = make_batch(sizes[-1], LENGTH)
        norms = _check_sum(model, per_sample_loss, batch, tolerance(dtype))
        alone = torch.cat([_norms(model, per_sample_loss, _rows(batch, [n])) for n in range(sizes[-1])])
        _check_norms("alone", norms, alone, tolerance(dtype))
        trimmed = torch.cat([_norms(model, per_sample_loss, _trim(_rows(batch, [n]))) for n in range(sizes[-1])])
        _check_norms("without padding", alone, trimmed, tolerance(dtype))
        if len(sizes) > 1:
            pair = _norms(model, per_sample_loss, _rows(batch, [0, 1]))
            _check_norms("in a batch of two", norms[:2], pair, tolerance(dtype))
            others = _norms(model, per_sample_loss, perturb(batch, 0))
            _check_norms("beside another first record", norms[1:], others[1:], tolerance(dtype))
    seconds = time.perf_counter() - start
    return f"Self-check passed in {seconds:.1f} s: {len(trainable(model))} parameters exact for batches of {sizes}."


def _norms(model: nn.Module, loss: Callable, batch: Batch) -> Tensor:
    with BookKeeper(model) as book:
        book.backward(loss(model, batch))
        return book.norms()


def _check_sum(model: nn.Module, loss: Callable, batch: Batch, limit: float) -> Tensor:
    """Hold the engine's sum of all records against autograd's gradient; returns the norms (N,)."""
    wanted = _plain(model, loss, batch)
    distances, lengths = {}, {}
    with BookKeeper(model) as book:
        book.backward(loss(model, batch))
        norms, records = book.norms(), book.records()
        if unreached := [name for name, g in wanted.items() if g is None or name not in records]:
            raise SelfCheckError(
                f"{_list(unreached)} took no part in the loss, so it would be trained on noise alone. "
                "Remedy: freeze it (`parameter.requires_grad_(False)`)."
            )
        for name in wanted:  # one at a time, as a sharded model's gradients may not fit together
            g = unsharded(wanted[name])
            distances[name] = (records[name].weighted_sum(torch.ones_like(norms)) - g).float().norm()
            lengths[name] = g.float().norm()
    scale = torch.stack(list(lengths.values())).norm()
    wrong = [name for name in wanted if distances[name] > limit * (lengths[name] + 1e-3 * scale)]
    if wrong:
        raise SelfCheckError(
            f"{_list(wrong)}: the sum of per-sample gradients is not autograd's gradient. Remedy: {REMEDY}."
        )
    return norms


def _plain(model: nn.Module, loss: Callable, batch: Batch) -> dict[str, Tensor | None]:
    """Autograd's gradient by parameter, None where it does not reach. Under FSDP2 in shards, for equal batches."""
    parameters = trainable(model)
    before = {name: p.grad for name, p in parameters.items()}
    try:
        for p in parameters.values():
            p.grad = None
        loss(model, batch).sum().backward()  # not autograd.grad, which cannot reach FSDP2's sharded parameters
        return {name: p.grad for name, p in parameters.items()}
    finally:
        for name, p in parameters.items():
            p.grad = before[name]


def _check_norms(where: str, norms: Tensor, others: Tensor, limit: float) -> None:
    difference = ((norms - others).abs() / (norms + others).clamp_min(1e-12)).max().item()
    if not difference <= limit:
        raise SelfCheckError(
            f"Records are not independent: gradient norms change by {difference:.1%} when a record is taken {where}. "
            "Something in the model or the loss (a batch statistic, padding, routing, a time-first layout) lets"
            " records meet. Remedy: `per_device_train_batch_size=1`, pad all records to one length, or another model."
        )


def _check_buffers(model: nn.Module, loss: Callable, batch: Batch) -> None:
    """A buffer that training changes would carry un-noised statistics of the data into the checkpoint."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    with torch.no_grad():
        loss(model, batch)
    if changed := [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]:
        raise SelfCheckError(
            f"{_list(changed)}: a buffer that changes in training would leak data. Remedy: replace the module."
        )


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
