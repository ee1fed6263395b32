"""Scales of blocks, the sources of carriers and what a resumed run reads back; either layout of a layer."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_private.gradients.bookkeeper import BookKeeper, trainable
from hf_private.mechanism.clipping import MODES, Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.methods.carriers.lowrank import LowRank, power_method
from hf_private.methods.carriers.method import MASKS, SOURCES, Carriers, Target
from hf_private.methods.carriers.sources import MEMORY, Momentum, refresh_averages
from hf_private.methods.gep.public_data import AnchorBooks
from hf_private.methods.registry import resolve_method
from tests.methods.carriers.test_method import EXACT, EXTRA, mechanism_of, prepare, step
from tests.support import oracle, zoo

# ---- public weights of blocks


def test_a_scale_is_undone_after_the_noise_and_leaves_the_noise_as_it_is():
    """Without clipping a scale changes nothing; the noise on the gradient of a scaled block is 1 / s as large."""
    model, loss, method = prepare("bert", r=2, head_scale=0.1)
    batch = zoo.make_batch(model, batch_size=3)
    true = oracle.weighted_sum(oracle.per_sample_gradients(model, loss, batch), torch.ones(3))
    step(model, loss, method, [batch])
    head = model.classifier.weight
    assert (head.grad - true["classifier.weight"]).norm() <= EXACT * head.grad.norm()
    assert set(method.stds(2.0, 3.0).values()) == {6.0}
    method.attach(trainable(model))
    step(model, loss, method, [], 1.0, 1.0)
    drawn = torch.cat([p.grad.flatten() for name, p in trainable(model).items() if name not in method.targets])
    assert 10 * 0.6 < drawn.std() < 10 * 1.5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_scale", [0.1, 1.0, 30.0])
def test_no_record_changes_the_release_by_more_than_the_clip_norm(mode, head_scale):
    """The sums that get noise, with and without one record, in every clipping style."""
    model, loss, method = prepare("bert", r=2, head_scale=head_scale)
    batch = zoo.make_batch(model, batch_size=4)
    clip = Clipping(mode, clip_norm=0.02)
    found = []
    for rows in ([0, 1, 2, 3], [1, 2, 3], [0, 2, 3], [0, 1, 2]):
        with BookKeeper(model, method) as book:
            book.backward(loss(model, {key: value[rows] for key, value in batch.items()}))
            sums = {block: torch.zeros(shape, dtype=torch.float64) for block, shape in method.blocks.items()}
            method.add_clipped_sums(book.pop_entries(), clip, sums)
        found.append(torch.cat([total.flatten() for total in sums.values()]))
    influence = max((found[0] - other).norm().item() for other in found[1:])
    assert influence <= 0.02 * (1 + 1e-9)
    assert influence > 0 or mode == "global"


class Replaced(NoiseSource):
    """Noise so strong that nothing of the sums is left: the release is the same whatever the records are."""

    def add_(self, step, sums, stds, offsets=None):
        generator = torch.Generator().manual_seed(step)
        for total in sums.values():
            total.copy_(torch.randn(total.shape, generator=generator, dtype=total.dtype))


@pytest.mark.parametrize("source", SOURCES)
def test_carriers_see_private_records_only_through_the_release(source):
    """Two runs on different records with the same release have the same carriers, blocks and weights throughout."""
    seen = []
    for seed in (1, 2):
        torch.manual_seed(0)
        model, loss = zoo.build("bert")
        model.eval()
        method = resolve_method(
            CarrierConfig(r=2, source=source, refresh=2, warmup_steps=1, sparsity=0.3, head_scale=0.3), model
        )
        public = zoo.make_batch(model, 5, seed=7)
        method.books = AnchorBooks(model, loss, lambda step, public=public: [public])
        batch = zoo.make_batch(model, batch_size=3, seed=seed)
        mechanism = mechanism_of(model, loss, method, 1.0, 1.0, Replaced())
        states = []
        for _ in range(5):
            mechanism.step([batch])
            with torch.no_grad():
                for p in trainable(model).values():
                    p.sub_(p.grad, alpha=1e-3)
            for carriers in method.carriers.values():
                states += [carriers.left.flatten(), carriers.right.flatten(), *carriers.kept.values()]
        states += [p.detach().flatten() for p in model.parameters()]
        seen.append(torch.cat(states))
    assert torch.equal(*seen)


# ---- directions that are public or paid for


def low_rank_regression(source, steps, refresh=1, noise=0.0, books=None):
    """Residual of each step's gradient (12 x 20, rank 2) outside of carriers of rank 2."""
    torch.manual_seed(0)
    x = (torch.randn(64, 2) @ torch.randn(2, 20)).double()
    y = (x @ torch.randn(20, 2).double()) @ torch.randn(2, 12).double()
    layer = nn.Linear(20, 12, bias=False).double()
    method = Carriers({"weight": Target(2)}, source=source, refresh=refresh, books=books)
    batch = {"x": x, "y": y}

    def loss(model, batch):
        return (model(batch["x"]) - batch["y"]).square().sum(1) / 64

    g = torch.autograd.grad(loss(layer, batch).sum(), layer.weight)[0]  # the weight does not move
    mechanism = mechanism_of(layer, loss, method, noise, 1e3)
    found = []
    for _ in range(steps):
        mechanism.step([batch])
        carriers = method.carriers["weight"]
        outside = g - carriers.left @ (carriers.left.T @ g)
        found.append(((outside - outside @ carriers.right.T @ carriers.right).norm() / g.norm()).item())
    return found


def test_momentum_finds_the_directions_of_the_gradient():
    """Each refresh is a power iteration on the noised gradients: the residual of a fixed gradient falls."""
    residuals = low_rank_regression("momentum", steps=9, refresh=2)
    assert residuals[0] == residuals[1] > 0.5 and residuals[2] == residuals[3] < residuals[0]
    assert residuals[-1] < 0.1  # the first periods fade slowly
    assert low_rank_regression("weight", steps=9, refresh=2)[-1] > 0.5
    assert low_rank_regression("momentum", steps=9, refresh=2, noise=1e-3)[-1] < 0.3


def test_momentum_remembers_earlier_periods():
    """The average of before joins that of the last period, faded by MEMORY for each step since."""
    torch.manual_seed(0)
    first, second = (LowRank(*(m[0] for m in power_method([lambda: torch.randn(7, 6)], [(torch.randn(7, 2),
                     torch.randn(2, 6))], 1))) for _ in range(2))  # fmt: skip
    average, parts = Momentum(), [{"L": torch.randn(2, 7), "R": torch.randn(2, 6)} for _ in range(3)]
    average.add(parts[0])
    refresh_averages([(average, first)], 3, steps=4)  # rank 6 of a 7 x 6 matrix: nothing is lost
    average.add(parts[1])
    average.add(parts[2])
    refresh_averages([(average, second)], 3, steps=4)
    left, right = average.directions(3)
    wanted = first.reconstruct(parts[0]) * MEMORY**4
    wanted += MEMORY * second.reconstruct(parts[1]) + second.reconstruct(parts[2])
    torch.testing.assert_close(average.left @ average.right, wanted)
    u, _, vh = torch.linalg.svd(wanted)
    torch.testing.assert_close(left @ left.T, u[:, :3] @ u[:, :3].T, atol=1e-4, rtol=0)
    torch.testing.assert_close(right.T @ right, vh[:3].T @ vh[:3], atol=1e-4, rtol=0)


def test_public_carriers_are_those_of_the_public_gradient():
    model, loss = zoo.build("gpt2")
    model.eval()
    method = resolve_method(CarrierConfig(r=2, source="public", power_iterations=8), model)
    method.attach(trainable(model))
    with pytest.raises(ValueError, match="`anchor_dataset`"):
        method.begin_step(0)
    batch = zoo.make_batch(model, 5, seed=7)
    parts = [{name: value[rows] for name, value in batch.items()} for rows in ([0, 1], [2, 3, 4])]
    method.books = AnchorBooks(model, loss, lambda step: parts)
    method.begin_step(0)
    true = oracle.weighted_sum(oracle.per_sample_gradients(model, loss, batch), torch.ones(5))
    for name, carriers in method.carriers.items():
        g = true[name].flatten(1)
        u, s, vh = torch.linalg.svd(g, full_matrices=False)
        outside = g - carriers.left @ (carriers.left.T @ g)
        outside = outside - outside @ carriers.right.T @ carriers.right
        assert outside.norm() <= 1.05 * s[2:].norm(), name  # as good as the singular vectors
    assert not method.takes_shards and Carriers({}).takes_shards


@pytest.mark.parametrize(
    "settings", [{"source": "momentum"}, {"refresh": 3}, {"refresh": 3, "sparsity": 0.4}], ids=str
)
def test_carriers_in_use_are_saved_and_read_back(tmp_path, settings):
    model, loss, method = prepare("gpt2", r=2, **settings)
    mechanism = mechanism_of(model, loss, method)
    for _ in range(5):
        mechanism.step([zoo.make_batch(model, 3)])
        with torch.no_grad():
            for p in trainable(model).values():
                p.sub_(p.grad, alpha=1e-2)
    method.save_state(tmp_path / "quiet", writes=False)
    assert not (tmp_path / "quiet").exists()
    method.save_state(tmp_path)
    resumed = resolve_method(CarrierConfig(**{"r": 2, "refresh": 1} | EXTRA["gpt2"] | settings), model)
    resumed.attach(trainable(model))
    resumed.begin_run(tmp_path, resumes=True, state=tmp_path)
    for i in (5, 6):
        method.begin_step(i), resumed.begin_step(i)
        assert method.blocks == resumed.blocks
        for name, carriers in method.carriers.items():
            torch.testing.assert_close(carriers.left, resumed.carriers[name].left)
            torch.testing.assert_close(carriers.right, resumed.carriers[name].right)
    again = resolve_method(CarrierConfig(**{"r": 2, "refresh": 1} | EXTRA["gpt2"] | settings), model)
    again.attach(trainable(model))
    if settings.get("source") == "momentum":
        with pytest.raises(FileNotFoundError, match="`.*absent`"):
            again.begin_run(tmp_path, resumes=True, state=tmp_path / "absent")
    else:
        again.begin_run(tmp_path, resumes=True, state=tmp_path / "absent")  # an older checkpoint: computed anew
        assert not again.carriers


@pytest.mark.parametrize("mask", MASKS)
def test_masks_in_use_are_saved_and_read_back(tmp_path, mask):
    model, _, method = prepare("bert", r=None, sparsity=0.4, refresh=5, mask=mask)
    method.save_state(tmp_path)
    resumed = resolve_method(CarrierConfig(r=None, sparsity=0.4, refresh=5, mask=mask), model)
    resumed.attach(trainable(model))
    resumed.begin_run(tmp_path, resumes=True, state=tmp_path)
    resumed.begin_step(2)
    for name, kept in method.carriers.items():
        parts = {"S": torch.ones(method.blocks[f"{name}:S"])}
        assert torch.equal(kept.reconstruct(parts), resumed.carriers[name].reconstruct(parts)), name


# ---- layouts


@pytest.mark.parametrize("settings", [{}, {"sparsity": 0.4}, {"sides": "left"}], ids=str)
def test_linear_and_conv1d_forms_of_a_layer_take_the_same_step(settings):
    """The same function in either layout, clipped and noised alike, gets the same update."""
    torch.manual_seed(0)
    weight, x = torch.randn(5, 8).double(), torch.randn(4, 3, 8).double()
    linear, conv = nn.Linear(8, 5).double(), Conv1D(5, 8).double()
    with torch.no_grad():
        linear.weight.copy_(weight)
        conv.weight.copy_(weight.t())
        conv.bias.copy_(linear.bias)
    grads = []
    for layer in (linear, conv):
        model = nn.ModuleDict({"layer": layer})
        model.forward = lambda x, layer=layer: layer(x)
        method = resolve_method(CarrierConfig(r=2, target_modules=["layer"], **settings), model)
        batch = {"x": x}
        step(model, lambda m, b: m(b["x"]).tanh().square().sum((1, 2)), method, [batch], 0.0, 0.1)
        sums = {  # the same noise on the same side of the layer
            f"layer.weight:{side}": torch.randn(
                method.blocks[f"layer.weight:{side}"],
                generator=torch.Generator().manual_seed(out),
                dtype=torch.float64,
            )
            for side, out in zip("LR", (0, 1) if layer is linear else (1, 0), strict=True)
            if f"layer.weight:{side}" in method.blocks
        }
        g = layer.weight.grad + method.gradient("layer.weight", sums)
        grads.append(g if layer is linear else g.t())
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)
