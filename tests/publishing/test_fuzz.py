"""privacy.json comes from strangers: whatever it holds, reading it ends in a verdict, and no damage is overlooked."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_private.publishing.verify import read, verify
from hf_private.spending.statement import STATEMENT, read_statement
from tests.support.card_facts import saved_model

QUICK = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({}), st.just("inf")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a folder of its own: in `folder` another test may have left a damaged one."""
    return read_statement(saved_model(tmp_path_factory.mktemp("record")))


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Where something can be replaced: every key and index, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in ((*path, key), *places(item, (*path, key)))]


def parent(value: Any, path: tuple) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


@given(data=st.data())
@QUICK
def test_any_value_anywhere_ends_in_a_verdict(folder: Path, record: dict, data: st.DataObject) -> None:
    """Nothing but a verdict comes out, and it is not "holds" for a record that says something else than ours."""
    damaged = copy.deepcopy(record)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(damaged)))
        if data.draw(st.booleans()):
            parent(damaged, path)[path[-1]] = data.draw(JUNK)
        else:
            del parent(damaged, path)[path[-1]]
        if not places(damaged):
            break
    (folder / STATEMENT).write_text(json.dumps(damaged))
    verdict = verify(str(folder))
    assert verdict.code in (0, 1, 2)
    if damaged != record:
        assert verdict.code != 0, "the card still has the hash of another record"


@given(noise=st.binary(max_size=30), place=st.floats(0, 1), cut=st.integers(0, 30))
@QUICK
def test_damaged_bytes_end_in_a_verdict(folder: Path, record: dict, noise: bytes, place: float, cut: int) -> None:
    whole = json.dumps(record, indent=2).encode()
    start = int(place * len(whole))
    (folder / STATEMENT).write_bytes(whole[:start] + noise + whole[start + cut :])
    verdict = verify(str(folder))
    assert verdict.code in (0, 1, 2)
    found, problem = read(str(folder))
    assert (found is None) == (problem is not None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "3",
        '"x"',
        "{}",
        "{" * 5000,
        "[" * 100_000,
        '{"schema_version": NaN}',
        "\ufeff{}",
        '{"a": 1e999}',
    ],
    ids=["empty", "null", "list", "number", "string", "object", "braces", "brackets", "nan", "bom", "overflow"],
)
def test_other_documents_are_refused(folder: Path, text: str) -> None:
    (folder / STATEMENT).write_text(text)
    assert verify(str(folder)).code in (1, 2)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("runs", 0, "num_records"), "many"),
        (("runs", 0, "noise_multiplier"), None),
        (("runs", 0, "sample_rate"), [0.1]),
        (("runs", 0, "expected_batch_size"), 10**400),
        (("settings", "carriers"), {"r": "x", "sparsity": "y"}),
        (("runs",), [{}]),
    ],
)
def test_facts_that_the_schema_leaves_open(folder: Path, record: dict, path: tuple, value: Any) -> None:
    """Found by fuzzing: these once ended in a traceback."""
    damaged = copy.deepcopy(record)
    parent(damaged, path)[path[-1]] = value
    (folder / STATEMENT).write_text(json.dumps(damaged))
    assert verify(str(folder)).code == 1
