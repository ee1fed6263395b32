"""Does a privacy claim follow from its own statement? Nothing is unpickled, and no model is loaded."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub.errors import HTTPError

from hf_private.accounting.events import Event
from hf_private.spending.ledger import LedgerError, PrivacyLedger
from hf_private.spending.statement import SCHEMA_VERSION, STATEMENT, schema

from .card_check import check_card
from .findings import HOLDS, UNKNOWN, WARNING, WRONG, Finding, Found, Verdict
from .recompute import check_consistency, check_epsilon
from .release import may_hold_weights, reason_to_stay, scan
from .schema import parse_json, violations
from .snapshot import LEDGER_LIMIT, Snapshot, load_snapshot

SCOPE = "This shows that the claim follows from the statement, not that the statement describes what ran."
TIME_LIMIT = 4.0  # seconds of processor time for hashes and accountants together; most models take about one
REPORTED = 20  # violations of the schema
NONSENSE = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


def verify(path_or_repo: str | Path, revision: str | None = None, time_limit: float = TIME_LIMIT) -> Verdict:
    """Check the claim of a saved model: its statement against itself, its card, its ledger and its weights.

    >>> verdict = verify(getfixture("tmp_path"))  # an empty folder claims nothing
    >>> verdict.status, verdict.code
    ('cannot tell', 2)

    Args:
        path_or_repo: Folder of a saved model, or a repository on the Hub.
        revision: Branch, tag or commit on the Hub.
        time_limit: Seconds of processor time for hashing the weights and for the accountants, half of it for each.
            Beyond them, the verdict is "cannot tell".
    """
    snapshot, statement, problems = _read(str(path_or_repo), revision, time_limit / 2)
    if snapshot is None or statement is None:
        return Verdict(problems)
    checks: dict[str, Callable[[], Found]] = {
        "private": lambda: check_private(statement),
        "epsilon": lambda: check_epsilon(statement, time_limit / 2),
        "facts": lambda: check_consistency(statement),
        "card": lambda: check_card(statement, snapshot),
        "ledger": lambda: check_ledger(statement, snapshot),
        "weights": lambda: check_weights(statement, snapshot),
        "files": lambda: check_files(snapshot),
        "caveats": lambda: check_caveats(statement),
    }
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            found = [Finding(name, status, message) for status, message in check()]
        except NONSENSE as error:  # the schema leaves some facts open, and anyone may have written them
            found = [Finding(name, WRONG, f"{STATEMENT} makes no sense: {type(error).__name__}: {error}")]
        findings += found or [Finding(name, HOLDS, PASSED[name])]
    return Verdict(tuple(findings), statement)


def read(path_or_repo: str, revision: str | None = None) -> tuple[dict[str, Any] | None, Finding | None]:
    """The statement of a model, or the first reason why it has none that can be read."""
    _, statement, problems = _read(path_or_repo, revision, 0.0)
    return statement, next(iter(problems), None)


def _read(
    path_or_repo: str, revision: str | None, time_limit: float
) -> tuple[Snapshot | None, dict[str, Any] | None, tuple[Finding, ...]]:
    try:
        snapshot = load_snapshot(path_or_repo, revision, time_limit)
    except (OSError, ValueError, HTTPError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return None, None, (_problem(UNKNOWN, f"`{path_or_repo}` cannot be read: {reason}"),)
    text = snapshot.texts[STATEMENT]
    if text is None:
        return snapshot, None, (_problem(UNKNOWN, f"there is no {STATEMENT}: nothing is claimed that can be checked"),)
    try:
        statement = parse_json(text)
    except (ValueError, RecursionError) as error:
        return snapshot, None, (_problem(WRONG, f"{STATEMENT} is not JSON: {error}"),)
    if isinstance(statement, dict) and statement.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        newer = f"`schema_version` is {str(statement['schema_version'])[:80]!r}, {SCHEMA_VERSION} is known here"
        return snapshot, None, (_problem(UNKNOWN, newer),)
    broken = [_problem(WRONG, f"{STATEMENT}: {line}") for line in islice(violations(statement, schema()), REPORTED)]
    return snapshot, None if broken else statement, tuple(broken)


def _problem(status: str, message: str) -> Finding:
    return Finding("statement", status, message)


def check_private(statement: dict[str, Any]) -> Found:
    """A statement that itself says that the model is not private."""
    if not statement["private"]:
        yield WRONG, f"NOT PRIVATE, by its own statement: {'; '.join(statement['not_private_because'])}"


def check_ledger(statement: dict[str, Any], snapshot: Snapshot) -> Found:
    """The hash chain, if the ledger lies beside the model. It stays with whoever trained and is never published."""
    if snapshot.ledger is None:
        return
    if snapshot.ledger.stat().st_size > LEDGER_LIMIT:
        yield UNKNOWN, f"the ledger has more than {LEDGER_LIMIT} bytes and is not read"
        return
    claimed = statement["ledger"]
    try:
        ledger = PrivacyLedger.read(snapshot.ledger)
        then = _as_it_was(snapshot.ledger, claimed["length"])
    except LedgerError as error:
        yield WRONG, f"the ledger is broken: {error}"
        return
    if not ledger.contains(claimed["length"], claimed["head"]):
        head = str(claimed["head"])[:16]
        yield WRONG, f"`ledger.head` {head} is not the head of line {claimed['length']} of the ledger"
        return
    events = [Event.from_dict(event) for event in claimed["events"]]
    if sorted(events, key=repr) != sorted(then.events, key=repr):
        yield WRONG, "`ledger.events` are not the steps in the ledger"
    if [_facts(run) for run in statement["runs"]] != [_facts(run) for run in then.lines if run["kind"] == "run"]:
        yield WRONG, "`runs` are not the runs in the ledger"
    more = ledger.length - claimed["length"]
    if more > 0:
        yield WARNING, f"the ledger has {more} more lines: this claim does not cover later steps on this data"


def _as_it_was(path: Path, length: int) -> PrivacyLedger:
    """The ledger at the time when it had `length` lines."""
    with TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        copy.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:length]))
        return PrivacyLedger.read(copy)


def _facts(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key != "kind"}


def check_weights(statement: dict[str, Any], snapshot: Snapshot) -> Found:
    """Whether these are the weights that the claim is about."""
    stated = statement["weights"]
    if not stated:
        yield UNKNOWN, "`weights` is empty: the claim is about no file"
    others = {name for name in snapshot.names if may_hold_weights(name)}
    for name in sorted({*stated, *snapshot.weights, *others}) if stated else ():
        if name not in stated:
            yield UNKNOWN, f"`{name}` is not in the statement: nothing is claimed about it"
        elif name not in snapshot.weights:
            yield UNKNOWN, f"`{name}` is missing: the claim is about that file"
        elif snapshot.weights[name] is None:
            yield UNKNOWN, f"`{name}` takes too long to hash: raise the limit with `--time-limit`"
        elif stated[name] != snapshot.weights[name]:
            yield UNKNOWN, f"`{name}` is not the file that the claim is about: swapped, merged or quantised"


def check_files(snapshot: Snapshot) -> Found:
    """Files that should not have been published, or cannot be."""
    if snapshot.folder is None:
        for name in snapshot.names:
            reason = reason_to_stay(name)
            if reason:
                yield WRONG, f"`{name}` is published: {reason}"
    else:
        for name, reason in scan(snapshot.folder).refused.items():
            yield WARNING, f"a push would be refused: `{name}` {reason}"


def check_caveats(statement: dict[str, Any]) -> Found:
    """Caveats of a claim that holds."""
    for caveat in statement["caveats"]:
        yield WARNING, caveat


PASSED = {
    "private": "the statement claims privacy",
    "epsilon": "PRV and PLD, recomputed from the stated steps, give the claim",
    "facts": "batch sizes, sample rates and noise of the runs agree",
    "card": "text, metadata and curve say what the statement says",
    "ledger": "its chain agrees with the statement, or it is not here",
    "weights": "the hashes are those of the statement",
    "files": "nothing here that must not be published",
    "caveats": "none",
}
