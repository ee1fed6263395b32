"""PrivacyLedger: torn, garbled and half-repaired files never lower the spending."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_private.spending.chain import make_line
from hf_private.spending.ledger import LedgerError, PrivacyLedger
from tests.support.ledger_file import CHEAP, DEAR, steps, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "_dp" / "ledger.jsonl"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "ledger.jsonl"
    write(path, cheap=2, dear=1)
    return path


def test_every_line_is_guarded(path: Path) -> None:
    """A changed, dropped, doubled or swapped line is an error that names it (the last line: see the torn tests)."""
    lines = write(path).splitlines(keepends=True)
    for i in range(len(lines) - 1):
        changed = lines[i][:-20] + (b"0" if lines[i][-20:-19] != b"0" else b"1") + lines[i][-19:]
        for damaged, at in (
            ([*lines[:i], changed, *lines[i + 1 :]], i),
            ([*lines[:i], *lines[i + 1 :]], i),
            ([*lines[: i + 1], lines[i], *lines[i + 1 :]], i + 1),
            ([*lines[:i], lines[i + 1], lines[i], *lines[i + 2 :]], i),
        ):
            path.write_bytes(b"".join(damaged))
            if at == len(damaged) - 1:  # only the last line does not fit: charged as one step
                assert sum(steps(PrivacyLedger.read(path)).values()) >= 4
                continue
            with pytest.raises(LedgerError, match=f"line {at + 1} of "):
                PrivacyLedger.read(path)
            with pytest.raises(LedgerError, match=f"line {at + 1} "):
                PrivacyLedger(path)


@pytest.mark.parametrize("last", ["step", "phase", "run", "ledger"])
def test_torn_at_every_byte(path: Path, last: str) -> None:
    """A last line cut anywhere counts as one step of the current phase, is repaired once, and the ledger goes on."""
    with PrivacyLedger(path) as ledger:
        if last != "ledger":
            ledger.charge(CHEAP)
        before = path.read_bytes() if last != "ledger" else b""
        if last == "phase":
            ledger._append("phase", session="s", name="n", event=DEAR.to_dict())
        elif last == "run":
            ledger.add_line("run", {"text": "x" * 200})
        elif last == "step":
            ledger.charge(CHEAP)
    whole = path.read_bytes()
    for cut in range(len(before) + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        expected = {(2.0,): 2} if last != "ledger" else {}
        assert steps(PrivacyLedger.read(path)) == expected
        assert path.read_bytes() == whole[:cut]  # a reader repairs nothing
        with PrivacyLedger(path) as ledger:
            assert steps(ledger) == expected
        assert steps(PrivacyLedger.read(path)) == expected, "the repair is charged once"
        if cut % 10 == 0:
            with PrivacyLedger(path) as ledger:
                ledger.charge(DEAR)
            assert steps(PrivacyLedger.read(path)) == {**expected, (1.0, 3.0): 1}
    path.write_bytes(whole[:-1])  # nothing but the newline is missing: the line counts as what it is
    with PrivacyLedger(path) as ledger:
        assert path.read_bytes() == whole
        assert steps(ledger) == {"step": {(2.0,): 2}, "ledger": {}}.get(last, {(2.0,): 1})


def test_a_crash_during_the_repair_forgets_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the repair after each of its system calls, and in the middle of its write: the step stays charged."""
    whole = write(path, cheap=2, dear=0)
    for tail in (b"{", whole.splitlines()[-1][:-10], b'{"size":    300,"kind":"phase",' + b"x" * 200):
        for stop in range(5):
            path.write_bytes(whole + tail)
            calls = []

            def counted(function, stop=stop, calls=calls):
                def call(*args):
                    calls.append(function)
                    if len(calls) == stop:
                        raise KeyboardInterrupt
                    return function(*args)

                return call

            def half(fd: int, line: bytes, at: int, pwrite=os.pwrite) -> None:
                pwrite(fd, line[:30], at)
                raise KeyboardInterrupt

            monkeypatch.setattr(os, "pwrite", counted(os.pwrite) if stop else half)
            monkeypatch.setattr(os, "fsync", counted(os.fsync))
            try:
                ledger = PrivacyLedger(path)
                ledger.close()
            except KeyboardInterrupt:
                pass
            monkeypatch.undo()
            assert steps(PrivacyLedger.read(path))[(2.0,)] >= 3
            with PrivacyLedger(path) as ledger:
                assert steps(ledger)[(2.0,)] in (3, 4)


def test_two_lost_lines_are_no_torn_line(path: Path) -> None:
    """A destroyed newline hides two records: that is damage, not a crash."""
    data = bytearray(write(path))
    for newline in [i for i, byte in enumerate(data) if byte == 10][:-1]:
        damaged = bytearray(data)
        damaged[newline] = 32
        path.write_bytes(bytes(damaged))
        with pytest.raises(LedgerError, match="line [0-9]+ of "):
            PrivacyLedger(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_never_lowers_the_spending(template: Path, path: Path, data: st.DataObject) -> None:
    """Bytes overwritten in up to two places: LedgerError, or no less than what was spent."""
    damaged, spent = bytearray(template.read_bytes()), steps(PrivacyLedger.read(template))
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(damaged) - 1) | st.integers(len(damaged) - 400, len(damaged) - 1))
        usual = st.sampled_from([b"\n", b"\n\n", b"{", b"}\n", b"\0" * 100, b"0" * 300, b"9" * 600])
        patch = data.draw(st.binary(min_size=1, max_size=30) | usual)
        damaged[at : at + len(patch)] = patch[: len(damaged) - at]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(damaged))
    for opening in (PrivacyLedger.read, PrivacyLedger):
        try:
            ledger = opening(path)
        except LedgerError as error:
            assert str(path) in str(error)
        else:
            assert all(steps(ledger).get(releases, 0) >= n for releases, n in spent.items())
            ledger.close()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=300), valid=st.booleans())
def test_garbage_raises_nothing_but_ledger_errors(template: Path, path: Path, noise: bytes, valid: bool) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes((template.read_bytes() if valid else b"") + noise)
    try:
        PrivacyLedger(path).close()
    except LedgerError:
        pass


def test_a_line_with_a_right_hash_and_wrong_content_is_not_repaired(path: Path) -> None:
    """What another version wrote is refused, never overwritten."""
    for kind, data in (
        ("phase", {"event": {"sample_rate": 0.1, "releases": [1.0], "colour": "red"}}),
        ("ledger", {"version": 1}),
    ):
        path.unlink(missing_ok=True)
        whole = write(path)
        whole += make_line(PrivacyLedger.read(path).head, kind, **data)
        path.write_bytes(whole)
        with pytest.raises(LedgerError, match="line [0-9]+ of "):
            PrivacyLedger(path)
        assert path.read_bytes() == whole
    path.write_bytes(make_line("", "ledger", version=2))
    with pytest.raises(LedgerError, match="version 2"):
        PrivacyLedger(path)


def test_a_ledger_that_is_replaced_while_it_is_open_is_not_written_to(path: Path, tmp_path: Path) -> None:
    """As by a backup that is restored: the next line would not fit, and all lines since would be lost."""
    other = tmp_path / "other"
    write(other, cheap=1)
    with PrivacyLedger(path) as ledger:
        ledger.charge(DEAR)
        path.write_bytes(other.read_bytes())
        with pytest.raises(LedgerError, match="changed by something else"):
            ledger.charge(DEAR)
        with pytest.raises(LedgerError):
            ledger.charge(DEAR)
