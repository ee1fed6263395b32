"""PrivacyLedger: never a step forgotten, whatever happens to the process or the file."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_private.accounting.events import Event
from hf_private.spending.chain import STEP_BYTES, make_line
from hf_private.spending.ledger import LedgerError, PrivacyLedger
from tests.support.ledger_file import CHEAP, DEAR, steps, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "_dp" / "ledger.jsonl"


def test_spending_adds_up_and_survives(path: Path) -> None:
    write(path)
    with PrivacyLedger(path, create=False) as ledger:
        assert steps(ledger) == {(2.0,): 3, (1.0, 3.0): 2}
        assert [line["kind"] for line in ledger.lines] == ["ledger", "run", "phase", "phase"]
        assert ledger.lines[1] == {"kind": "run", "clip_norm": 1.0, "n": 100}
        ledger.charge(CHEAP)
        assert steps(ledger) == {(2.0,): 4, (1.0, 3.0): 2} == steps(PrivacyLedger.read(path))
        assert (ledger.length, ledger.head) == (PrivacyLedger.read(path).length, PrivacyLedger.read(path).head)


def test_charge_is_on_disk_before_it_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is complete at the time of the last fsync, and a failing fsync makes the charge fail."""
    seen = []
    with PrivacyLedger(path) as ledger:
        ledger.charge(CHEAP)
        fsync = os.fsync
        monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), seen.append(path.read_bytes()))[0])
        ledger.charge(CHEAP)
        assert len(seen) == 1 and seen[0] == path.read_bytes() and seen[0].count(b'"step"') == 2

        def broken(fd: int) -> None:
            raise OSError("no disk")

        monkeypatch.setattr(os, "fsync", broken)
        with pytest.raises(LedgerError, match=r"ledger\.jsonl: no disk"):
            ledger.charge(CHEAP)
        with pytest.raises(LedgerError, match=r"`?PrivacyLedger\(path\)`?"):
            ledger.charge(CHEAP)


def test_full_disk_leaves_a_torn_line_that_is_charged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PrivacyLedger(path) as ledger:
        ledger.charge(CHEAP)
        write_ = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: write_(fd, data[:20]))
        with pytest.raises(LedgerError, match=r"ledger\.jsonl"):
            ledger.charge(CHEAP)
        monkeypatch.undo()
    assert steps(PrivacyLedger(path)) == {(2.0,): 2}


def test_no_times_and_small_lines(path: Path) -> None:
    data = write(path)
    lines = data.splitlines(keepends=True)
    assert {len(line) for line in lines if b'"step"' in line} == {STEP_BYTES} == {90}
    assert all(json.loads(line).get("size", STEP_BYTES) == len(line) for line in lines)
    assert {key for line in lines for key in json.loads(line)} == {
        *("size", "kind", "hash", "version", "id", "clip_norm", "n", "session", "name", "event")
    }


def test_one_writer(path: Path) -> None:
    with PrivacyLedger(path) as ledger:
        ledger.charge(CHEAP)
        with pytest.raises(LedgerError, match=r"ledger\.jsonl"):
            PrivacyLedger(path)
        code = f"from hf_private.spending.ledger import PrivacyLedger; PrivacyLedger({str(path)!r})"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert child.returncode and "in use by another" in child.stderr
        PrivacyLedger.read(path)
        ledger.save_copy(path.with_name("copy.jsonl"))
        with pytest.raises(LedgerError, match=r"ledger\.jsonl"):  # neither a reader nor a copy drops the lock
            PrivacyLedger(path)
    PrivacyLedger(path).close()


def test_a_forked_child_neither_writes_nor_keeps_the_lock(path: Path) -> None:
    ledger = PrivacyLedger(path)
    ledger.charge(CHEAP)
    child = os.fork()
    if child == 0:  # a data loader worker that outlives its parent
        try:
            ledger.charge(CHEAP)
        except LedgerError:
            time.sleep(30)
        os._exit(1)
    try:
        time.sleep(0.2)
        ledger.close()
        PrivacyLedger(path).close()
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child must still be alive, having been refused"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert steps(PrivacyLedger.read(path)) == {(2.0,): 1}


def test_kill_at_any_instant(path: Path) -> None:
    """After each kill -9 the ledger opens, and holds every step that the child had been told was charged."""
    rng, promised = random.Random(0), 0
    for _ in range(12):
        inbox, outbox = os.pipe()
        child = os.fork()
        if child == 0:
            ledger = PrivacyLedger(path)
            for i in range(100_000):
                ledger.charge(CHEAP, phase=str(i // 7))
                os.write(outbox, b".")
            os._exit(0)
        os.close(outbox)
        promised += len(os.read(inbox, 1))  # it is at work
        time.sleep(rng.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        promised += len(os.read(inbox, 100_000))
        os.close(inbox)
        with PrivacyLedger(path) as ledger:
            assert promised <= steps(ledger)[(2.0,)] <= promised + 1
            promised = steps(ledger)[(2.0,)]
    assert promised > 12


def test_prefix_and_fork(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "checkpoint-5" / "ledger.jsonl"
    with PrivacyLedger(path) as ledger:
        ledger.charge(CHEAP)
        ledger.save_copy(copy)
        mark = (ledger.length, ledger.head)
        ledger.charge(CHEAP)
        assert ledger.contains(*mark) and not ledger.contains(mark[0] + 1, mark[1]) and not ledger.contains(0, "")
        assert PrivacyLedger.read(copy).prefix_of(ledger) and not ledger.prefix_of(PrivacyLedger.read(copy))
        assert ledger.prefix_of(ledger)
        ledger.reconcile(copy)
        assert steps(ledger) == {(2.0,): 2}

    # two sessions that go on from one copy with the same settings are still told apart
    with PrivacyLedger(copy) as fork, PrivacyLedger(path) as ledger:
        fork.charge(CHEAP)
        assert not fork.prefix_of(ledger) and not ledger.prefix_of(fork)
        with pytest.raises(LedgerError, match=r"ledger\.jsonl and .*copy"):
            ledger.reconcile(copy)
        assert steps(ledger) == {(2.0,): 2}
    twin = tmp_path / "twin.jsonl"
    twin.write_bytes(copy.read_bytes())
    with PrivacyLedger(copy) as left, PrivacyLedger(twin) as right:
        left.charge(CHEAP)
        right.charge(CHEAP)
        right.charge(CHEAP)
        assert not left.prefix_of(right) and not right.prefix_of(left)
    # and so are two fresh ledgers
    with PrivacyLedger(tmp_path / "a") as a, PrivacyLedger(tmp_path / "b") as b:
        assert not a.prefix_of(b)


@pytest.mark.parametrize("torn", [False, True])
def test_the_longer_history_holds(path: Path, tmp_path: Path, torn: bool) -> None:
    """An output folder put back from an old backup catches up with its checkpoint, and stays locked and writable."""
    copy = tmp_path / "checkpoint-5" / "ledger.jsonl"
    write(path, cheap=1, dear=0)
    old = path.read_bytes()
    with PrivacyLedger(path) as ledger:
        ledger.charge(CHEAP)
        ledger.charge(DEAR)
        ledger.save_copy(copy)
    path.write_bytes(old)
    if torn:
        copy.write_bytes(copy.read_bytes() + b'{"kind":"st')
    with PrivacyLedger(path) as ledger:
        ledger.reconcile(copy)
        assert steps(ledger) == {(2.0,): 2, (1.0, 3.0): 1 + torn}
        with pytest.raises(LedgerError, match=r"ledger\.jsonl"):
            PrivacyLedger(path)
        ledger.charge(DEAR)
        assert list(path.parent.iterdir()) == [path]
    assert steps(PrivacyLedger(path)) == {(2.0,): 2, (1.0, 3.0): 2 + torn}


def test_a_missing_ledger_is_refused_on_resume(path: Path) -> None:
    with pytest.raises(LedgerError, match=r"ledger\.jsonl"):
        PrivacyLedger(path, create=False)
    assert not path.exists()
    with PrivacyLedger(path) as ledger, pytest.raises(LedgerError, match="nowhere"):
        ledger.reconcile(path.with_name("nowhere"))


def test_spending_of_a_base_model_is_taken_over_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    past = (Event(0.1, (4.0,), steps=500), Event(0.2, (5.0,), steps=60))
    source = {"name": "base", "sha256": "ab"}
    with PrivacyLedger(path) as ledger:
        assert ledger.continue_from(past, source)
        assert not ledger.continue_from(past, source)
        assert ledger.events == past
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b'{"size"') - 5])  # a crash before the closing record, in the last charge
    with PrivacyLedger(path) as ledger:
        assert steps(ledger) == {(4.0,): 500, (5.0,): 60}, "a torn charge counts with all its steps"
        assert ledger.continue_from(past, source), "and the whole is taken over again"


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("step", {}, "`kind`"),
        ("phase", {}, "`kind`"),
        (3, {}, "`kind`"),
        ("run", {"hash": "x"}, "`data`"),
        ("run", {"x": float("inf")}, "`data`"),
        ("run", {"x": object()}, "`data`"),
    ],
)
def test_bad_records(path: Path, kind: str, data: dict, message: str) -> None:
    with PrivacyLedger(path) as ledger:
        with pytest.raises(ValueError, match=message):
            ledger.add_line(kind, data)
        with pytest.raises(TypeError, match="`event`"):
            ledger.charge("step")
        assert ledger.length == 1


def test_unreachable_places(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "ledger.jsonl"):
        with pytest.raises(LedgerError, match="ledger"):
            PrivacyLedger(place)
    with pytest.raises(LedgerError, match="nowhere"):
        PrivacyLedger.read(tmp_path / "nowhere")
    with pytest.raises(LedgerError, match=str(tmp_path)), PrivacyLedger(tmp_path / "a") as ledger:
        ledger.save_copy(tmp_path / "file" / "copy")


def test_a_long_run_opens_quickly(path: Path) -> None:
    with PrivacyLedger(path) as ledger:
        ledger.charge(CHEAP)
        head, lines = ledger.head, []
    for _ in range(100_000):
        lines.append(make_line(head, "step"))
        head = lines[-1][-67:-3].decode()
    with path.open("ab") as file:
        file.write(b"".join(lines))
    start = time.process_time()
    assert steps(PrivacyLedger.read(path)) == {(2.0,): 100_001}
    assert time.process_time() - start < 2
