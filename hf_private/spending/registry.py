"""What this process has trained: parameter -> the runs that its value has cost, as long as the parameter lives.

Parameters are found by identity, in whatever model they are now, and copies of what a run has left by their content.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hf_private.accounting.events import Event

from .costs import Statement
from .fingerprints import fingerprint, parameters_of
from .spending import Spending
from .statement import not_private


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
        private = not not_private(events, statement["runs"])
        return {**statement, "private": private, "tuning": self.spending.tuning}


_trained = WeakTensorKeyDictionary()  # parameter -> the trainings that its value has cost
_left = WeakTensorKeyDictionary()  # parameter -> fingerprint that the last of them has left
_recognised = WeakTensorKeyDictionary()  # parameters that were found by their content
_copies: dict[bytes, tuple[Training, ...]] = {}  # that fingerprint -> the same trainings

# A smaller parameter is no evidence of a copy by itself: Adam's first step moves each element by plus or minus the
# learning rate, so that two runs leave equal biases of two elements one time in four.
EVIDENCE = 16  # elements


def is_known(p: Tensor) -> bool:
    """Whether this process has trained a parameter, or one that it is a copy of."""
    return p in _trained


def is_copy(p: Tensor) -> bool:
    """Whether a parameter is known by its content alone: it may have been saved and loaded since."""
    return p in _recognised


def trainings(model: nn.Module) -> list[Training]:
    """The runs of this process that the parameters of a model have cost."""
    return list(dict.fromkeys(training for p in parameters_of(model) for training in _trained.get(p, ())))


def register(model: nn.Module, training: Training, taken_over: Iterable[Training] = ()) -> None:
    """Add a run to what the parameters of a model have cost, in place of those that its ledger has taken over."""
    replaced = {one for one in taken_over if one.ended is not None} - {training}
    for p in parameters_of(model):
        _recognised.pop(p, None)
        _trained[p] = tuple(dict.fromkeys((*(one for one in _trained.get(p, ()) if one not in replaced), training)))


def remember(left: Mapping[Tensor, bytes], except_for: Iterable[bytes]) -> None:
    """Keep the fingerprints that a run has left, to find changes, and copies unless they were there before the run."""
    before = set(except_for)
    for p, digest in left.items():
        _left[p] = digest
        if digest not in before:
            _copies[digest] = tuple(dict.fromkeys((*_copies.get(digest, ()), *_trained.get(p, ()))))


def expect_changes(model: nn.Module, trainable_only: bool = True) -> None:
    """Forget the fingerprints of parameters that a run is going to change."""
    for p in parameters_of(model):
        if p.requires_grad or not trainable_only:
            _left.pop(p, None)


def recognise(model: nn.Module) -> None:
    """Find copies of what runs of this process have left: they have cost the same."""
    unknown = [p for p in parameters_of(model) if p not in _trained and not p.is_meta] if _copies else []
    found = {p: digest for p in unknown if (digest := fingerprint(p)) in _copies}
    certain = {training for p, digest in found.items() if p.numel() >= EVIDENCE for training in _copies[digest]}
    for p, digest in found.items():
        cost = tuple(training for training in _copies[digest] if p.numel() >= EVIDENCE or training in certain)
        if cost:
            _trained[p] = cost
            _left[p] = digest
            _recognised[p] = True


def changed_since(model: nn.Module) -> str | None:
    """A parameter that is not as the last run has left it; None if there is none."""
    parameters_of(model)
    for name, p in model.named_parameters():
        if p in _left and fingerprint(p) != _left[p]:
            return name
    return None
