"""The package as a whole: what it exports, and that each export explains itself."""

import doctest
import importlib
import subprocess
import sys

import pytest

import hf_private


def test_star_import_gives_exactly_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from hf_private import *", namespace)
    namespace.pop("__builtins__")
    assert sorted(namespace) == sorted(hf_private.__all__)
    assert len(hf_private.__all__) <= 12, "public names are a promise: at most a dozen"


@pytest.mark.parametrize("name", hf_private.__all__)
def test_public_name_has_a_docstring_with_an_example(name: str) -> None:
    value = getattr(hf_private, name)
    assert value.__doc__, f"{name} has no docstring"
    home = importlib.import_module(value.__module__)
    examples = [test.examples for test in doctest.DocTestFinder(recurse=False).find(value, name, module=home)]
    assert any(examples), f"the docstring of {name} has no >>> example"


def test_public_names_are_listed_for_completion() -> None:
    assert set(hf_private.__all__) <= set(dir(hf_private))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="DPTrainr"):
        hf_private.DPTrainr  # noqa: B018


def test_import_is_quick() -> None:
    """`import hf_private` and the command line's parser load neither torch nor transformers."""
    code = (
        "import sys, hf_private.cli.main; hf_private.cli.main.build_parser();"
        "print([name for name in ('torch', 'transformers', 'scipy', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_accountants_are_imported_when_they_are_used():
    """They take longer to import than the rest of the library; DPTrainer needs them."""
    late = ("scipy.stats", "scipy.signal", "dp_accounting", "prv_accountant")
    names = "DPConfig, BookKeeper, PrivacyLedger"
    code = f"import sys; from hf_private import {names}; print([name for name in {late} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
