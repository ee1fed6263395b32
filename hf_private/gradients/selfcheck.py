"""The start-up self-check: is every per-sample gradient of *this* model exact, and do its records stay apart?

Rules know layer kinds; models combine them in ways that no list covers. So before training the engine is compared with
plain autograd, and records with themselves: alone and in a batch, padded and trimmed, beside another record, in
evaluation and in training mode. Compared are losses and gradients (their projections, see sketch.py), on synthetic
inputs, in float32 or better whatever the training precision. What is not exact is refused, never wrong.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm

from .bookkeeper import BookKeeper, rows_per_record, trainable
from .comparison import SAME_LOSS, Batch, Comparison, Loss, Run, SelfCheckError
from .layers import refusal
from .layers.routed import is_adapted
from .layers.tap import FREEZE, REMEDY
from .persample import Dense, widen
from .tensors import is_quantised, local, unsharded
from .ties import Choices
from .undisturbed import seed_all, tolerance, undisturbed, wide

__all__ = ["Loss", "SelfCheckError", "self_check", "tolerance"]

LENGTH = 11  # prime: no axis is a multiple of another by chance
RECORDS = 7
COMPANY = 3  # records in a batch with another first record
SHORT = 5  # their length in training mode
GRADIENT_SEEDS = 1  # in training mode
CHOICE_SEEDS = 4  # batches in which models that choose by scores are looked at
PARTS = 5  # of the check, for its progress, beside one for each record
LOSS_SEEDS = 9  # further ones: a coupling in 3 of 10 forward passes is missed with probability 0.7^10 = 3 %


def self_check(
    model: nn.Module,
    per_sample_loss: Loss,
    make_batch: Callable[..., Batch],
    records_meet: bool = True,
    clip_norm: float = 1.0,
    gamma: float = 0.01,
    group_of: Callable[[str], str] = lambda name: "",
    longer: Sequence[int] = (),
) -> str:
    """Compare the engine with plain autograd on made-up records, `make_batch(batch_size, length, generator=None)`.

    `records_meet` is False if training will use micro-batches of one record only. `group_of` says which parameters are
    clipped together: all of them, or layers. `longer` are further lengths at which records are compared, for models
    that compute long rows in another way. Of each group, a record's gradient may change by 1e-5 of its norm and
    1e-6 of the group's share of `clip_norm` or of AUTO-S's `gamma`, whichever is smaller, since clipping may scale
    gradients up as far as that. Where more changes, the rounding is measured. Returns one line for the log; raises
    `SelfCheckError` or `UncoveredError` with the parameter's name and a remedy.
    """
    start = time.perf_counter()
    size = RECORDS if records_meet else 1
    with undisturbed(model), wide(model) as dtype, _progress(PARTS + size) as bar:
        _check_weights(model)
        bar.update()
        groups: dict[str, list[str]] = {}
        for name in trainable(model):
            groups.setdefault(group_of(name), []).append(name)
        floor = min(clip_norm / math.sqrt(len(groups)), gamma)
        check = Comparison(model, per_sample_loss, dtype, floor, groups)
        batch = make_batch(size, LENGTH)
        _check_distinct(batch)
        _check_state(model, per_sample_loss, _rows(batch, [0]))
        bar.update()
        model.eval()
        _check_deterministic(check, _rows(batch, [0]))
        choices = Choices()
        whole = _check_against_autograd(check, batch, choices)
        bar.update()
        if records_meet:
            _check_choices(check, make_batch, choices.lengths)
            for length in longer:
                _check_longer(check, make_batch, length)
        closely = _telling(batch)
        for n in range(size):
            _check_alone(check, _rows(batch, [n]), whole.rows(slice(n, n + 1)), gradients=n in closely)
            bar.update()
        if records_meet:
            others = make_batch(size, LENGTH, torch.Generator().manual_seed(1))
            mixed = check.run(_exchanged(_rows(batch, list(range(COMPANY))), others))
            check.same("beside another first record", whole.rows(slice(1, COMPANY)), mixed.rows(slice(1, None)))
            bar.update()
            model.train()  # some models let records meet in training only; equal seeds drop out the same
            batch = make_batch(COMPANY, SHORT)
            _check_training(
                check, batch, _exchanged(batch, make_batch(COMPANY, SHORT, torch.Generator().manual_seed(1)))
            )
        bar.update(bar.total - bar.n)
    seconds = time.perf_counter() - start
    return f"Self-check passed in {seconds:.1f} s: {len(trainable(model))} parameters exact for batches of {size}."


def _progress(parts: int) -> tqdm:
    """A bar, on the first rank, that vanishes when the check has ended."""
    others = dist.is_available() and dist.is_initialized() and dist.get_rank() > 0
    return tqdm(total=parts, desc="Checking per-sample gradients against autograd", leave=False, disable=others)


# -- checks, in their order


def _check_weights(model: nn.Module) -> None:
    """Weights that are not finite make every comparison fail, and every record's gradient is removed."""
    bad = []
    for name, p in model.named_parameters():
        own = local(p.detach())
        if is_quantised(own):
            continue
        if own.is_floating_point() and own.numel() and not torch.isfinite(torch.stack(torch.aminmax(own))).all():
            bad.append(name)
    if any(isinstance(p, DTensor) for p in model.parameters()):  # each rank sees its shards
        found = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, bad)
        bad = sorted(set().union(*found))
    if bad:
        raise SelfCheckError(f"{_list(bad)}: has weights that are not finite. Remedy: load or initialise it again.")


def _check_distinct(batch: Batch) -> None:
    """Records that are alike would hide what they do to each other: their mean is each of them."""
    records = len(next(iter(batch.values())))
    rows = {
        b"".join(x[n].detach().cpu().contiguous().view(-1).numpy().tobytes() for x in batch.values())
        for n in range(records)
    }
    if len(rows) < records:
        raise SelfCheckError(
            f"`public_batch` must return records that all differ, got {len(rows)} different ones of"
            f" {records}: records that are alike cannot show whether they are independent."
        )


def _check_state(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """What a forward pass changes would carry un-noised statistics of the data into the checkpoint."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    written = _writes(model)
    model.train()
    try:
        with torch.no_grad():
            loss(model, batch)
    except ValueError:  # BatchNorm has no statistic of one record where an image is one pixel wide
        for path, module in model.named_modules():
            if reason := refusal(module):
                raise SelfCheckError(f"`{path}`: {reason}.") from None
        raise
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


def _writes(model: nn.Module) -> dict[str, float]:
    """How often each parameter was written to, as torch counts; a copy to compare with would double a large model.

    Of experts and routers with an adapter the sum: PEFT's ParamWrapper writes each of their weights to itself. Not of
    shards, which FSDP2 itself gathers and writes.
    """
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}

    def writes_to_itself(path: str, module: nn.Module) -> bool:
        wrapper = kinds.get(path.rpartition(".")[0])
        return is_adapted(path) and (not isinstance(module, nn.Linear) or wrapper == "ParamWrapper")

    return {
        name: float(p.detach().sum(dtype=torch.float64)) if writes_to_itself(path, module) else p._version
        for path, module in model.named_modules()
        for name, p in module.named_parameters(path, recurse=False)
        if not isinstance(p, DTensor)
    }


def _check_deterministic(check: Comparison, batch: Batch) -> None:
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


def _check_against_autograd(check: Comparison, batch: Batch, choices: Choices | None = None) -> Run:
    """Compare the engine's weighted sum over all records with autograd's gradient, and a norm with the sum.

    Every record has a weight of its own: the plain sum would not change if gradients went to the wrong records. The
    norm that clipping uses is computed in another way than the sum, so it is compared with the sum of one record.
    `choices` sees the plain forward pass.
    """
    model, loss = check.model, check.loss
    wanted = _plain(model, loss, batch, choices or Choices())
    distance: dict[str, Tensor] = {}
    length: dict[str, Tensor] = {}
    norms: dict[str, Tensor] = {}
    astray: dict[str, Tensor] = {}
    with BookKeeper(model, rows_per_record=rows_per_record(loss)) as book:
        losses = loss(model, batch)
        book.backward(losses)
        entries = book.entries()
        if unreached := [name for name, g in wanted.items() if g is None or name not in entries]:
            raise SelfCheckError(
                f"{_list(unreached)} took no part in the loss, so it would be trained on noise alone."
                f" Remedy: {FREEZE}."
            )
        weights, run = _weights(losses), Run.of(losses, entries, batch)
        first = (torch.arange(len(losses), device=losses.device) == 0).to(losses.dtype)
        for name, expected in wanted.items():  # one at a time, as a sharded model's gradients may not fit together
            assert expected is not None
            g = widen(unsharded(expected))
            length[name] = g.norm()
            difference = entries[name].weighted_sum(weights, into=g.neg_().contiguous())
            distance[name] = difference.norm()
            alone = entries[name].weighted_sum(first, into=difference.zero_())  # new memory would take as long
            norms[name] = Dense(alone.unsqueeze(0)).sq_norm().sqrt()[0]  # a norm that underflows is in no sum
            astray[name] = (run.squares[name][0].sqrt() - norms[name]).abs()
    remedy = REMEDY if len(run.losses) > 1 else FREEZE
    for what, off, whole in (
        ("the sum of per-sample gradients is not autograd's gradient", distance, length),
        ("the norm of a record's gradient is not that of its part of the sum", astray, norms),
    ):
        _refuse_wrong(f"{what}. Remedy: {remedy}", off, whole, check)
    return run


def _refuse_wrong(what: str, distance: dict[str, Tensor], length: dict[str, Tensor], check: Comparison) -> None:
    wrong = []
    for names in check.groups.values():
        names = [name for name in names if name in distance]
        scale = torch.stack([length[name] for name in names]).norm() if names else 0.0
        wrong += [
            name
            for name in names
            if not distance[name] <= tolerance(check.dtype) * (length[name] + 1e-3 * (scale + check.floor))
        ]
    if wrong:
        raise SelfCheckError(f"{_list(wrong)}: {what}.")


def _plain(model: nn.Module, loss: Loss, batch: Batch, choices: Choices) -> dict[str, Tensor | None]:
    """Autograd's gradient of the weighted losses by parameter, None where it does not reach.

    Under FSDP2 in shards, for equal batches.
    """
    parameters = trainable(model)
    before = {name: p.grad for name, p in parameters.items()}
    try:
        for p in parameters.values():
            p.grad = None
        seed_all(0)
        with choices:
            losses = loss(model, batch)
        beside = _leaves_beside(losses, model)
        (losses * _weights(losses)).sum().backward()  # not autograd.grad, which cannot reach FSDP2's shards
        _check_weights_of_loss(beside)
        return {name: p.grad for name, p in parameters.items()}
    finally:
        for name, p in parameters.items():
            p.grad = before[name]


def _leaves_beside(losses: Tensor, model: nn.Module) -> list[nn.Parameter]:
    """The parameters in the graph of the losses that are not the model's. FSDP2's gathered weights are among them."""
    own, seen, waiting, found = {id(p) for p in model.parameters()}, set(), [losses.grad_fn], []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        weight = getattr(node, "variable", None)
        if isinstance(weight, nn.Parameter) and id(weight) not in own:
            weight.grad = None
            found.append(weight)
        waiting += [following for following, _ in node.next_functions]
    return found


def _check_weights_of_loss(beside: list[nn.Parameter]) -> None:
    """Weights that a loss has beside the model get gradients without noise, and nothing makes them private.

    FSDP2 has taken the gradients of its gathered weights, so they have none.
    """
    reached = [weight for weight in beside if weight.grad is not None]
    for weight in reached:
        weight.grad = None
    if reached:
        raise SelfCheckError(
            f"The loss must have no weights beside those of the model, got one of shape {tuple(reached[0].shape)}: its"
            " gradient would have no noise. Remedy: make it a part of the model, or freeze it"
            " (`requires_grad_(False)`)."
        )


def _weights(like: Tensor) -> Tensor:
    """A weight for each record, the same on every rank, and no two alike."""
    return torch.arange(1, len(like) + 1, dtype=like.dtype, device=like.device) / len(like)


def _telling(batch: Batch) -> list[int]:
    """Records whose gradients are compared with themselves alone: the longest, the shortest, and two others."""
    records, mask = len(next(iter(batch.values()))), batch.get("attention_mask")
    shortest = 2 if mask is None else int((mask != 0).flatten(1).sum(1).argmin())
    return sorted({n for n in (0, 1, shortest, records - 1) if n < records})


def _check_alone(check: Comparison, record: Batch, inside: Run, gradients: bool) -> None:
    """A record alone and without its padding, against the same in a batch; if they differ, say which of both it is.

    Losses of all records are compared, as some lengths may hide a coupling, and the gradients of some.
    """
    trimmed = _trim(record)
    try:
        if gradients:
            check.same("without padding", inside, check.run(trimmed))
        else:
            check.same_losses("without padding", inside.losses, check.losses(trimmed, 0))
    except SelfCheckError:
        check.same("alone", inside, check.run(record))
        raise


def _check_longer(check: Comparison, make_batch: Callable[..., Batch], length: int) -> None:
    """Compare a long record, and a shorter one beside it, with themselves alone."""
    batch = make_batch(2, length)
    with Choices() as choices:
        whole = check.run(batch)
    _check_choices(check, make_batch, choices.lengths, length)
    for n in range(2):
        _check_alone(check, _rows(batch, [n]), whole.rows(slice(n, n + 1)), gradients=n == 1)


def _check_choices(
    check: Comparison, make_batch: Callable[..., Batch], lengths: set[int], length: int = LENGTH
) -> None:
    """Which of equal scores `topk` takes must not matter: torch decides it by the length of the row.

    `lengths` are those of rows in a batch of `length` tokens. A length that is the same in shorter batches is no
    matter of padding. Ties may be rare, so more records are looked at than elsewhere.
    """
    with Choices() as shorter:
        if lengths:
            check.losses(make_batch(COMPANY, SHORT), 0)
    if lengths <= shorter.lengths:
        return
    for seed in range(CHOICE_SEEDS):
        batch = make_batch(RECORDS, length, torch.Generator().manual_seed(seed))
        runs = []
        for preferred in ("first", "last"):
            with Choices(preferred, fixed=shorter.lengths):
                runs.append(check.run(batch))
        try:
            check.same("", *runs)
        except SelfCheckError:
            raise SelfCheckError(
                "Records are not independent: the model chooses among equal scores (`topk` or `sort`), and its"
                " gradients depend on which it takes. torch takes them by the length of the row, so a longer"
                " neighbour, which brings padding, changes a record. Remedy: `per_device_train_batch_size=1`, or"
                " another model."
            ) from None


def _exchanged(batch: Batch, other: Batch) -> dict[str, Tensor]:
    """The batch with another first record, one that differs in as much as possible, its label included."""
    records = len(next(iter(batch.values())))
    differ = [sum(not torch.equal(other[key][n], rows[0]) for key, rows in batch.items()) for n in range(records)]
    n = differ.index(max(differ))
    return {key: torch.cat([other[key][n : n + 1], rows[1:]]) for key, rows in batch.items()}


def _check_training(check: Comparison, batch: Batch, mixed: Batch) -> None:
    """Records beside another first record in training mode: gradients for one seed, losses for more."""
    where, others = "beside another first record in training mode", slice(1, None)
    for seed in range(GRADIENT_SEEDS):
        check.same(where, *(check.run(one, seed).rows(others) for one in (batch, mixed)))
    for seed in range(GRADIENT_SEEDS, GRADIENT_SEEDS + LOSS_SEEDS):
        one, two = (check.losses(x, seed)[others] for x in (batch, mixed))
        check.same_losses(where, one, two)


def _rows(batch: Batch, rows: list[int]) -> dict[str, Tensor]:
    return {key: value.index_select(0, torch.tensor(rows, device=value.device)) for key, value in batch.items()}


def _trim(batch: Batch) -> dict[str, Tensor]:
    """A single record without its padding, where the mask is (1, T), or (1, R, T) for the R rows of a record."""
    mask = batch.get("attention_mask")
    if mask is None or mask.dim() < 2:
        return dict(batch)
    keep = int(mask.sum(-1).max())
    axis = mask.dim() - 1
    aligned = {key for key, x in batch.items() if x.shape[: axis + 1] == mask.shape and not key.startswith("decoder")}
    if batch.get("input_ids") is not None and "labels" in aligned and batch["labels"].dtype == torch.long:
        # Encoder-decoder labels have a length of their own, that of the decoder's inputs if these are given; else they
        # are marked by positions beyond the mask.
        if "decoder_input_ids" in batch or bool((batch["labels"][..., keep:] != -100).any()):
            aligned -= {"labels"}
    return {key: x.narrow(axis, 0, keep) if key in aligned else x for key, x in batch.items()}


def _list(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
