"""Put each bug into a copy of the package, run the test that must catch it, and print the score: `make mutants`.

    python -m tests.mutations [words of names]

The working tree is not touched. First all the tests run on an unchanged copy, where they must pass. Each copy is tried
in a process of its own, forked off from one that has loaded the large libraries and nothing of the package.
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
LIBRARIES = ("torch", "transformers.trainer", "peft", "datasets", "scipy.stats", "hypothesis", "pytest")
WORKERS = 2
LIMIT = 900  # seconds; a bug that makes its test hang is caught too
PASSED, FAILED = 0, 1  # pytest's exit codes; others mean that no test ran


def copy_of(root: Path, mutant: Mutant | None, folder: str) -> Path:
    """A copy of the package and its tests, with the bug in it."""
    target = Path(folder)
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", target)
    if mutant:
        path = target / "hf_private" / mutant.file
        path.write_text(mutated(path.read_text(), mutant))
    return target


def mutated(source: str, mutant: Mutant) -> str:
    """The source with the bug; raises if a patch does not apply exactly once."""
    for old, new in mutant.patches:
        if source.count(old) != 1:
            raise ValueError(f"{mutant.name}: must find this once in {mutant.file}, got {source.count(old)}: {old!r}")
        source = source.replace(old, new)
    return source


def run(task: tuple[list[str], Mutant | None]) -> tuple[int, str, float]:
    """pytest's exit code, its output and the seconds it took, for some tests on a copy; in a process of its own."""
    import pytest

    tests, mutant = task
    start = time.monotonic()
    with TemporaryDirectory() as folder:
        copy = copy_of(ROOT, mutant, folder)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
        assert not any(name.startswith("hf_private") for name in sys.modules)
        signal.signal(signal.SIGALRM, _hung)
        signal.alarm(LIMIT * (1 if mutant else 4))
        output = Path(folder, "output")
        with open(output, "w") as file, redirect_stdout(file), redirect_stderr(file):
            code = int(pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", *tests]))
        used = Path(import_module("hf_private").__file__)
        assert used.is_relative_to(copy), f"the tests ran on {used}, not on the copy"
        return code, output.read_text(), time.monotonic() - start


def _hung(*_: object) -> NoReturn:
    raise TimeoutError("it hung")


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
            word = "killed  " if code == FAILED else "SURVIVED"
            sys.stdout.write(f"{word} {mutant.name} ({seconds:.0f} s)\n         by {mutant.test}\n")
            found = [line[1:].strip() for line in output.splitlines() if line.startswith("E  ")]
            sys.stdout.write(f"         {found[0][:110]}\n" if found else f"{output[-1000:]}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{score} of {len(chosen)} killed in {time.monotonic() - start:.0f} s.\n")
    return int(score < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
