"""Does a privacy claim follow from its own record? Read, recompute, compare. Nothing is unpickled, no model loaded."""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub.errors import HTTPError
from yaml import YAMLError

from hf_private import __version__
from hf_private.accounting.budget import delta_curve
from hf_private.accounting.events import Event
from hf_private.spending.ledger import LedgerError, PrivacyLedger
from hf_private.spending.statement import RECORD, SCHEMA_VERSION, rebuild, round_up, schema

from .card import CARD, TAGS, render_caution, render_curve, render_section, split_card, yaml_block
from .curve import CURVE_FILE
from .release import reason_to_stay, scan
from .schema import violations
from .snapshot import Snapshot, load_snapshot

SCOPE = "This shows that the claim follows from the record, not that the record is what ran."
TOLERANCE = 1e-3  # of an accountant's number, between machines
NUMBER = r"(\d+(?:\.\d+)?(?:e-?\d+)?)"
CLAIM = re.compile(
    rf"(?:\beps(?:ilon)?\b|ε)\W{{0,6}}?(?:of |is |below |under |at most )?{NUMBER}"
    rf"|\({NUMBER},\s*[\d.e-]+\)\W?(?:DP|diff)",
    re.IGNORECASE,
)
OF_THE_RUN = ("clip_norm", "clipping", "gamma", "noise", "train_only", "carriers", "anchors", "log_nonprivate")

HOLDS, WRONG, UNKNOWN, WARNING = "holds", "wrong", "cannot tell", "warning"
CODES = {HOLDS: 0, WRONG: 1, UNKNOWN: 2}
NONSENSE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class Finding:
    """What one check found: `status` is "holds", "wrong", "cannot tell" or "warning"."""

    check: str
    status: str
    message: str


@dataclass(frozen=True)
class Verdict:
    """All findings about one model."""

    findings: tuple[Finding, ...]
    record: dict[str, Any] | None = None

    @property
    def status(self) -> str:
        """The worst of all findings: "wrong", then "cannot tell", then "holds"."""
        found = {finding.status for finding in self.findings}
        return next((status for status in (WRONG, UNKNOWN) if status in found), HOLDS)

    @property
    def code(self) -> int:
        """Exit code: 0 the claim holds, 1 it does not, 2 cannot tell."""
        return CODES[self.status]


def verify(path_or_repo: str, revision: str | None = None) -> Verdict:
    """Check the claim of a saved model: its record against itself, its card, its ledger and its weights.

    >>> verdict = verify(getfixture("tmp_path"))  # an empty folder claims nothing
    >>> verdict.status, verdict.code
    ('cannot tell', 2)

    Args:
        path_or_repo: Folder of a saved model, or a repository on the Hub.
    """
    snapshot, record, problems = _read(str(path_or_repo), revision)
    if problems:
        return Verdict(problems)
    findings = []
    for name, check in CHECKS.items():
        try:
            found = [Finding(name, *finding) for finding in check(record, snapshot)]
        except NONSENSE as error:  # the schema leaves some facts open, and a stranger may have written them
            found = [Finding(name, WRONG, f"{RECORD} makes no sense: {type(error).__name__}: {error}")]
        findings += found or [Finding(name, HOLDS, PASSED[name])]
    return Verdict(tuple(findings), record)


def read(path_or_repo: str, revision: str | None = None) -> tuple[dict[str, Any] | None, Finding | None]:
    """The record of a model, or the first reason why it has none that can be read."""
    _, record, problems = _read(path_or_repo, revision)
    return record, next(iter(problems), None)


def _read(path_or_repo: str, revision: str | None) -> tuple[Snapshot | None, Any, tuple[Finding, ...]]:
    try:
        snapshot = load_snapshot(path_or_repo, revision)
    except (OSError, ValueError, HTTPError) as error:
        reason = str(error).strip().split("\n")[0]
        return None, None, (Finding("record", UNKNOWN, f"`{path_or_repo}` cannot be read: {reason}"),)
    text = snapshot.texts[RECORD]
    if text is None:
        missing = f"there is no {RECORD}: nothing is claimed that can be checked"
        return snapshot, None, (Finding("record", UNKNOWN, missing),)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        return snapshot, None, (Finding("record", WRONG, f"{RECORD} is not JSON: {error}"),)
    if isinstance(record, dict) and record.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        newer = f"{RECORD} has schema version {record['schema_version']!r}, {SCHEMA_VERSION} is known here"
        return snapshot, None, (Finding("record", UNKNOWN, newer),)
    broken = tuple(Finding("record", WRONG, f"{RECORD}: {line}") for line in violations(record, schema()))
    return snapshot, None if broken else record, broken


Found = Iterator[tuple[str, str]]  # (status, message) of all that is not as it should be


def check_private(record: dict[str, Any], snapshot: Snapshot) -> Found:
    """A record that says itself that it is not private."""
    if not record["private"]:
        yield WRONG, f"NOT PRIVATE, by its own record: {'; '.join(record['not_private_because'])}"


def check_epsilon(record: dict[str, Any], snapshot: Snapshot) -> Found:
    """Everything that is claimed, computed again from the recorded steps."""
    claim = record["guarantee"]
    if claim["epsilon"] != "inf" != claim["epsilon_unrounded"]:
        if claim["epsilon"] != (expected := round_up(claim["epsilon_unrounded"])):
            yield WRONG, f"`guarantee.epsilon` is {claim['epsilon']}, rounded up it is {expected}"
    try:
        again = rebuild(record)
    except (ValueError, KeyError, TypeError) as error:
        yield WRONG, f"the recorded facts make no sense: {error}"
        return
    same_words = record["versions"]["hf_private"] == again["versions"]["hf_private"] == __version__
    for where, got, expected in differences(record, again, same_words):
        if not where.startswith(("guarantee.curve", "weights")):
            yield WRONG, f"`{where}` is {got!r}, the recorded facts give {expected!r}"
    yield from _curve(record)


def _curve(record: dict[str, Any]) -> Found:
    points = record["guarantee"]["curve"]
    events = [Event.from_dict(event) for event in record["ledger"]["events"]]
    if record["private"] and len(points) < 2:
        yield WRONG, "`guarantee.curve` is missing"
    recomputed = delta_curve(events, [point["epsilon"] for point in points]) if points else []
    for point, (epsilon, delta) in zip(points, recomputed, strict=True):
        if not math.isclose(point["delta"], delta, rel_tol=0.02, abs_tol=1e-14):
            yield WRONG, f"`guarantee.curve` has delta {point['delta']} at epsilon {epsilon}, it is {delta:.3g}"


def check_consistency(record: dict[str, Any], snapshot: Snapshot) -> Found:
    """The facts of one run against each other."""
    n, runs = record["dataset"]["num_records"], record["runs"]
    if record["private"] and not runs:
        yield WRONG, "`runs` is empty: it is not recorded who took the steps"
    for name in OF_THE_RUN:
        if runs and name in runs[-1] and runs[-1][name] != record["settings"].get(name):
            got, ran = record["settings"].get(name), runs[-1][name]
            yield WRONG, f"`settings.{name}` is {got!r}, the last run's is {ran!r}"
    for index, run in enumerate(runs):
        records, size, rate = run.get("num_records", n), run.get("expected_batch_size"), run.get("sample_rate")
        if records and size and rate and not math.isclose(size / records, rate, rel_tol=1e-9):
            yield WRONG, f"`runs[{index}].sample_rate` is {rate}, {size} of {records} records are {size / records:.6g}"
    planned = [(run["sample_rate"], run["noise_multiplier"]) for run in runs if run.get("sample_rate")]
    if record["ledger"].get("continues"):  # the steps of a base model were taken by runs that are not recorded here
        return
    for index, phase in enumerate(record["mechanism"]["phases"]):
        rate, noise = phase["sample_rate"], phase["noise_multiplier"]
        if planned and not any(math.isclose(rate, q) and math.isclose(noise, s, abs_tol=1e-12) for q, s in planned):
            got = f"noise multiplier {noise}, sample rate {rate}"
            yield WRONG, f"`mechanism.phases[{index}]` ({got}) is of no recorded run"


def check_card(record: dict[str, Any], snapshot: Snapshot) -> Found:
    """README.md: its section, its warning, its metadata, and claims beside them."""
    if snapshot.texts[CARD] is None:
        yield UNKNOWN, f"there is no {CARD}"
        return
    try:
        card, caution, section, rest = split_card(snapshot.texts[CARD])
    except (ValueError, YAMLError) as error:
        yield WRONG, f"{CARD} cannot be read: {str(error).splitlines()[0]}"
        return
    if record["versions"]["hf_private"] == __version__:
        yield from _compare_text("privacy section", section, render_section(record))
    elif not re.search(rf"epsilon = {re.escape(str(record['guarantee']['epsilon']))}\b", section):
        yield WRONG, f"{CARD}: the privacy section does not say epsilon = {record['guarantee']['epsilon']}"
    yield from _compare_text("warning", caution, render_caution(record))
    yield from _metadata(record, card.data, snapshot.texts[RECORD])
    claimed = float(record["guarantee"]["epsilon"])
    for line in rest.split("\n"):
        for value in filter(None, sum(CLAIM.findall(line), ())):
            if "betas" not in line and float(value) < claimed:  # Adam has an epsilon of its own
                yield WRONG, f"{CARD} claims epsilon {value} outside of its privacy section: {line.strip()[:80]!r}"
    if snapshot.texts[CURVE_FILE] != render_curve(record) and record["versions"]["hf_private"] == __version__:
        yield WRONG, f"{CURVE_FILE} is not the curve of the record"


def _compare_text(what: str, got: str, expected: str) -> Found:
    got_lines, lines = got.strip("\n").split("\n"), expected.strip("\n").split("\n")
    if got_lines == lines:
        return
    if not got.strip():
        yield WRONG, f"{CARD} has no {what}"
    elif not expected.strip():
        yield WRONG, f"{CARD} has a {what} that the record does not call for"
    else:
        pairs = zip([*got_lines, *[""] * len(lines)], [*lines, *[""] * len(got_lines)], strict=False)
        got_line, line = next((a, b) for a, b in pairs if a != b)
        yield WRONG, f"{CARD}: the {what} says {got_line[:120]!r}, the record gives {line[:120]!r}"


def _metadata(record: dict[str, Any], data: Any, text: str) -> Found:
    block, expected = data.get("differential_privacy"), yaml_block(record)
    if not isinstance(block, dict):
        yield WRONG, f"{CARD} has no YAML block `differential_privacy`"
        return
    expected["record_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    for key in {**expected, **block}:
        if block.get(key) != expected.get(key):
            yield WRONG, f"{CARD}: `differential_privacy.{key}` is {block.get(key)!r}, not {expected.get(key)!r}"
    for key in {"epsilon", "eps"} & {*data.to_dict()}:
        yield WRONG, f"{CARD} has metadata `{key}` outside of `differential_privacy`"
    if not record["private"] and (wrong := sorted({*TAGS} & {*(data.get("tags") or ())})):
        yield WRONG, f"{CARD} is tagged `{wrong[0]}`, but the record is not private"


def check_ledger(record: dict[str, Any], snapshot: Snapshot) -> Found:
    """The hash chain, where it lies beside the model; it stays with whoever trained, and is never published."""
    if snapshot.ledger is None:
        return
    claimed = record["ledger"]
    try:
        ledger = PrivacyLedger.read(snapshot.ledger)
        then = _as_it_was(snapshot.ledger, claimed["length"])
    except LedgerError as error:
        yield WRONG, f"the ledger is broken: {error}"
        return
    if not ledger.contains(claimed["length"], claimed["head"]):
        yield (
            WRONG,
            f"`ledger.head` {str(claimed['head'])[:16]} is not the head of entry {claimed['length']} of the ledger",
        )
        return
    events = [Event.from_dict(event) for event in claimed["events"]]
    if sorted(events, key=repr) != sorted(then.events, key=repr):
        yield WRONG, "`ledger.events` are not the steps in the ledger"
    if [_facts(run) for run in record["runs"]] != [_facts(run) for run in then.records if run["kind"] == "run"]:
        yield WRONG, "`runs` are not the runs in the ledger"
    if (more := ledger.length - claimed["length"]) > 0:
        yield (
            WARNING,
            f"the ledger has grown by {more} entries since: later steps on these records are not in this claim",
        )


def _as_it_was(path: Path, length: int) -> PrivacyLedger:
    """The ledger at the time when it had `length` entries."""
    with TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        copy.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:length]))
        return PrivacyLedger.read(copy)


def _facts(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key != "kind"}


def check_weights(record: dict[str, Any], snapshot: Snapshot) -> Found:
    """Whether these are the weights that the claim is about."""
    recorded = record["weights"]
    if not recorded:
        yield UNKNOWN, "the record names no weights"
        return
    for name in sorted({*recorded, *snapshot.weights}):
        if name not in snapshot.weights:
            yield UNKNOWN, f"`{name}` is missing: the claim is about that file"
        elif name not in recorded:
            yield UNKNOWN, f"`{name}` is not in the record: nothing is claimed about it"
        elif recorded[name] != snapshot.weights[name]:
            yield UNKNOWN, f"`{name}` is not the file that the claim is about: swapped, or merged or quantised since"


def check_files(record: dict[str, Any], snapshot: Snapshot) -> Found:
    """What should not have been published, or would not be."""
    if snapshot.folder is None:
        for name in snapshot.names:
            if reason := reason_to_stay(name):
                yield WRONG, f"`{name}` is published: {reason}"
    else:
        for name, reason in scan(snapshot.folder).refused.items():
            yield WARNING, f"a push would be refused: `{name}` {reason}"


def check_caveats(record: dict[str, Any], snapshot: Snapshot) -> Found:
    """What weakens a claim that holds."""
    for caveat in record["caveats"]:
        yield WARNING, caveat


CHECKS = {
    "private": check_private,
    "epsilon": check_epsilon,
    "facts": check_consistency,
    "card": check_card,
    "ledger": check_ledger,
    "weights": check_weights,
    "files": check_files,
    "caveats": check_caveats,
}
PASSED = {
    "private": "the record claims privacy",
    "epsilon": "PRV and PLD, computed again from the recorded steps, give the claim",
    "facts": "batch sizes, sample rates and noise of the runs agree",
    "card": "text, metadata and curve say what the record says",
    "ledger": "its chain agrees with the record, or it is not here",
    "weights": "the hashes are the recorded ones",
    "files": "nothing here that must not be published",
    "caveats": "none",
}


def differences(got: Any, expected: Any, same_words: bool, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Leaves in which two records differ; accountants' numbers up to `TOLERANCE`, words only if `same_words`.

    Another version may say more or less, too: lists of sentences are words.
    """
    if isinstance(got, dict) and isinstance(expected, dict):
        for key in {**got, **expected}:
            path = f"{where}.{key}" if where else key
            yield from differences(got.get(key), expected.get(key), same_words, path)
    elif isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            yield from differences(a, b, same_words, f"{where}[{index}]")
    elif isinstance(got, float) and isinstance(expected, float):
        computed = where.startswith(("guarantee.accountants", "guarantee.epsilon_", "accounting."))
        slack = TOLERANCE if computed else 1e-12
        if where != "guarantee.epsilon" and not math.isclose(got, expected, rel_tol=slack):
            yield where, got, expected
    elif not same_words and _words(got) and _words(expected) and "inf" not in (got, expected):
        return
    elif got != expected:
        yield where, got, expected


def _words(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
