"""The parts of a saved or published model that a check reads: file names, a few texts, hashes of the weights."""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download

from hf_private.spending.spending import LEDGER
from hf_private.spending.statement import STATEMENT

from .card import CARD, is_weights, sha256, weight_names
from .curve import CURVE_FILE

SIZE_LIMITS = {STATEMENT: 1_000_000, CARD: 500_000, CURVE_FILE: 100_000}  # bytes; files come from strangers
LEDGER_LIMIT = 50_000_000
CHUNK = 2**22  # bytes


@dataclass(frozen=True)
class Snapshot:
    """A model folder, or a revision of a repository on the Hub.

    Args:
        names: All files.
        texts: Contents of the statement, the card and the curve; None for a file that is missing.
        weights: sha256 of each file of weights; None for one that takes too long.
        folder: The folder of a local model.
    """

    names: tuple[str, ...]
    texts: dict[str, str | None]
    weights: dict[str, str | None]
    folder: Path | None = None

    @property
    def ledger(self) -> Path | None:
        """The ledger beside a local model."""
        if self.folder is None:
            return None
        path = self.folder / LEDGER
        return path if path.is_file() else None


def load_snapshot(path_or_repo: str, revision: str | None, time_limit: float) -> Snapshot:
    """Read a local folder, or else a repository. For weights on the Hub, only hashes are fetched where it has them.

    `time_limit` is for hashing local weights, in seconds of processor time.

    Raises: FileNotFoundError without such a model, ValueError for files that are too large to be ours.
    """
    folder = Path(path_or_repo)
    return _of_folder(folder, time_limit) if folder.is_dir() else _of_repository(path_or_repo, revision)


def _of_folder(folder: Path, time_limit: float) -> Snapshot:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    for name in SIZE_LIMITS:
        if name in names:
            _refuse_large(name, (folder / name).stat().st_size)
    return Snapshot(
        names=tuple(names),
        texts={name: _read(folder / name) if name in names else None for name in SIZE_LIMITS},
        weights=_hashes(folder, time_limit),
        folder=folder,
    )


def _of_repository(repo: str, revision: str | None) -> Snapshot:
    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    except Exception as error:  # no such repository, no network, not a name: there is nothing to check
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(f"there is no folder {repo!r}, and the Hub says: {reason}") from error
    files = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    for name in SIZE_LIMITS:
        if name in files:
            _refuse_large(name, files[name].size or 0)

    def fetch(name: str) -> Path:
        return Path(hf_hub_download(repo, name, revision=info.sha))

    weights = {name: file for name, file in sorted(files.items()) if is_weights(name)}
    return Snapshot(
        names=tuple(sorted(files)),
        texts={name: _read(fetch(name)) if name in files else None for name in SIZE_LIMITS},
        weights={name: file.lfs.sha256 if file.lfs else sha256(fetch(name)) for name, file in weights.items()},
    )


def _hashes(folder: Path, time_limit: float) -> dict[str, str | None]:
    """sha256 of the files of weights, as far as there is time: anyone can make a sparse file of any size."""
    end = time.process_time() + time_limit
    found: dict[str, str | None] = {}
    for name in weight_names(folder):
        total = hashlib.sha256()
        with open(folder / name, "rb") as file:
            while (chunk := file.read(CHUNK)) and time.process_time() < end:
                total.update(chunk)
        found[name] = None if chunk else total.hexdigest()
    return found


def _refuse_large(name: str, size: int) -> None:
    if size > SIZE_LIMITS[name]:
        raise ValueError(f"`{name}` has {size} bytes, at most {SIZE_LIMITS[name]} are read")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
