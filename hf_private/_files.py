"""Files that are, at every instant, either as they were or complete.

>>> path = getfixture("tmp_path") / "new" / "card.md"
>>> write_atomically(path, "complete")
>>> path.read_text()
'complete'
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file at once; it outlasts a power failure. Folders are made as needed."""
    with replacing(path) as file:
        write_all(file, content.encode() if isinstance(content, str) else content)
    file.close()


@contextmanager
def replacing(path: Path) -> Iterator[FileIO]:
    """An empty file that takes the place of `path` if the block succeeds; the caller closes it."""
    make_folder(path.parent)
    draft = path.with_name(f"_{path.name}.{secrets.token_hex(4)}.tmp")
    file = FileIO(draft, "a+")
    try:
        yield file
        os.fsync(file.fileno())
        os.replace(draft, path)
        sync_folder(path.parent)
    except BaseException:
        file.close()
        draft.unlink(missing_ok=True)
        raise


def write_all(file: FileIO, data: bytes) -> None:
    """Write all of `data`: the system may take it in parts."""
    view = memoryview(data)
    while view:
        view = view[os.write(file.fileno(), view) :]


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, so that their names outlast a power failure."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlast a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
