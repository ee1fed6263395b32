"""BookKeeper: one backward pass, a book of (a, ds), and no parameter gradient from autograd."""

import logging
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from .layers import PART, REMEDY, SHARDED_REMEDY, Attribution, Tap, Tapped, UncoveredError, own_losses, refusal, sites
from .method import Full, Method
from .parts import whole
from .persample import Dense, PerSample, sq_norms, weighted_sum

logger = logging.getLogger(__name__)
ANNOUNCED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # weights that a warning has named, by model


class BookKeeper:
    """Collects the per-sample gradients of one batch in one backward pass, without forming them.

    Guarantee: `norms()` and `weighted_sum(c)` equal the results of a loop of plain autograd over the records. A
    trainable parameter whose use is not covered exactly is an error that names it. Leaving the `with` block restores
    the model: forward methods, hooks and `.grad`.

    >>> import torch
    >>> from torch import nn
    >>> model, x, y = nn.Linear(3, 2), torch.randn(5, 3), torch.randint(2, (5,))
    >>> with BookKeeper(model) as book:
    ...     losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    ...     book.backward(losses)
    ...     norms = book.norms()
    ...     grads = book.weighted_sum((1 / norms).clamp(max=1))
    >>> norms.shape, sorted(grads)
    (torch.Size([5]), ['bias', 'weight'])
    """

    leading: int  # size of the leading axis inside the model; known after its first call

    def __init__(self, model: nn.Module, method: Method | None = None, rows_per_record: int = 1) -> None:
        self.model = model
        self.method = method or Full()
        self.graph_root = torch.zeros((), requires_grad=True)
        self.expanded: set[str] = set()
        self.copied: set[str] = set()
        self.formed: set[str] = set()
        self.attribution = Attribution(model)
        self.sharded = False
        # Rows of the model's inputs that belong to each record of the book, one record after the other. There are
        # several where the book's records are people with several rows, augmented rows or pairs. The caller sets it
        # before each call of the model; `losses` then has one entry for each record, not for each row.
        self.rows_per_record = rows_per_record
        self._batch_size: int | None = None
        self._entries: dict[str, PerSample] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._grads: dict[str, Tensor | None] = {}
        self._undo: list[tuple[nn.Module, str, Any]] = []
        self._hooks: list[RemovableHandle] = []
        self._tapped: dict[int, Tapped] = {}
        self._placed: list[tuple[dict, str, Tensor]] = []

    # -- attaching and restoring ------------------------------------------------------------------------------

    def __enter__(self) -> "BookKeeper":
        modules = list(self.model.named_modules())  # one walk for everything below: it takes a millisecond
        for path, module in modules:
            if reason := refusal(module):
                raise UncoveredError(f"`{path}`: {reason}.")
        self._parameters = trainable(self.model)
        if not self._parameters:
            raise UncoveredError(
                "`model` must have trainable parameters, got none. Set `requires_grad` on those to train."
            )
        for name, p in self._parameters.items():
            if p._backward_hooks or p._post_accumulate_grad_hooks:  # wandb.watch, layer-wise optimizers
                raise UncoveredError(
                    f"`{name}` must not have a gradient hook, got one: the hook could read the gradient of one record."
                    " Remedy: remove it (unset WANDB_WATCH; no layer-wise optimizer)."
                )
        self.sharded = any(isinstance(p, DTensor) for _, m in modules for p in m._parameters.values())
        names = {id(p): name for name, p in self._parameters.items()}
        self._grads = {name: p.grad for name, p in self._parameters.items()}
        for p in self._parameters.values():
            p.grad = None
        for site in list(sites(modules)):  # before the first `Tapped` is in the place of a parameter
            tap = Tap(self, site.module, site.path, {local: names[id(p)] for local, p in site.parameters.items()})
            if not self.sharded:
                self._placed += tap.place(self._tapped)
            replacement = site.wrap(tap)
            if replacement is None:
                continue
            self._undo.append((site.module, site.attribute, site.module.__dict__.get(site.attribute)))
            site.module.__dict__[site.attribute] = replacement
        # `hasattr` on the type: on a module it is slow for an attribute that does not exist.
        inner = [m for _, m in modules[1:] if hasattr(type(m), "main_input_name") or "main_input_name" in m.__dict__]
        models = [self.model, *inner]
        self._hooks = [m.register_forward_pre_hook(self._note_batch_size, with_kwargs=True) for m in models]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and self.expanded:
            names = ", ".join(f"`{path}`" for path in sorted(self.expanded))
            error.add_note(
                f"hf_private expanded {names} to one row per record. If the model does not support that: {REMEDY}."
            )
        for module, attribute, before in reversed(self._undo):
            if before is None:
                del module.__dict__[attribute]
            else:
                module.__dict__[attribute] = before
        for hook in self._hooks:
            hook.remove()
        for name, p in self._parameters.items():
            p.grad = self._grads[name]
        for parameters, leaf, parameter in self._placed:
            parameters[leaf] = parameter
        self._undo, self._placed, self._tapped = [], [], {}
        self.__dict__.pop("constants", None)
        self._entries = {}
        self._grads = {}

    def _note_batch_size(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Read N from the inputs of the model, and the leading axis from the inputs of the models inside it."""
        main = kwargs.get(getattr(module, "main_input_name", ""))
        tensors = (x for x in (main, *args, *kwargs.values()) if isinstance(x, Tensor) and x.dim())
        first = next(tensors, None)
        if module is not self.model:
            if first is not None and self._batch_size and len(first) and len(first) % self.num_rows == 0:
                self.leading = len(first)
            return
        if first is None or len(first) == 0:
            raise ValueError(
                "`model` must be called with at least one record, got none"
                f" (arguments: {sorted(kwargs) or len(args)}). If the dataset is text, tokenize it first."
            )
        records, rest = divmod(len(first), self.rows_per_record)
        if rest:
            raise ValueError(
                f"`rows_per_record` must divide the rows that `model` is called with, got {self.rows_per_record} for"
                f" {len(first)} rows."
            )
        if self._batch_size not in (None, records):
            raise ValueError(
                f"`model` must be called with {self._batch_size} records, as before in this book, got {records}."
            )
        self._batch_size = records
        self.leading = len(first)
        self.attribution.begin(args, kwargs)

    @cached_property
    def constants(self) -> set[int]:
        """Where the model's parameters and buffers are stored: no record is in them, whatever their shape."""
        return {x.untyped_storage().data_ptr() for x in (*self.model.parameters(), *self.model.buffers())}

    @property
    def has_batch(self) -> bool:
        """Whether the model was called, so that the number of records is known."""
        return self._batch_size is not None

    @property
    def batch_size(self) -> int:
        """Number of records N in the batch that the model was called with."""
        if self._batch_size is None:
            raise RuntimeError("`batch_size` is known after a call of the model itself, not of a module inside it.")
        return self._batch_size

    @property
    def num_rows(self) -> int:
        """Number of rows in the batch that the model was called with."""
        return self.batch_size * self.rows_per_record

    @property
    def drops_inputs(self) -> bool:
        """Whether the book does not keep the inputs of layers, so that it pays to recompute some of them."""
        return self.method.drops_inputs

    # -- the book ---------------------------------------------------------------------------------------------

    def observe(self, name: str, value: PerSample) -> None:
        """Add one use of parameter `name` to the book; the rules call this inside the backward pass."""
        name, value = whole(name, value)
        for block, part in self.method.observe(name, value).items():
            self._entries[block] = self._entries[block] + part if block in self._entries else part

    def backward(self, losses: Tensor) -> None:
        """Run the backward pass of `losses` (N,), one loss per record, each depending on its own record only."""
        if losses.shape != (self.batch_size,):
            raise ValueError(
                f"`losses` must have shape ({self.batch_size},), one loss per record, got {tuple(losses.shape)}. "
                "A mean over the batch couples the records: use reduction='none'."
            )
        losses = own_losses(losses)
        if not losses.requires_grad:
            raise UncoveredError("`losses` must depend on a trainable parameter, got losses without a graph.")
        if self.attribution.measure(losses, self.sharded):
            self._reached()
        losses.sum().backward()
        reached = self._reached()
        names = ", ".join(f"`{name}`" for name in reached)
        if reached and self.sharded:  # FSDP2 has added up what autograd found on all ranks
            raise UncoveredError(
                f"{names}: used in a way that no rule covers, so the gradients of the records cannot be separated."
                f" Remedy: {SHARDED_REMEDY}."
            )
        if reached and self.batch_size > 1:
            raise UncoveredError(
                f"{names}: used in a way that no rule covers, so the gradients of the {self.batch_size} records cannot"
                f" be separated. Remedy: {REMEDY}."
            )
        for name, grad in reached.items():  # in a batch of one, autograd's gradient is that record's
            self.observe(name, Dense(grad.unsqueeze(0)))
        self._announce_copies()

    def _announce_copies(self) -> None:
        """Say once of a model what it costs that no rule knows one of its weights."""
        announced = ANNOUNCED.setdefault(self.model, set())
        new = {name.partition(PART)[0] for name in self.formed} - announced
        if new:
            announced |= new
            shown = sorted(new)
            names = ", ".join(f"`{name}`" for name in shown[:5]) + (
                f" and {len(new) - 5} more" if len(new) > 5 else ""
            )
            logger.warning(
                "%s: no rule covers this use of a weight, so the gradient of each record is formed. That is exact, but"
                " slower, and takes the memory of a copy for each record. Remedy: freeze it if that is too much.",
                names,
            )

    def _reached(self) -> dict[str, Tensor]:
        """What autograd found for parameters, by name, and forget it."""
        found: dict[str, Tensor] = {}
        with torch._C.DisableTorchFunctionSubclass():  # each look at a tapped parameter would call Python
            for name, p in self._parameters.items():
                for leaf in (p, self._tapped.get(id(p))):
                    if leaf is not None and leaf.grad is not None:
                        found[name] = found[name] + leaf.grad if name in found else leaf.grad
                        leaf.grad = None
        return found

    def entries(self) -> Mapping[str, PerSample]:
        """The book: per-sample gradients by block. Blocks are parameters, by name, unless a method changes that."""
        return self._entries

    def records(self) -> Mapping[str, PerSample]:
        """The older name of `entries`."""
        return self._entries

    def pop_entries(self) -> dict[str, PerSample]:
        """Return the entries and leave an empty book, for a next batch of any size.

        One open book serves all micro-batches of a step, since opening it takes milliseconds. The caller owns the
        entries and can free each of them as soon as it is summed.
        """
        entries = self._entries
        self._entries = {}
        self._batch_size = None
        return entries

    def norms(self) -> Tensor:
        """L2 norm (N,) of each record's gradient over all trainable parameters."""
        if not self._entries:
            raise RuntimeError("The book has no entries: call `backward(losses)` first.")
        return torch.stack([*sq_norms(self._entries).values()]).sum(0).sqrt()

    def weighted_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """`sum_n factors_n g_n` by block, for `factors` (N,). A factor of 0 removes a record, even one with NaN."""
        if factors.shape != (self.batch_size,):
            raise ValueError(f"`factors` must have shape ({self.batch_size},), got {tuple(factors.shape)}.")
        return {block: weighted_sum(value, factors) for block, value in self._entries.items()}


def rows_per_record(loss: Callable[..., Tensor]) -> int:
    """Rows that a loss makes of each record of a batch, one record after the other: 1, unless the loss says otherwise.

    The loss of a preference pair calls the model with both sides of it, so its attribute `rows_per_record` is 2.

    >>> rows_per_record(torch.nn.functional.mse_loss)
    1
    """
    return getattr(loss, "rows_per_record", 1)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by their first name; a tied weight appears once. Under FSDP2 they are shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):  # an evaluation leaves the weights of the root gathered, as other objects
            module.reshard()
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
