"""BookKeeper: one backward pass, a book of (a, ds), and no parameter gradient computed by autograd."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .layers import REMEDY, SHARDED_REMEDY, Attribution, Tap, UncoveredError, refusal, sites
from .method import Full, Method
from .persample import Dense, PerSample, sq_norms, weighted_sum


class BookKeeper:
    """Collects the per-sample gradients of one batch in one backward pass, without forming them.

    Guarantee: `norms()` and `weighted_sum(c)` equal what a loop of plain autograd over the records gives; a
    trainable parameter whose use is not covered exactly is an error that names it. Leaving the block restores the
    model: forward methods, hooks and `.grad`.

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

    def __init__(self, model: nn.Module, method: Method | None = None) -> None:
        self.model, self.method = model, method or Full()
        self.graph_root = torch.zeros((), requires_grad=True)
        self._batch_size: int | None = None
        self._records: dict[str, PerSample] = {}
        self.expanded: set[str] = set()
        self.guessed: set[str] = set()
        self.attribution = Attribution(model)
        self._undo: list[tuple[nn.Module, str, Any]] = []

    # -- attaching and restoring ------------------------------------------------------------------------------

    def __enter__(self) -> "BookKeeper":
        modules = list(self.model.named_modules())  # one walk for all that follows: it takes a millisecond
        for path, module in modules:
            if reason := refusal(module):
                raise UncoveredError(f"`{path}`: {reason}.")
        self._parameters = trainable(self.model)
        if not self._parameters:
            raise UncoveredError("The model has no trainable parameter: set `requires_grad` on what is to be trained.")
        for name, p in self._parameters.items():
            if p._backward_hooks or p._post_accumulate_grad_hooks:  # wandb.watch, layer-wise optimizers
                raise UncoveredError(
                    f"`{name}` must not have a gradient hook, got one: it can see the gradient of a record. Remedy:"
                    " remove it (unset WANDB_WATCH; no layer-wise optimizer)."
                )
        self.sharded = any(isinstance(p, DTensor) for _, m in modules for p in m._parameters.values())
        names = {id(p): name for name, p in self._parameters.items()}
        self._grads = {name: p.grad for name, p in self._parameters.items()}
        for p in self._parameters.values():
            p.grad = None
        for site in sites(modules):
            tap = Tap(self, site.module, site.path, {local: names[id(p)] for local, p in site.parameters.items()})
            replacement = site.wrap(tap)
            self._undo.append((site.module, site.attribute, site.module.__dict__.get(site.attribute)))
            site.module.__dict__[site.attribute] = replacement
        inner = [m for _, m in modules[1:] if hasattr(type(m), "main_input_name") or "main_input_name" in m.__dict__]
        models = [self.model, *inner]  # asking the type: a module is slow to say what it does not have
        self._hooks = [m.register_forward_pre_hook(self._note_batch_size, with_kwargs=True) for m in models]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and self.expanded:
            names = ", ".join(f"`{path}`" for path in sorted(self.expanded))
            error.add_note(
                f"hf_private gave {names} one row per record instead of one row for all. "
                f"If the model cannot take that: {REMEDY}."
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
        self._undo, self._records, self._grads = [], {}, {}
        if type(error) is RuntimeError and self.guessed:
            names = ", ".join(f"`{name}`" for name in sorted(self.guessed))
            raise UncoveredError(
                f"{names}: the model failed with one row of positions per record"
                f" instead of one row for all ({str(error).splitlines()[0]}). Remedy: {REMEDY}."
            ) from error

    def _note_batch_size(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Read N off the inputs of the model, and the leading axis off those of the models inside it."""
        main = kwargs.get(getattr(module, "main_input_name", ""))
        tensors = (x for x in (main, *args, *kwargs.values()) if isinstance(x, Tensor) and x.dim())
        first = next(tensors, None)
        if module is not self.model:
            if first is not None and self._batch_size and len(first) and len(first) % self._batch_size == 0:
                self.leading = len(first)
            return
        if first is None or len(first) == 0:
            raise ValueError(
                "The model must be called with at least one record, got none"
                f" (arguments: {sorted(kwargs) or len(args)}). If the dataset is text, tokenize it first."
            )
        if self._batch_size not in (None, len(first)):
            raise ValueError(f"The model was called with {len(first)} records after {self._batch_size} in one book.")
        self._batch_size = self.leading = len(first)
        self.attribution.begin(args, kwargs)

    @property
    def batch_size(self) -> int:
        """Number of records N in the batch that the model was called with."""
        if self._batch_size is None:
            raise RuntimeError("The batch size is known once the model itself is called, not a part of it.")
        return self._batch_size

    @property
    def drops_inputs(self) -> bool:
        """Whether layers' inputs are not kept in the book, so that it pays to make some of them again."""
        return self.method.drops_inputs

    # -- the book ---------------------------------------------------------------------------------------------

    def observe(self, name: str, value: PerSample) -> None:
        """Enter one use of parameter `name`; the rules call this inside the backward pass."""
        for block, part in self.method.observe(name, value).items():
            self._records[block] = self._records[block] + part if block in self._records else part

    def backward(self, losses: Tensor) -> None:
        """Run the backward pass of `losses` (N,), one loss per record, each depending on its own record only."""
        if losses.shape != (self.batch_size,):
            raise ValueError(
                f"`losses` must have shape ({self.batch_size},), one loss per record, got {tuple(losses.shape)}. "
                "A mean over the batch would let records meet: use reduction='none'."
            )
        if not losses.requires_grad:
            raise UncoveredError("`losses` does not depend on any trainable parameter.")
        if self.attribution.measure(losses, self.sharded):
            for p in self._parameters.values():
                p.grad = None
        losses.sum().backward()
        reached = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        for p in self._parameters.values():
            p.grad = None
        names = ", ".join(f"`{name}`" for name in reached)
        if reached and self.sharded:  # FSDP2 has added up what autograd found on all ranks
            raise UncoveredError(
                f"{names}: used in a way that no rule covers, so the gradients of all ranks' records cannot be told"
                f" apart. Remedy: {SHARDED_REMEDY}."
            )
        if reached and self.batch_size > 1:
            raise UncoveredError(
                f"{names}: used in a way that no rule covers, so the gradients of the {self.batch_size} records cannot"
                f" be told apart. Remedy: {REMEDY}."
            )
        for name, grad in reached.items():  # in a batch of one, autograd's gradient is that record's
            self.observe(name, Dense(grad.unsqueeze(0)))

    def records(self) -> Mapping[str, PerSample]:
        """The book: per-sample gradients by block (by parameter name, unless a method changes that)."""
        return self._records

    def pop_entries(self) -> dict[str, PerSample]:
        """Hand the page over and turn to an empty one, for a batch of any size: what the reader is done with is freed
        at once, and one open book serves all micro-batches of a step (opening it takes milliseconds)."""
        records, self._records, self._batch_size = self._records, {}, None
        return records

    def norms(self) -> Tensor:
        """L2 norm (N,) of each record's gradient over all trainable parameters."""
        if not self._records:
            raise RuntimeError("The book is empty: call `backward(losses)` first.")
        return sum(sq_norms(self._records).values()).sqrt()

    def weighted_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """`sum_n factors_n g_n` by block, for `factors` (N,); a factor of 0 removes a record, NaN and all."""
        if factors.shape != (self.batch_size,):
            raise ValueError(f"`factors` must have shape ({self.batch_size},), got {tuple(factors.shape)}.")
        return {block: weighted_sum(value, factors) for block, value in self._records.items()}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by their first name; a tied weight appears once. Under FSDP2 in shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):  # an evaluation leaves the root's weights gathered, as other objects
            module.reshard()
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
