"""The worked example of a new method: its noise is DP-SGD's, its update has rank r."""

import math

import torch
from torch import nn

from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from hf_private.publishing.verify import verify
from hf_private.spending.statement import read_statement
from recipes.powersgd import PowerSGD, main


def run(method, noise_multiplier, clip_norm, steps=1):
    torch.manual_seed(0)
    layer, x = nn.Linear(9, 7).double(), torch.randn(5, 9).double()
    noise = NoiseSource()
    mechanism = Mechanism(
        layer, lambda m, b: m(b["x"]).square().sum(1), method=method, clipping=Clipping("flat", clip_norm),
        noise=noise,
        noise_multiplier=noise_multiplier, sample_rate=0.1, expected_batch_size=1, charge=lambda event: None,
    )  # fmt: skip
    for _ in range(steps):
        mechanism.step([{"x": x}])
    true = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
    return layer, noise, true


def test_noise_is_added_to_the_full_gradient_and_the_update_has_rank_r():
    layer, noise, _ = run(PowerSGD(r=2), 1.0, 1.0)
    assert noise.drawn == 9 * 7 + 7
    singular = torch.linalg.svdvals(layer.weight.grad)
    assert singular[1] > 1e-3 * singular[0] and singular[2] < 1e-9 * singular[0]


def test_repeated_steps_find_the_best_approximation():
    """With the same gradient each time, starting from the last Q is a power iteration."""
    layer, _, true = run(PowerSGD(r=2), 0.0, math.inf, steps=60)
    u, s, vh = torch.linalg.svd(true)
    best = u[:, :2] @ torch.diag(s[:2]) @ vh[:2]
    assert (layer.weight.grad - best).norm() < 1e-3 * best.norm()


def test_the_recipe_runs_with_its_own_method_and_its_card_names_it(tmp_path, capsys, monkeypatch):
    projected = []
    project = PowerSGD._project
    monkeypatch.setattr(PowerSGD, "_project", lambda *args: projected.append(args[1]) or project(*args))
    main(["--steps", "2", "--output_dir", str(tmp_path)])
    assert "epsilon" in capsys.readouterr().out
    assert projected.count("bert.pooler.dense.weight") == 2

    described = PowerSGD(r=4).describe()
    assert read_statement(tmp_path)["mechanism"]["method"] == described
    card = (tmp_path / "README.md").read_text()
    assert described in card and "(BK)" not in card
    assert verify(str(tmp_path)).code == 0
