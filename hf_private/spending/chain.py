"""The lines of a ledger, and the chain of hashes that holds them together.

One JSON object per line. Each ends with a hash of the hash before it and of its own content, so that damage, a lost
tail and a forked history are found. It is no signature: whoever can write the file can write another history.

    {"size":    142,"kind":"ledger","version":1,"id":"..","hash":".."}      first line, unlike any other ledger's
    {"size":    287,"kind":"phase","session":"..","name":"train","event":{..},"hash":".."}      what a step costs now
    {"kind":"step","hash":".."}     one event of the current phase is spent
    {"kind":"torn","hash":".."}     the same, in place of a line that a crash left unfinished

Spending is in `step` and `torn` lines only, and a phase is on disk before its first step. So a last line that cannot
be read hides at most one step of the current phase, and is charged as that. The lines of other kinds, longer, begin
with their `size`, which tells one unfinished line from several damaged ones. Damage elsewhere is an error.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from hf_private.accounting.events import Event

VERSION = 1
SPENDING = ("step", "torn")
RESERVED = {"ledger", "phase", *SPENDING}
SIZE = re.compile(rb'{"size": *([0-9]{1,7}),')
HASH = re.compile(rb',"hash":"([0-9a-f]{64})"}')
HASH_BYTES = len(',"hash":""}') + 64
STEP_BYTES = len('{"kind":"step"') + HASH_BYTES + len("\n")


class LedgerError(RuntimeError):
    """The ledger cannot be trusted, reached or written. The message names the way out."""


def _hash(previous: str, content: bytes) -> str:
    return hashlib.sha256(previous.encode() + content).hexdigest()


def make_line(previous: str, kind: str, **data: Any) -> bytes:
    """One line of the ledger, newline included."""
    content = json.dumps({"kind": kind, **data}, separators=(",", ":"), allow_nan=False).encode()
    if kind not in SPENDING:
        content = b'{"size":%7d,' % (len(content) + len('"size":1234567,') + HASH_BYTES) + content[1:]
    return content[:-1] + b',"hash":"%s"}\n' % _hash(previous, content).encode()


class Chain:
    """Lines of a ledger, verified and added up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hashes: list[str] = []
        self.lines: list[dict[str, Any]] = []  # all but the steps
        self.spent: dict[Event, int] = {}  # event of a phase -> times that it was charged
        self.event: Event | None = None  # of the current phase

    @property
    def head(self) -> str:
        return self.hashes[-1] if self.hashes else ""

    def add(self, line: bytes) -> bool:
        """Count a line without newline; False if it does not continue the chain, LedgerError if it makes no sense."""
        found, content = HASH.fullmatch(line[-HASH_BYTES:]), line[:-HASH_BYTES] + b"}"
        if found is None or found[1].decode() != _hash(self.head, content):
            return False
        if content == b'{"kind":"step"}' and self.event is not None:
            self.charge()
        elif content == b'{"kind":"torn"}' and self.hashes:
            self.charge()
        else:
            self._add_other(content)
        self.hashes.append(found[1].decode())
        return True

    def charge(self) -> None:
        if self.event is not None:  # a line torn before the first phase hides no step
            self.spent[self.event] = self.spent.get(self.event, 0) + 1

    def _add_other(self, content: bytes) -> None:
        try:
            line = json.loads(content)
            del line["size"]
            if (line["kind"] == "ledger") != (not self.hashes):
                raise ValueError("the first line, and no other, must be of kind 'ledger'")
            if line["kind"] == "ledger" and line["version"] != VERSION:
                raise ValueError(f"version {line['version']!r} of the format is unknown")
            if line["kind"] == "phase":
                self.event = Event.from_dict(line["event"])
        except (ValueError, LookupError, TypeError) as error:
            raise LedgerError(
                f"line {len(self.hashes) + 1} of {self.path} cannot be understood: {error}. Read it with the "
                "version of hf_private that wrote it."
            ) from error
        self.lines.append(line)


def parse_lines(data: bytes, path: Path) -> tuple[Chain, int]:
    """The chain, and the length of its lines in `data`: anything after them is one unfinished line."""
    chain, start = Chain(path), 0
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        line, last = data[start:end], end + 1 >= len(data)
        if not chain.add(line):
            size = SIZE.match(line)
            if last and len(data) - start <= (int(size[1]) if size else STEP_BYTES):
                return chain, start
            raise LedgerError(
                f"line {len(chain.hashes) + 1} of {path} is damaged: it does not continue the chain of hashes. Put "
                "back a backup, or the copy that the latest checkpoint keeps. Without either the spending is "
                "unknown: start again from the base model, in a new output folder."
            )
        start = min(end + 1, len(data))
    return chain, start
