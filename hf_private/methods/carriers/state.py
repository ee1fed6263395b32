"""Files of a run with carriers: W_0 beside the ledger, and in each checkpoint the carriers that are in use.

All of it is public: it follows from released weights and gradients. It stays local because the model does not need it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .lowrank import Elements, LowRank, Submatrix
from .sources import Momentum

START = "start.safetensors"  # in the folder of the run
STATE = "carriers.safetensors"  # in the folder of a checkpoint


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file that is either complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished)
    os.replace(unfinished, path)


def read_start(path: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """W_0 by parameter name; a missing file, or one that does not fit, is an error."""
    if not path.is_file():
        raise FileNotFoundError(
            f"`{path}` must exist: source='history' takes carriers from W_t - W_0, and the file holds W_0. Restore"
            " it from the folder of that run, or start a new run."
        )
    start = load_file(path)
    for name, shape in shapes.items():
        if name not in start or start[name].shape != shape:
            raise ValueError(f"`{path}` must fit the model, got `{name}` missing or with a different shape.")
    return start


def save_carriers(
    folder: str | Path, carriers: Mapping[str, LowRank | Submatrix | Elements], momentum: Mapping[str, Momentum]
) -> None:
    """Write carriers, kept neurons and averages to the folder of a checkpoint."""
    found: dict[str, Tensor | None] = {}
    for name, part in carriers.items():
        if isinstance(part, Submatrix):
            found |= {f"{name}|rows": part.rows, f"{name}|columns": part.columns}
        elif isinstance(part, Elements):
            found[f"{name}|elements"] = part.index
        else:
            found |= {f"{name}|left": part.left, f"{name}|right": part.right}
            found |= {f"{name}|kept {side}": index for side, index in part.kept.items()}
    for name, average in momentum.items():
        found |= {f"{name}|average left": average.left, f"{name}|average right": average.right}
        found |= {f"{name}|recent {side}": part for side, part in average.recent.items()}
    write_tensors(Path(folder, STATE), {key: x.detach().clone() for key, x in found.items() if x is not None})


def load_carriers(
    folder: str | Path | None, targets: Mapping[str, tuple[Tensor, tuple[str, ...]]]
) -> tuple[dict[str, LowRank | Submatrix | Elements], dict[str, Momentum]] | None:
    """What `save_carriers` wrote, for weights and their sides by name; None without a file."""
    path = Path(folder, STATE) if folder is not None else None
    if path is None or not path.is_file():
        return None
    read = load_file(path)
    carriers: dict[str, LowRank | Submatrix | Elements] = {}
    momentum: dict[str, Momentum] = {}
    for name, (weight, sides) in targets.items():
        own = {
            key.rpartition("|")[2]: x.to(weight.device) for key, x in read.items() if key.rpartition("|")[0] == name
        }
        if "rows" in own:
            carriers[name] = Submatrix(own["rows"], own["columns"], weight.shape)
        elif "elements" in own:
            carriers[name] = Elements(own["elements"], weight.shape)
        elif "left" in own and own["left"].shape[0] == weight.shape[0]:
            keep = (own["kept L"], own["kept R"]) if "kept L" in own else ()
            carriers[name] = LowRank(own["left"], own["right"], sides, keep)
        else:
            raise ValueError(f"`{path}` must fit the model, got `{name}` missing or with a different shape.")
        recent = {side: own[f"recent {side}"] for side in "LR" if f"recent {side}" in own}
        if recent or "average left" in own:
            momentum[name] = Momentum()
            momentum[name].recent = recent
            momentum[name].left, momentum[name].right = own.get("average left"), own.get("average right")
    return carriers, momentum
