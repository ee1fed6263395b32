"""The bugs of `make mutants` still fit the code, and the tests that must catch them exist."""

import ast
from pathlib import Path

import pytest

import hf_private
from tests.mutations.__main__ import copy_to, mutated
from tests.mutations.table import MUTANTS, Mutant

PACKAGE = Path(hf_private.__file__).parent
ROOT = Path(__file__).parents[1]
each = pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])


@each
def test_the_patches_of_a_mutant_apply(mutant: Mutant) -> None:
    """Its patches apply once each, change something, and leave valid Python."""
    source = (PACKAGE / mutant.file).read_text()
    changed = mutated(source, mutant)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


@each
def test_the_test_that_must_kill_a_mutant_exists_and_is_not_slow(mutant: Mutant) -> None:
    file, _, name = mutant.test.partition("::")
    source = (ROOT / file).read_text()
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert "pytestmark" not in source, "a mark of the whole file would not be seen here"
    name = name.partition("[")[0]
    assert name in functions
    assert not any("slow" in ast.unparse(decorator) for decorator in functions[name].decorator_list)


def test_a_copy_holds_the_bug(tmp_path: Path) -> None:
    mutant = MUTANTS[0]
    copy_to(tmp_path, mutant)
    assert (tmp_path / mutant.test.partition("::")[0]).is_file()
    source = (PACKAGE / mutant.file).read_text()
    assert (tmp_path / "hf_private" / mutant.file).read_text() == mutated(source, mutant) != source


def test_names_are_unique_and_there_are_enough() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20


def test_a_patch_that_does_not_apply_once_is_an_error() -> None:
    with pytest.raises(ValueError, match="noise.py.*got 0"):
        mutated("x = 1\n", Mutant("gone", "noise.py", (("y = 2", "y = 3"),), ""))
    with pytest.raises(ValueError, match="noise.py.*got 2"):
        mutated("x = 1\nx = 1\n", Mutant("twice", "noise.py", (("x = 1", "x = 2"),), ""))
