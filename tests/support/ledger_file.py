"""A small ledger, for the tests of its file."""

from pathlib import Path

from hf_private.accounting.events import Event
from hf_private.spending.ledger import PrivacyLedger

CHEAP, DEAR = Event(0.01, (2.0,)), Event(0.02, (1.0, 3.0))


def steps(ledger: PrivacyLedger) -> dict[tuple[float, ...], int]:
    return {event.releases: event.steps for event in ledger.events}


def write(path: Path, cheap: int = 3, dear: int = 2) -> bytes:
    """A ledger of a run record and two phases; returns its bytes."""
    with PrivacyLedger(path) as ledger:
        ledger.record("run", {"clip_norm": 1.0, "n": 100})
        for _ in range(cheap):
            ledger.charge(CHEAP, phase="one")
        for _ in range(dear):
            ledger.charge(DEAR, phase="two")
    return path.read_bytes()
