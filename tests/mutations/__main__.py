"""Put each bug into a copy of the package, run the test that must catch it, and print the score: `make mutants`.

    python -m tests.mutations [words of names]

The working tree is not touched. First all the tests run on an unchanged copy, where they must pass.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from .table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
WORKERS = 2
LIMIT = 900  # seconds; a mutant that hangs is caught too
PASSED, FAILED = 0, 1  # pytest's exit codes; others mean that the tests did not run


def copy_of(root: Path, mutant: Mutant | None, folder: str) -> Path:
    """A copy of the package and its tests, with the bug in it."""
    target = Path(folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("hf_private", "tests", "recipes", "model_cards"):
        if (root / name).is_dir():
            shutil.copytree(root / name, target / name, ignore=ignored)
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


def run(tests: Sequence[str], mutant: Mutant | None) -> tuple[int, str]:
    """pytest's exit code and output for some tests on a copy."""
    with TemporaryDirectory() as folder:
        copy = copy_of(ROOT, mutant, folder)
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT * len(tests)
            )
        except subprocess.TimeoutExpired:
            return FAILED, "it hung"
        return done.returncode, done.stdout + done.stderr


def killed(mutant: Mutant) -> tuple[bool, str]:
    """Whether the mutant's test fails, and how."""
    code, output = run([mutant.test], mutant)
    lines = [line for line in output.splitlines() if line.startswith("E ")]
    return code == FAILED, (lines[0] if lines else output.strip()[-300:]) if code != PASSED else "survived"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants whose names hold one of these words")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.words or any(word in m.name for word in args.words)]
    tests = sorted({mutant.test for mutant in chosen})
    code, output = run(tests, None)
    if code != PASSED:
        sys.stdout.write(f"The tests must pass on the code as it is:\n{output[-3000:]}\n")
        return 2
    start, score = time.monotonic(), 0
    with ThreadPoolExecutor(WORKERS) as pool:
        for mutant, (dead, how) in zip(chosen, pool.map(killed, chosen), strict=True):
            score += dead
            word = "killed  " if dead else "SURVIVED"
            sys.stdout.write(f"{word} {mutant.name}\n         by {mutant.test}\n")
            if not dead:
                sys.stdout.write(f"         {how}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{score} of {len(chosen)} killed in {time.monotonic() - start:.0f} s.\n")
    return int(score < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
