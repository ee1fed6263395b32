"""Public starts: uniform numbers that are a function of their label."""

import torch

from hf_private.methods.subspace import public_start

CPU = torch.device("cpu")


def start(
    *label: str | int, shape: tuple[int, ...] = (4, 100, 100), dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return public_start(shape, dtype, CPU, *label)


def test_a_start_is_a_function_of_its_label() -> None:
    assert torch.equal(start(0, 1, "w"), start(0, 1, "w"))
    assert torch.equal(start(0, 1, "w").double(), start(0, 1, "w", dtype=torch.float64))
    others = [start(0, 1, "v"), start(0, 2, "w"), start(1, 1, "w")]
    assert all((start(0, 1, "w") != other).float().mean() > 0.999 for other in others)


def test_its_numbers_are_uniform_and_its_rows_unrelated() -> None:
    rows = start(0, 1, "w").flatten(1).double()
    assert rows.abs().max() < 1
    assert rows.mean(1).abs().max() < 5 / (3 * rows.shape[1]) ** 0.5
    assert (rows.square().mean(1) - 1 / 3).abs().max() < 5 * (4 / 45 / rows.shape[1]) ** 0.5
    shifted = torch.cat([rows, rows.roll(1, 1)])  # neighbours are unrelated, too
    related = shifted @ shifted.T / rows.shape[1] * 3 - torch.eye(8)
    assert related.abs().max() < 5 / rows.shape[1] ** 0.5
    counts = torch.histc(rows.float(), 16, -1, 1)
    assert (counts / counts.sum() * 16 - 1).abs().max() < 5 * 4 / rows.numel() ** 0.5


def test_a_start_may_be_of_scalars() -> None:
    assert start("s", shape=(3,)).unique().numel() == 3
