"""What a published or saved model consists of, as far as a check needs it: names, a few texts, hashes of weights."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download

from hf_private.spending.spending import LEDGER
from hf_private.spending.statement import RECORD

from .card import CARD, sha256, weight_hashes
from .curve import CURVE_FILE


@dataclass(frozen=True)
class Snapshot:
    """A model folder, or a revision of a repository on the Hub.

    Args:
        names: All files.
        texts: What the record, the card and the curve say; None where there is none.
        weights: sha256 of each file of weights.
        folder: Where it lies, if it is local.
    """

    names: tuple[str, ...]
    texts: dict[str, str | None]
    weights: dict[str, str]
    folder: Path | None = None

    @property
    def ledger(self) -> Path | None:
        """The ledger beside a local model."""
        path = self.folder and self.folder / LEDGER
        return path if path and path.is_file() else None


def load_snapshot(path_or_repo: str, revision: str | None = None) -> Snapshot:
    """Read a local folder, or else a repository. Of weights on the Hub only hashes are fetched, where it has them."""
    texts = (RECORD, CARD, CURVE_FILE)
    if Path(path_or_repo).is_dir():
        folder = Path(path_or_repo)
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        return Snapshot(
            tuple(names),
            {name: _read(folder / name) if name in names else None for name in texts},
            weight_hashes(folder),
            folder,
        )
    try:
        info = HfApi().model_info(path_or_repo, revision=revision, files_metadata=True)
    except Exception as error:  # no such repository, no network, a path: whatever it is, there is nothing to check
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(f"There is no folder {path_or_repo!r}, and on the Hub: {reason}") from error
    files = {sibling.rfilename: sibling for sibling in info.siblings or ()}

    def fetch(name: str) -> Path:
        return Path(hf_hub_download(path_or_repo, name, revision=info.sha))

    return Snapshot(
        tuple(sorted(files)),
        {name: _read(fetch(name)) if name in files else None for name in texts},
        {
            name: file.lfs.sha256 if file.lfs else sha256(fetch(name))
            for name, file in sorted(files.items())
            if name.endswith(".safetensors") and "/" not in name
        },
    )


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
