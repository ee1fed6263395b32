"""PrivacyLedger: what was spent, on disk before it is used.

A file of the lines of `chain`, in use by one process at a time, and copied with each checkpoint.
"""

import fcntl
import json
import os
import secrets
import weakref
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any

from hf_private._files import make_folder, replacing, sync_folder, write_all
from hf_private.accounting.events import Event, compact

from .chain import RESERVED, VERSION, LedgerError, make_line, parse_lines


class PrivacyLedger:
    """Append-only file of privacy spending, in use by one process at a time.

    Args:
        path: the file, `_dp/ledger.jsonl` in the output folder.
        create: begin a new ledger if there is none. Say False on resume: there a missing ledger is an error.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, PrivacyLedger(f"{folder}/_dp/ledger.jsonl") as ledger:
    ...     ledger.charge(Event(0.01, (1.0,)), phase="train")
    ...     ledger.charge(Event(0.01, (1.0,)), phase="train")
    ...     ledger.events
    (Event(sample_rate=0.01, releases=(1.0,), steps=2, sampling='poisson'),)
    """

    def __init__(self, path: str | os.PathLike, create: bool = True) -> None:
        self.path = Path(path)
        self.unfinished = False
        self._file: FileIO | None = None
        self._session = secrets.token_hex(8)  # two sessions never write equal lines: a fork of the history shows
        self._phase: tuple[str, Event] | None = None
        if not create and not self.path.exists():
            raise LedgerError(
                f"there is no ledger at {self.path}, so what was spent is not known. Put it back from a backup, or "
                "from the copy that the latest checkpoint keeps (steps after that checkpoint are not in the copy)."
            )
        try:
            make_folder(self.path.parent)
            self._file = _locked(self.path)
            data = self._file.readall()
            self._chain, length = parse_lines(data, self.path)
            if length < len(data) or not self._chain.hashes:
                self._repair(length)
            elif not data.endswith(b"\n"):
                os.write(self._file.fileno(), b"\n")
                os.fsync(self._file.fileno())
            sync_folder(self.path.parent)
            self._end = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            self.close()
            raise LedgerError(
                f"cannot open the ledger {self.path}: {error}. Check the folder and its rights."
            ) from error
        except LedgerError:
            self.close()
            raise
        _OPEN.add(self)

    @classmethod
    def read(cls, path: str | os.PathLike) -> "PrivacyLedger":
        """Read a ledger that this or another process may be writing; nothing is locked, repaired or written."""
        ledger = cls.__new__(cls)
        ledger.path, ledger._file, ledger._phase = Path(path), None, None
        try:
            data = ledger.path.read_bytes()
        except OSError as error:
            raise LedgerError(f"cannot read the ledger {path}: {error}. Check the path.") from error
        ledger._chain, length = parse_lines(data, ledger.path)
        ledger.unfinished = length < len(data)
        return ledger

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything spent, an unfinished line included, equal events added up."""
        spent = dict(self._chain.spent)
        if self.unfinished and self._chain.event is not None:
            spent[self._chain.event] = spent.get(self._chain.event, 0) + 1
        return compact(Event(e.sample_rate, e.releases, n * e.steps, e.sampling) for e, n in spent.items())

    @property
    def lines(self) -> tuple[dict[str, Any], ...]:
        """All lines but the steps, in order: the settings of runs, their phases."""
        return tuple(self._chain.lines)

    @property
    def head(self) -> str:
        """Hash of the last line; with `length` it fixes the whole history."""
        return self._chain.head

    @property
    def length(self) -> int:
        """Number of lines."""
        return len(self._chain.hashes)

    def charge(self, event: Event, phase: str = "train") -> None:
        """Spend `event`. When this returns the spending is on disk, and only then may its result be used."""
        if not isinstance(event, Event):
            raise TypeError(f"`event` must be an Event, got {event!r}.")
        if self._phase != (phase, event):
            self._append("phase", session=self._session, name=str(phase), event=event.to_dict())
            self._phase = (phase, event)
        self._append("step")

    def add_line(self, kind: str, data: dict[str, Any]) -> None:
        """Add a line that is not a step, such as the settings of a run. Infinity is written as "inf"."""
        if not isinstance(kind, str) or kind in RESERVED:
            raise ValueError(f"`kind` must be a string other than {', '.join(sorted(RESERVED))}, got {kind!r}.")
        if not {"kind", "size", "hash"}.isdisjoint(data):
            raise ValueError(f"`data` must not use the keys kind, size and hash, got {sorted(data)}.")
        try:
            json.dumps(data, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`data` must be JSON, without nan and infinity: {error}, got {data!r}.") from error
        self._append(kind, **data)

    def continue_from(self, events: Iterable[Event], source: dict[str, Any]) -> bool:
        """Take over what was spent elsewhere, such as on the base model. Once per `source`; True if it was done now.

        The closing line is written last, so that a crash in between leads to spending counted twice, never to none.
        """
        source = json.loads(json.dumps(source))
        if {"kind": "continues", "source": source} in self._chain.lines:
            return False
        for event in events:
            self.charge(event, phase="continued")
        self.add_line("continues", {"source": source})
        return True

    def contains(self, length: int, head: str) -> bool:
        """Whether this history once had that length and head."""
        return 0 < length <= self.length and self._chain.hashes[length - 1] == head

    def prefix_of(self, other: "PrivacyLedger") -> bool:
        """Whether `other` is this history, or a continuation of it."""
        return other.contains(self.length, self.head)

    def save_copy(self, path: str | os.PathLike) -> None:
        """Copy the ledger, for a checkpoint: all of it or nothing appears at `path`."""
        _replace(Path(path), self.path.read_bytes()).close()

    def reconcile(self, copy: str | os.PathLike) -> None:
        """Settle with a checkpoint's copy: the longer history holds, and two different ones are an error."""
        other = PrivacyLedger.read(copy)
        if other.prefix_of(self):
            return
        if not self.prefix_of(other):
            raise LedgerError(
                f"{self.path} and {other.path} are different histories: each has steps that the other lacks, so "
                "neither has all of the spending. Resume from a checkpoint of this ledger; or, if nothing of the run "
                "that wrote it was kept or looked at, put the checkpoint's copy in its place."
            )
        replaced = self._writable()
        data = other.path.read_bytes()
        chain, length = parse_lines(data, other.path)
        self._file = _replace(self.path, data[:length].rstrip(b"\n") + b"\n", lock=True)
        replaced.close()
        self._end = os.fstat(self._file.fileno()).st_size
        self._chain, self._phase = chain, None
        if other.unfinished:
            self._append("torn")

    # The names of version 0.1.0.
    records = lines
    record = add_line

    def close(self) -> None:
        """Give up the lock. Reading goes on to work."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "PrivacyLedger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _writable(self) -> FileIO:
        if self._file is None:
            raise LedgerError(
                f"{self.path} is not open for writing here: it was closed, read only, opened before a fork, or a "
                "write failed. Open it with PrivacyLedger(path)."
            )
        return self._file

    def _append(self, kind: str, **data: Any) -> None:
        file = self._writable()
        line = make_line(self.head, kind, **data)
        if os.fstat(file.fileno()).st_size != self._end:
            self.close()
            raise LedgerError(
                f"{self.path} was changed by something else while a run wrote to it, so steps are missing. Put back"
                " the copy of the latest checkpoint, and resume from there."
            )
        try:
            written = os.write(file.fileno(), line)  # one call and O_APPEND: a kill leaves all of the line or none
            os.fsync(file.fileno())
        except OSError as error:
            self.close()  # how much is on disk is unknown; the next opening reads it, and charges what is unfinished
            raise LedgerError(
                f"cannot write to the ledger {self.path}: {error}. The step must not be used."
            ) from error
        if written < len(line):
            self.close()
            raise LedgerError(
                f"the disk of the ledger {self.path} is full. Free some space; the step must not be used."
            )
        self._end += written
        self._chain.add(line[:-1])

    def _repair(self, length: int) -> None:
        """Put a whole line over an unfinished one at offset `length`, in an order that no crash turns cheaper."""
        first = {"kind": "ledger", "version": VERSION, "id": secrets.token_hex(16)}
        line = make_line(self.head, "torn") if self.length else make_line("", **first)
        with FileIO(self.path, "r+") as file:  # not O_APPEND, which ignores offsets
            # one byte stays: whenever this is stopped, the file ends in something that is charged
            file.truncate(length + 1)
            os.fsync(file.fileno())
            os.pwrite(file.fileno(), line, length)
            os.fsync(file.fileno())
        self._chain.add(line[:-1])


def _locked(path: Path) -> FileIO:
    """Open for appending under an exclusive lock, which the system drops when the process ends, however it ends."""
    while True:
        file = FileIO(path, "a+")
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise LedgerError(
                f"{path} is in use by another process, or by another trainer of this one. Wait for it to end, close "
                "it, or choose another output folder."
            ) from error
        if os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            file.seek(0)
            return file
        file.close()  # replaced between opening and locking


def _replace(path: Path, data: bytes, lock: bool = False) -> FileIO:
    """Replace a file at once; return it open for appending, locked before anybody can see it."""
    try:
        with replacing(path) as file:
            if lock:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(file, data)
    except OSError as error:
        raise LedgerError(f"cannot write {path}: {error}. Check the folder, its rights and the space left.") from error
    return file


# A forked data loader worker would hold the lock on after its parent was killed, and the resumed run would be refused.
_OPEN: "weakref.WeakSet[PrivacyLedger]" = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [ledger.close() for ledger in list(_OPEN)])
