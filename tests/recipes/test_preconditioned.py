"""A clip norm that follows a quantile, and public preconditioning, against loops of plain autograd in float64."""

import math

import pytest
import torch
from preconditioned import Preconditioned, QuantileClip, Side, public_sides
from torch import nn

from hf_private.accounting.events import Event
from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism

LOSS = nn.CrossEntropyLoss(reduction="none")
CLIP = 0.5


class Tokens(nn.Module):
    """Two linear layers over positions, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(7, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh()).mean(1)


@pytest.fixture
def model() -> nn.Module:
    return Tokens().double()


def records(count: int = 9, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(count, 1, 1, generator=generator, dtype=torch.float64) * 4
    x = torch.randn(count, 2, 7, generator=generator, dtype=torch.float64) * size
    return x, torch.randint(3, (count,), generator=generator)


def gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    names = dict(model.named_parameters())
    found = []
    for i in range(len(x)):
        grads = torch.autograd.grad(LOSS(model(x[i : i + 1]), y[i : i + 1]).sum(), [*names.values()])
        found.append(dict(zip(names, grads, strict=True)))
    return found


def clipped_sum(found: list[dict[str, torch.Tensor]], clip: float) -> dict[str, torch.Tensor]:
    norms = [float(sum((g**2).sum() for g in one.values()) ** 0.5) for one in found]
    return {name: sum(min(1, clip / n) * one[name] for n, one in zip(norms, found, strict=True)) for name in found[0]}


def run(model: nn.Module, method: QuantileClip | Preconditioned, x: torch.Tensor, y: torch.Tensor) -> dict:
    method.attach(dict(model.named_parameters()))
    sums: dict[str, torch.Tensor] = {}
    for part in (slice(0, 4), slice(4, None)):  # micro-batches
        with BookKeeper(model, method) as book:
            book.backward(LOSS(model(x[part]), y[part]))
            method.add_clipped_sums(book.pop_entries(), Clipping("flat", CLIP), sums)
    return sums


def test_a_scale_moves_the_clip_norm_and_the_count_is_that_of_the_records_below(model):
    x, y = records()
    found = gradients(model, x, y)
    norms = [float(sum((g**2).sum() for g in one.values()) ** 0.5) for one in found]
    scale = CLIP / sorted(norms)[3]  # four of nine are below
    method = QuantileClip(count_std=1.0, expected_batch_size=9, scale=scale * (1 + 1e-6) ** -1)
    sums = run(model, method, x, y)
    assert float(sums[method.COUNT]) == 4 * 0.5 - 5 * 0.5
    expected = clipped_sum(found, CLIP / method.scale)
    for name, value in expected.items():
        torch.testing.assert_close(method.gradient(name, sums), value, rtol=1e-5, atol=1e-9)


def test_a_record_that_is_no_number_changes_the_count_by_half(model):
    x, y = records()
    x[2] = float("nan")
    sums = run(model, method := QuantileClip(1.0, 9, scale=1e-9), x, y)
    assert float(sums[method.COUNT]) == 8 * 0.5 - 0.5


def test_both_releases_cost_what_is_accounted(model):
    method = QuantileClip(count_std=3.0, expected_batch_size=60)
    method.attach(dict(model.named_parameters()))
    releases = method.releases(0.8)
    assert Event(0.1, releases).noise_multiplier == pytest.approx(0.8)
    stds = method.stds(0.8, CLIP)
    assert stds["first.weight"] / CLIP == releases[0] > 0.8
    assert stds[method.COUNT] / 0.5 == releases[1], "one record changes the count by a half"
    with pytest.raises(ValueError, match="`count_std` must be above 4"):
        method.releases(8.0)


def test_the_clip_norm_finds_the_quantile(model):
    """Without noise, whatever it starts from; the steps themselves are those of the mechanism."""
    x, y = records(200)
    norms = sorted(float(sum((g**2).sum() for g in one.values()) ** 0.5) for one in gradients(model, x, y))
    for scale in (0.01, 30.0):
        method = QuantileClip(10.0, 200, target=0.3, rate=0.5, scale=scale)
        mechanism = Mechanism(
            model, lambda m, b: LOSS(m(b["x"]), b["y"]), method=method, clipping=Clipping("flat", CLIP),
            noise=NoiseSource(), noise_multiplier=0.0, sample_rate=1.0, expected_batch_size=200,
            charge=lambda event: None,
        )  # fmt: skip
        for _ in range(60):
            mechanism.step([{"x": x, "y": y}])
        assert norms[50] <= CLIP / method.scale <= norms[70]


def test_a_resumed_run_is_refused():
    with pytest.raises(ValueError, match="`resume_from_checkpoint`"):
        QuantileClip(1.0, 9).begin_run("folder", resumes=True)


@pytest.mark.parametrize("power", [0.25, 0.5])
def test_preconditioned_gradients_are_clipped_as_a_loop_would(model, power):
    public, labels = records(20, seed=5)
    sides = public_sides(model, lambda batch: LOSS(model(batch[0]), batch[1]), [(public, labels)], k=2, power=power)
    assert set(sides) == {"first.weight", "last.weight"}
    x, y = records()
    method = Preconditioned(sides)
    sums = run(model, method, x, y)
    dense = {n: tuple(torch.eye(len(s.directions), dtype=torch.float64) @ s for s in two) for n, two in sides.items()}
    found = gradients(model, x, y)
    moved = [{n: dense[n][0] @ g @ dense[n][1] if n in dense else g for n, g in one.items()} for one in found]
    expected = clipped_sum(moved, CLIP)
    for name, value in expected.items():
        torch.testing.assert_close(sums[name], value, rtol=1e-7, atol=1e-9)
        back = dense[name][0].inverse() @ value @ dense[name][1].inverse() if name in dense else value
        torch.testing.assert_close(method.gradient(name, sums), back, rtol=1e-7, atol=1e-9)
    assert (clipped_sum(found, CLIP)["first.weight"] - method.gradient("first.weight", sums)).abs().max() > 1e-3


def test_public_directions_are_those_of_the_second_moments_and_keep_their_size(model):
    x, y = records(20, seed=5)
    batches = [(x[:8], y[:8]), (x[8:], y[8:])]
    sides = public_sides(model, lambda batch: LOSS(model(batch[0]), batch[1]), batches, k=3, power=0.5)
    flat = x.flatten(0, 1)
    values, vectors = torch.linalg.eigh(flat.T @ flat)
    columns = sides["first.weight"][1]
    overlap = (columns.directions.T @ vectors[:, -3:]).abs()
    torch.testing.assert_close(overlap, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-8)
    moved = flat @ columns
    assert float(moved.square().sum()) == pytest.approx(float(flat.square().sum()))
    after = torch.linalg.eigvalsh(moved.T @ moved)
    assert after.max() / after.mean() < values.max() / values.mean()
    torch.testing.assert_close((flat @ columns) @ columns.inverse(), flat)


def test_a_side_is_the_matrix_that_it_says():
    v = torch.linalg.qr(torch.randn(6, 2, dtype=torch.float64))[0]
    side = Side(v, torch.tensor([0.5, 0.1], dtype=torch.float64), 2.0)
    whole = 2.0 * (torch.eye(6, dtype=torch.float64) + v @ torch.diag(side.weights - 1) @ v.T)
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(x @ side, x @ whole)
    assert math.isclose(float(torch.linalg.det(whole)), 2.0**6 * 0.05)
