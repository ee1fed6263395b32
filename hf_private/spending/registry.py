"""Registry of the parameters that this process has trained: parameter -> the runs that its value has cost.

Parameters are found by identity, also inside another model, and copies of trained ones by their content.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hf_private.accounting.events import Event

from .admissions import not_private
from .costs import Statement
from .fingerprints import fingerprint, parameters_of
from .spending import Spending


class Training:
    """One run on some parameters: its statement is read from the ledger until the run has ended, and is fixed then."""

    def __init__(self, spending: Spending) -> None:
        self.spending = spending
        self.ended: Statement | None = None

    def end(self) -> None:
        """Fix the statement, on the rank that has the ledger."""
        self.ended = self.spending.statement() if self.spending.writes else {}

    @property
    def statement(self) -> Statement:
        """The ledger so far, with the runs that its folder's statement charges by now."""
        statement = self.spending.statement() if self.ended is None else self.ended
        events = [Event.from_dict(event) for event in statement["ledger"]["events"]]
        return {**statement, "private": not not_private(events, statement["runs"]), "tuning": self.spending.tuning}


class Known(NamedTuple):
    """What is known of a parameter."""

    cost: tuple[Training, ...] = ()  # the trainings that its value has cost
    left: bytes | None = None  # its fingerprint after the last of them; None while a run changes it
    is_copy: bool = False  # found by its content alone: it may have been saved and loaded since


_known = WeakTensorKeyDictionary()  # parameter -> Known
_copies: dict[bytes, tuple[Training, ...]] = {}  # fingerprint that a run has left -> the trainings that it has cost

# A smaller parameter is no evidence of a copy by itself: Adam's first step moves each element by plus or minus the
# learning rate, so that two runs leave equal biases of two elements one time in four.
EVIDENCE = 16  # elements


def known(p: Tensor) -> Known:
    """What this process has done to a parameter, or to one that it is a copy of."""
    return _known.get(p, Known())


def trainings(model: nn.Module) -> list[Training]:
    """The runs of this process that the parameters of a model have cost."""
    return list(dict.fromkeys(training for p in parameters_of(model) for training in known(p).cost))


def register(model: nn.Module, training: Training, taken_over: Iterable[Training] = (), loads: bool = False) -> None:
    """Add a run to what a model's parameters have cost, in place of those that its ledger has taken over.

    Trainable parameters are going to change, and all of them if the run `loads` a checkpoint.
    """
    replaced = {one for one in taken_over if one.ended is not None} - {training}
    for p in parameters_of(model):
        cost = dict.fromkeys((*(one for one in known(p).cost if one not in replaced), training))
        _known[p] = Known(tuple(cost), None if p.requires_grad or loads else known(p).left)


def remember(left: Mapping[Tensor, bytes], before: Collection[bytes]) -> None:
    """Keep the fingerprints that a run has left, to find changes, and copies unless they were there before the run."""
    for p, digest in left.items():
        _known[p] = known(p)._replace(left=digest)
        if digest not in before:
            _copies[digest] = tuple(dict.fromkeys((*_copies.get(digest, ()), *known(p).cost)))


def recognise(model: nn.Module) -> None:
    """Find copies of what runs of this process have left: they have cost the same."""
    unknown = [p for p in parameters_of(model) if not known(p).cost and not p.is_meta] if _copies else []
    found = {p: digest for p in unknown if (digest := fingerprint(p)) in _copies}
    certain = {training for p, digest in found.items() if p.numel() >= EVIDENCE for training in _copies[digest]}
    for p, digest in found.items():
        cost = tuple(training for training in _copies[digest] if p.numel() >= EVIDENCE or training in certain)
        if cost:
            _known[p] = Known(cost, digest, is_copy=True)


def changed_since(model: nn.Module) -> str | None:
    """A parameter that is not as the last run has left it; None if there is none."""
    parameters_of(model)
    expected = ((name, p, known(p).left) for name, p in model.named_parameters())
    return next((name for name, p, left in expected if left is not None and fingerprint(p) != left), None)
