"""The prediction against a simulation, and the recipe that prints it."""

import json
import math

import pytest
import torch
from prediction import Regime, noise_to_signal
from residuals import main

from hf_private.methods.carriers.lowrank import LowRank


def simulated(g, carriers, std, draws=200):
    """Root of the mean squared cosine with g of its projection on carriers plus noise; without carriers, of g."""
    found = []
    for _ in range(draws):
        if carriers is None:
            noised = g + std * torch.randn_like(g)
        else:
            parts = {"L": (g @ carriers.right.T).T, "R": carriers.left.T @ g}
            noised = carriers.reconstruct({side: x + std * torch.randn_like(x) for side, x in parts.items()})
        found.append((noised * g).sum().item() / (noised.norm() * g.norm()).item())
    return sum(found) / draws


@pytest.mark.parametrize("std", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("aligned", [True, False])
def test_the_formula_is_what_a_simulation_finds(std, aligned):
    torch.manual_seed(0)
    p, d, r = 60, 80, 4
    g = torch.randn(p, 2) @ torch.randn(2, d) + 0.3 * torch.randn(p, d)
    g *= 10 / g.norm()
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    carriers = LowRank(u[:, :r], vh[:r])
    if not aligned:
        carriers = LowRank(torch.linalg.qr(torch.randn(p, r)).Q, torch.linalg.qr(torch.randn(d, r)).Q.T)
    inside = carriers.reconstruct({"L": (g @ carriers.right.T).T, "R": carriers.left.T @ g})
    kept = (inside.norm() / g.norm()).item() ** 2
    x = noise_to_signal(std, 1.0, 1.0, numbers=p * d, signal=g.norm().item())
    regime = Regime(x, dimensions=r * (p + d) / (p * d))
    assert simulated(g, None, std) == pytest.approx(regime.full(), rel=0.05)
    assert simulated(g, carriers, std) == pytest.approx(regime.carriers(kept), rel=0.1)


@pytest.mark.parametrize("x", [1e-3, 1.0, 40.0, 1e6])
@pytest.mark.parametrize("gain", [1.0, 2.0])
def test_the_needed_share_is_where_both_are_even(x, gain):
    regime = Regime(x, dimensions=0.05, gain=gain)
    assert regime.carriers(regime.needed) == pytest.approx(regime.full())
    assert regime.carriers(1.1 * regime.needed) > regime.full() > regime.carriers(0.9 * regime.needed)


def test_limits():
    assert Regime(0.0, 0.05).needed == 1
    assert Regime(1e9, 0.04, gain=2.0).needed == pytest.approx(math.sqrt(0.04) / 2, rel=1e-3)
    assert Regime(10.0, 0.05).carriers(0.0) == 0


def test_the_recipe_prints_every_source(tmp_path, capsys):
    main(f"--steps 10 --refresh 2 --expected_batch_size 32 --probe 32 --output {tmp_path / 'found'}".split())
    rows = {row["source"]: row for row in json.loads((tmp_path / "found.json").read_text())}
    assert set(rows) == {"weight", "history", "momentum", "public", "random", "self"}
    assert rows["self"]["residual"] < rows["public"]["residual"] < rows["random"]["residual"] < 1
    assert all(row["kept"] == pytest.approx(1 - row["residual"] ** 2, abs=0.02) for row in rows.values())
    assert "Noise-to-signal" in capsys.readouterr().out
