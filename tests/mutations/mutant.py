"""What a bug of `make mutants` is."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A bug, the file of the package it is put into, its patches, and a test of `make test` that must then fail."""

    name: str
    file: str
    patches: tuple[tuple[str, str], ...]
    test: str
