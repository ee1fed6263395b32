"""The papers' plots: ranks and residuals against an SVD, dimensions against what is drawn."""

import json

import pytest
import torch
from diagnostics import (
    dimensions_by_method,
    gradient_report,
    noise_energy,
    principal,
    projection_residual,
    stable_rank,
)

from hf_private.cli.main import main
from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.method import Full
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.methods.registry import resolve_method
from tests.support import zoo


def test_stable_rank_follows_the_singular_values():
    torch.manual_seed(0)
    u, v = torch.linalg.qr(torch.randn(6, 6)).Q, torch.linalg.qr(torch.randn(12, 12)).Q
    matrix = u @ torch.diag(torch.tensor([2.0, 1.0, 1.0, 0, 0, 0])) @ v[:6]
    assert stable_rank(matrix) == pytest.approx(6 / 4)
    assert stable_rank(matrix.view(6, 3, 2, 2)) == pytest.approx(6 / 4)


def test_residuals_are_those_of_equations_5_and_6():
    torch.manual_seed(0)
    now, before = torch.randn(7, 9), torch.randn(7, 9)
    for source in (now, before):
        left, right = principal(source, r=3)
        outside = (torch.eye(7) - left @ left.T) @ now @ (torch.eye(9) - right.T @ right)
        assert projection_residual(now, left, right) == pytest.approx((outside.norm() / now.norm()).item(), rel=1e-5)
    assert projection_residual(now, *principal(now, 3)) < projection_residual(now, *principal(before, 3))
    assert projection_residual(now, *principal(now, 7)) < 1e-5


def carriers(name="bert", **settings):
    model, loss = zoo.build(name)
    model.eval()
    method = resolve_method(CarrierConfig(**settings), model)
    method.attach(trainable(model))
    method.begin_step(0)
    return model, loss, method


def test_a_report_needs_the_word_public():
    model, loss, method = carriers(r=3)
    batch = zoo.make_batch(model, batch_size=3)
    for public in (False, None, 1):
        with pytest.raises(ValueError, match=r"`public`.*got "):
            gradient_report(model, loss, batch, method, public=public)
    report = gradient_report(model, loss, batch, method, public=True)
    assert report.keys() == method.targets.keys()
    for row in report.values():
        assert 1 <= row["stable_rank"] <= 16 and "historical_residual" not in row
        assert 0 <= row["self_residual"] <= row["carrier_residual"] <= 1


def test_a_report_compares_with_an_earlier_gradient():
    model, loss, method = carriers(r=3)
    batch = zoo.make_batch(model, batch_size=3)
    weights = {name: trainable(model)[name] for name in method.targets}
    before = dict(zip(weights, torch.autograd.grad(loss(model, batch).sum(), list(weights.values())), strict=True))
    report = gradient_report(model, loss, batch, method, public=True, before=before)
    for row in report.values():
        assert row["historical_residual"] == pytest.approx(row["self_residual"])


def test_noise_energy_is_what_is_drawn():
    model, _, method = carriers(r=2, sparsity=0.5)
    noise = NoiseSource()
    sums = {block: torch.zeros(shape) for block, shape in method.blocks.items()}
    noise.add_(0, sums, method.stds(3.0, 0.5))
    assert noise_energy(method, 3.0, 0.5) == pytest.approx(2.25 * noise.drawn)
    full = Full()
    full.attach(trainable(model))
    assert noise_energy(full) > 4 * noise_energy(method)


@pytest.mark.parametrize("settings", [{"r": 2, "sparsity": 0.5}, {"r": None, "sparsity": 0.5}, {"r": 2}])
def test_dimensions_are_those_that_get_noise(settings):
    model, loss = zoo.build("gpt2")
    model.eval()
    config = CarrierConfig(**settings, source="history")
    table = dimensions_by_method(model, config)
    assert all(p.requires_grad for p in model.parameters()), "a table must not freeze anything"
    assert len(table) == 1 + bool(settings["r"]) + bool(settings.get("sparsity"))
    assert table["DP-SGD"] == {"trainable": model.num_parameters(), "noised": model.num_parameters(), "start_bytes": 0}
    row = list(table.values())[-1]
    method = resolve_method(config, model)
    noise = NoiseSource()
    Mechanism(
        model, loss, method=method, clipping=Clipping(), noise=noise, noise_multiplier=1.0, sample_rate=0.1,
        expected_batch_size=4, charge=lambda event: None,
    ).step([])  # fmt: skip
    assert row["noised"] == noise.drawn
    assert row["trainable"] == sum(p.numel() for p in trainable(model).values())
    assert row["start_bytes"] == sum(w.numel() * 8 for w in method.start.values())


def test_the_doctor_shows_noise_by_method(tmp_path, capsys):
    zoo.config("bert").save_pretrained(tmp_path)
    command = ["doctor", str(tmp_path), "--batch", "2", "--length", "7", "--json", "--carriers"]
    assert main([*command, "r=2,sparsity=0.5"]) == 0
    report = json.loads(capsys.readouterr().out)
    layers = 2 * (4 * 32 + 2 * 40) + 32  # rows + columns of all targeted matrices
    labels = 17 * zoo.config("bert").num_labels
    methods = report["methods"]
    assert methods["RGP r=2"]["noised"] == 2 * layers + labels
    assert methods["LSG r=2 sparsity=0.5"]["noised"] == layers + labels
    assert methods["LSG r=2 sparsity=0.5"]["flops"] < methods["BK"]["flops"]
    assert main([*command, "r=2,source=history"]) == 0
    with_start = json.loads(capsys.readouterr().out)["methods"]["RGP r=2"]
    weights = 2 * (4 * 16 * 16 + 2 * 16 * 24) + 16 * 16  # W_0 is kept
    assert with_start["peak_bytes"] == methods["RGP r=2"]["peak_bytes"] + 4 * weights
    with pytest.raises(SystemExit, match="2"):
        main([*command, "r=99"])
    assert "`r` must be at most 16" in capsys.readouterr().err
