"""pyproject.toml: what is imported is declared, and what is declared is installed where the tests run."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OWN = {"hf_private", "recipes", "tests", *(path.stem for path in (ROOT / "recipes").glob("*.py"))}


def names(*requirements: list[str]) -> set[str]:
    found = [Requirement(line) for lines in requirements for line in lines]
    return {one.name.lower().replace("_", "-") for one in found} - {"hf-private"}


NEEDED = names(PROJECT["dependencies"])
# Folder -> what may be imported there, besides the standard library and what is always installed.
PLACES = {
    "hf_private": NEEDED,
    "hf_private/cli": NEEDED | names(EXTRAS["demo"]),
    "hf_private/audit": NEEDED | names(EXTRAS["demo"]),
    "hf_private/integrations/trl": NEEDED | names(EXTRAS["trl"]),
    "recipes": NEEDED | names(EXTRAS["demo"], EXTRAS["recipes"], EXTRAS["trl"]),
    "tests": NEEDED | names(*EXTRAS.values()),
}
# Imported only inside an environment that has it, or beside a library that brings it along.
ELSEWHERE = {
    "hf_private/tasks/made_up.py": {"pillow"},  # where records hold its images
    "hf_private/trainer/notebook.py": {"ipython"},
    "recipes/peers.py": {"opacus", "opake"},  # `make bench-peers` installs them
}


def imported(path: Path) -> set[str]:
    """Top-level names of what a file imports from elsewhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found - set(sys.stdlib_module_names) - OWN


def files() -> list[Path]:
    return sorted(path for folder in ("hf_private", "recipes", "tests") for path in (ROOT / folder).rglob("*.py"))


def undeclared(path: Path, inside: str) -> set[str]:
    place = max((folder for folder in PLACES if inside.startswith(f"{folder}/")), key=len)
    allowed = PLACES[place] | ELSEWHERE.get(inside, set())
    distributions = packages_distributions()
    wrong = set()
    for module in imported(path):
        owners = {name.lower().replace("_", "-") for name in distributions.get(module, [module])}
        if not owners & allowed:
            wrong.add(module)
    return wrong


def test_what_is_imported_is_declared() -> None:
    found = {inside: wrong for path in files() if (wrong := undeclared(path, inside := str(path.relative_to(ROOT))))}
    assert found == {}


def test_an_undeclared_import_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f():\n    import evaluate\n")
    assert undeclared(path, "hf_private/trainer/module.py") == {"evaluate"}
    assert undeclared(path, "recipes/module.py") == set()


OF_OTHER_TARGETS = ("dev", "notebook", "quantized")  # `make test-slow` and `make test-quantized` install them


@pytest.mark.parametrize("extra", [name for name in EXTRAS if name not in OF_OTHER_TARGETS])
def test_extras_are_installed_so_that_no_test_is_skipped_for_want_of_them(extra: str) -> None:
    for line in EXTRAS[extra]:
        requirement = Requirement(line)
        assert version(requirement.name) in requirement.specifier
