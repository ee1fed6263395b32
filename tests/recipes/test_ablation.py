"""The ablation runner: rows with the same draws and noise, averages of weights, and what it tries."""

from dataclasses import fields
from pathlib import Path

import ablation
import pytest
import torch
import yaml
from candidates import NoiseAwareAdam, Shaped
from torch import nn
from transformers import TrainingArguments

from hf_private.config import DPConfig
from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.mechanism.clipping import Clipping
from tests.recipes.test_paired import plan  # noqa: F401  a fixture

ROWS = {
    "base": {"averaged": True},
    "constant rate": {"lr_scheduler_type": "constant"},
    "less noise": {"optimizer": {"floor": 0.3, "lowpass": 0.5, "largest": 1.0}},
    "blocks": {"method": {"name": "Shaped", "with": {"per": "block"}}},
    "rows": {"method": {"name": "Shaped", "with": {"per": "row"}}, "seeds": [0]},
    "quantile": {"method": {"name": "QuantileClip", "with": {"count_std": 4, "expected_batch_size": 8}}},
    "public": {"method": {"name": "Preconditioned", "with": {"k": 2}}},
    "FFA-LoRA": {"lora": {"r": 2}, "train_only": "lora-B"},
    "biases": {"train_only": "bias", "frozen": ".*LayerNorm.*"},
}


@pytest.fixture
def screen(plan):  # noqa: F811
    return plan | {
        "task": "sst2", "rows": ROWS, "seeds": [0], "learning_rates": [1e-3], "corpus": plan["runs"],
        "averages": {"EMA": {"decay": 0.5}, "tail": {"tail": 0.5}},
        "settings": {"expected_batch_size": 8, "max_steps": 3, "noise_multiplier": 1.0},
    }  # fmt: skip


def test_every_row_runs_and_is_kept(screen, tmp_path):
    file = tmp_path / "ablation.yaml"
    file.write_text(yaml.safe_dump(screen))
    assert ablation.main([str(file), "--limit", "4"]) == 0
    assert ablation.main([str(file)]) == 0
    table = (tmp_path / "result.md").read_text()
    for row in ROWS:
        assert f"| {row} |" in table
    assert "| base, EMA |" in table


def test_runs_of_one_seed_have_the_same_draws_and_noise(screen, tmp_path):
    data = ablation.sst2(screen)
    first, second = (
        ablation.run(screen, ablation.asked(screen, "base", 1e-3, seed), data, tmp_path / "run") for seed in (0, 0)
    )
    assert first["right"] == second["right"]


def test_a_tail_of_one_step_is_the_last_weights():
    model = nn.Linear(2, 1)
    averages = ablation.Averages({"last": {"tail": 0.25}, "half": {"tail": 0.5}, "ema": {"decay": 0.5}})
    seen = []
    for step in range(4):
        with torch.no_grad():
            model.weight.fill_(float(step))
        state = type("State", (), {"global_step": step, "max_steps": 4})
        averages.on_optimizer_step(None, state, None, model=model)
        seen.append(float(step))
    assert averages.found["last"]["weight"].tolist() == [[3.0, 3.0]]
    assert averages.found["half"]["weight"].tolist() == [[2.5, 2.5]]
    weights = [0.5 ** (3 - i) for i in range(4)]
    expected = sum(w * x for w, x in zip(weights, seen, strict=True)) / sum(weights)
    assert averages.found["ema"]["weight"][0, 0].item() == pytest.approx(expected)


def test_noise_aware_adam_is_adam_without_its_options_and_subtracts_the_variance():
    torch.manual_seed(0)
    ours, theirs, less = (nn.Parameter(torch.ones(50, dtype=torch.float64)) for _ in range(3))
    adam = torch.optim.Adam([theirs], lr=0.1)
    mine, corrected = NoiseAwareAdam([ours], 0.1), NoiseAwareAdam([less], 0.1, floor=1e-3, betas=(0.0, 0.0))
    corrected.noise_std = {less: 0.5}
    for _ in range(5):
        g = torch.randn(50, dtype=torch.float64)
        before = less.detach().clone()
        for p, optimizer in ((ours, mine), (theirs, adam), (less, corrected)):
            p.grad = g.clone()
            optimizer.step()
        torch.testing.assert_close(ours, theirs)
        expected = before - 0.1 * g / ((g**2 - 0.25).clamp(min=(5e-4) ** 2).sqrt() + 1e-8)
        torch.testing.assert_close(less.detach(), expected)


@pytest.mark.parametrize("per", ["block", "row"])
def test_shaped_clips_in_scaled_units_exactly(per):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 9)).double()
    x, y = torch.randn(6, 12, dtype=torch.float64) * 3, torch.randint(9, (6,))
    method = Shaped(per, power=0.5)
    method.variance = 1e-4
    names = dict(model.named_parameters())
    method.attach(names)
    for _ in range(2):
        for name, p in names.items():
            method.gradient(name, {name: torch.randn_like(p) + p})
    method.begin_step(1)
    assert len(method.factors["0.weight"]) == (1 if per == "block" else 2)
    unit = {n: torch.outer(*f) if len(f) == 2 else f[0] for n, f in method.factors.items()}
    loss = nn.CrossEntropyLoss(reduction="none")
    expected = {name: torch.zeros_like(p) for name, p in names.items()}
    for i in range(6):
        grads = torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]).sum(), [*names.values()])
        scaled = {n: unit[n] * g for n, g in zip(names, grads, strict=True)}
        norm = torch.sqrt(sum((g**2).sum() for g in scaled.values()))
        for n, g in scaled.items():
            expected[n] += g * min(1.0, 0.5 / float(norm))
    sums: dict = {}
    with BookKeeper(model, method) as book:
        book.backward(loss(model(x), y))
        method.add_clipped_sums(book.pop_entries(), Clipping("flat", 0.5), sums)
    for n in names:
        torch.testing.assert_close(sums[n], expected[n], rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(method.gradient(n, sums), expected[n] / unit[n], rtol=1e-7, atol=1e-9)


def test_digits_hold_out_training_images():
    bench = ablation.digits({"held_out": 200})
    assert len(bench.train) == 1237
    assert bench.correct(bench.build(0)).shape == (200,)
    assert bench.build(0).vit.embeddings.cls_token.equal(bench.build(0).vit.embeddings.cls_token)


def test_shaped_learns_energies_from_noised_gradients_and_makes_them_alike():
    """With power 1/2 the scaled gradient has equal energies, and the norm of the whole stays."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    energy = torch.outer(torch.linspace(1, 9, 30), torch.linspace(4, 1, 40))
    method = Shaped("row", power=0.5)
    method.variance = 0.01
    method.attach(dict(model.named_parameters()))
    for step in range(300):
        method.begin_step(step)
        unit = method._unit("weight")
        noised = torch.randn(30, 40) * energy.sqrt() * unit + 0.1 * torch.randn(30, 40)
        method.gradient("weight", {"weight": noised})
        method.gradient("bias", {"bias": torch.randn(30) * method._unit("bias") + 0.1 * torch.randn(30)})
    scaled = energy * method._unit("weight") ** 2
    assert scaled.std() / scaled.mean() < 0.25 < energy.std() / energy.mean()
    whole = scaled.sum() + 30 * method._unit("bias").square()
    assert float(whole) == pytest.approx(float(energy.sum() + 30), rel=0.1)


@pytest.mark.parametrize("name", ["sst2", "digits"])
def test_the_plans_name_settings_that_exist(name):
    read = yaml.safe_load((Path(ablation.__file__).parent / "configs" / f"ablation_{name}.yaml").read_text())
    own = {"frozen", "lora", "optimizer", "method", "averaged", "seed", *ablation.COMMON}
    known = own | {*ablation.PRIVATE} | {field.name for field in fields(TrainingArguments)}
    files = set()
    for row, rate, seed in ablation.cells(read):
        settings = ablation.asked(read, row, rate, seed)
        assert settings.keys() <= known, row
        DPConfig(**{name: settings[name] for name in ablation.PRIVATE if name in settings})
        files.add(ablation.file_of(read, settings))
        method = settings.get("method")
        if method and method["name"] in ablation.METHODS:
            ablation.METHODS[method["name"]](**method["with"])
    assert len(files) == len(ablation.cells(read)), "every run has a file of its own"
