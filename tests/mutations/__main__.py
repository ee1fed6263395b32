"""Put each bug into a copy of the package, run the test that must fail, and print the score: `make mutants`.

    python -m tests.mutations [words of names]

The working tree is not touched. First all the tests run on an unchanged copy, where they must pass. Each copy is
tested in its own process, forked from one that has loaded the large libraries and nothing of the package.
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from tests.mutations.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("hf_private", "tests", "recipes", "model_cards")
IGNORED = shutil.ignore_patterns("__pycache__")
LIBRARIES = ("torch", "transformers.trainer", "peft", "datasets", "scipy.stats", "hypothesis", "pytest")
WORKERS = 2
LIMIT = 900  # seconds; a bug that makes its test hang is caught too
PASSED, FAILED = 0, 1  # pytest's exit codes; others mean that no test ran


def copy_to(folder: Path, mutant: Mutant | None) -> None:
    """Copy the package and its tests, and put the bug in."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=IGNORED)
    shutil.copy(ROOT / "pyproject.toml", folder)
    if mutant:
        path = folder / "hf_private" / mutant.file
        path.write_text(mutated(path.read_text(), mutant))


def mutated(source: str, mutant: Mutant) -> str:
    """The source with the bug; raises if a patch does not apply exactly once."""
    for old, new in mutant.patches:
        if source.count(old) != 1:
            raise ValueError(f"{mutant.name}: must find this once in {mutant.file}, got {source.count(old)}: {old!r}")
        source = source.replace(old, new)
    return source


def run(task: tuple[list[str], Mutant | None]) -> tuple[int, str, float]:
    """Run tests on a copy with a bug, in a forked process: pytest's exit code, its output and the seconds it took."""
    import pytest

    tests, mutant = task
    start = time.monotonic()
    with TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_to(copy, mutant)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
        assert not any(name.startswith("hf_private") for name in sys.modules)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]  # so that the copy's tests are imported, not those of the working tree
        signal.signal(signal.SIGALRM, _hung)
        signal.alarm(LIMIT * (1 if mutant else 4))
        output = copy / "output"
        with open(output, "w") as file, redirect_stdout(file), redirect_stderr(file):
            code = int(pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", *tests]))
        used = Path(import_module("hf_private").__file__)
        assert used.is_relative_to(copy), f"the tests ran on {used}, not on the copy"
        return code, output.read_text(), time.monotonic() - start


def _hung(*_: object) -> NoReturn:
    raise TimeoutError("it hung")


def verdict(mutant: Mutant, code: int, output: str, seconds: float) -> str:
    """Whether the test failed on the bug, and its first error."""
    word = "killed  " if code == FAILED else "SURVIVED"
    errors = [line[1:].strip() for line in output.splitlines() if line.startswith("E  ")]
    detail = f"         {errors[0][:110]}" if errors else output[-1000:]
    return f"{word} {mutant.name} ({seconds:.0f} s)\n         by {mutant.test}\n{detail}\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only bugs whose names hold one of these words")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.words or any(word in m.name for word in args.words)]
    for name in LIBRARIES:
        import_module(name)
    start, score = time.monotonic(), 0
    with multiprocessing.get_context("fork").Pool(WORKERS, maxtasksperchild=1) as pool:
        tests = sorted({mutant.test for mutant in chosen})
        (code, output, _), *_ = pool.imap(run, [(tests, None)])
        if code != PASSED:
            sys.stdout.write(f"The tests must pass on the code as it is:\n{output[-3000:]}\n")
            return 2
        results = pool.imap(run, [([mutant.test], mutant) for mutant in chosen])
        for mutant, (code, output, seconds) in zip(chosen, results, strict=True):
            score += code == FAILED
            sys.stdout.write(verdict(mutant, code, output, seconds))
            sys.stdout.flush()
    sys.stdout.write(f"{score} of {len(chosen)} killed in {time.monotonic() - start:.0f} s.\n")
    return int(score < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
