"""RGP and LSG against gradients that were formed: nothing here uses the engine's own way of computing them."""

import math
import weakref

import pytest
import torch
from torch import nn

from hf_private.gradients.bookkeeper import BookKeeper, trainable
from hf_private.gradients.method import Full
from hf_private.gradients.persample import Dense
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.methods.carriers.lowrank import Elements, Submatrix
from hf_private.methods.carriers.method import Carriers, Target
from hf_private.methods.gep.public_data import AnchorBooks
from hf_private.methods.registry import resolve_method
from tests.support import oracle, zoo

EXACT = 1e-8
FAMILIES = ["bert", "gpt2", "llama", "t5", "vit", "resnet-gn"]
EXTRA = {
    "gpt2": {"modules_to_save": ["lm_head"]},  # tied
    "resnet-gn": {"target_modules": ["stem", "grouped", "dilated", "down"], "modules_to_save": ["classifier"]},
}
SETTINGS = {
    "RGP": {"r": 3},
    "RGP, head not scaled": {"r": 3, "head_scale": 1.0},
    "RGP, other ranks": {"r": 1, "rank_pattern": {"o_proj": 2}, "bias": "all"},
    "RGP, left": {"r": 2, "sides": "left"},
    "RGP, history": {"r": 2, "source": "history", "warmup_steps": 0, "power_iterations": 2},
    "RGP, momentum": {"r": 2, "source": "momentum"},
    "RGP, public": {"r": 2, "source": "public"},
    "RGP-random": {"r": 2, "source": "random"},
    "LSG": {"r": 3, "sparsity": 0.4},
    "LSG, momentum": {"r": 3, "sparsity": 0.4, "source": "momentum"},
    "LSG, public": {"r": 3, "sparsity": 0.4, "source": "public"},
    "LSG, left": {"r": 3, "sparsity": 0.4, "sides": "left"},
    "Sparse DP-SGD": {"r": None, "sparsity": 0.4},
    "Sparse DP-SGD, elements": {"r": None, "sparsity": 0.4, "mask": "elements"},
}
RANKED = {"bert": "query", "gpt2": "c_attn", "llama": "o_proj", "t5": "wi", "vit": "q_proj", "resnet-gn": "down"}


def prepare(name, **settings):
    """A model in float64 with carriers of its own weights, moved a little away from W_0."""
    model, loss = zoo.build(name)
    model.eval()
    if "rank_pattern" in settings:
        leaf = next(path for path, m in model.named_modules() if RANKED[name] in path and hasattr(m, "weight"))
        settings["rank_pattern"] = {leaf.rpartition(".")[2]: 2}
    method = resolve_method(CarrierConfig(**{"refresh": 1} | EXTRA.get(name, {}) | settings), model)
    method.attach(trainable(model))
    method.books = AnchorBooks(model, loss, lambda step: [zoo.make_batch(model, 4, seed=7)])
    method.begin_step(0)
    released = {block: torch.randn(shape, dtype=torch.float64) for block, shape in method.blocks.items()}
    with torch.no_grad():
        for parameter, p in trainable(model).items():
            p.add_(0.05 * torch.randn_like(p))
            method.gradient(parameter, released)
    method.begin_step(1)
    return model, loss, method


def carried(method, name, gradient):
    """By definition: what a record with this gradient releases for a targeted weight."""
    g, carriers = gradient.flatten(1), method.carriers[name]
    if isinstance(carriers, Submatrix):
        return {f"{name}:S": g[carriers.rows][:, carriers.columns]}
    if isinstance(carriers, Elements):
        return {f"{name}:S": g.flatten()[carriers.index]}
    left, right = (g @ carriers.right.T).T, carriers.left.T @ g
    if carriers.kept:
        left, right = left[:, carriers.kept["L"]], right[:, carriers.kept["R"]]
    return {f"{name}:{side}": part for side, part in (("L", left), ("R", right)) if side in carriers.sides}


def released(method, gradients):
    """The same for all parameters and records."""
    return [
        {
            block: part
            for name, g in one.items()
            for block, part in (carried(method, name, g) if name in method.targets else {name: g}).items()
        }
        for one in gradients
    ]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_norms_and_clipped_sums_equal_the_oracles(name, settings):
    model, loss, method = prepare(name, **settings)
    batch = zoo.make_batch(model, batch_size=3)
    wanted = released(method, oracle.per_sample_gradients(model, loss, batch))
    assert set(wanted[0]) == set(method.blocks)
    assert all(part.shape == method.blocks[block] for block, part in wanted[0].items())
    with BookKeeper(model, method) as book:
        book.backward(loss(model, batch))
        torch.testing.assert_close(book.norms(), oracle.norms(wanted), rtol=EXACT, atol=0)
        scale = settings.get("head_scale", 0.3)
        wanted = [{block: g if ":" in block else scale * g for block, g in one.items()} for one in wanted]
        norms = oracle.norms(wanted)
        clip = Clipping("flat", clip_norm=norms.median().item())
        sums = {}
        method.add_clipped_sums(book.pop_entries(), clip, sums)
    expected = oracle.weighted_sum(wanted, (clip.clip_norm / norms).clamp(max=1))
    size = math.sqrt(sum(block.square().sum() for block in expected.values()))
    for block, value in expected.items():
        got = sums.get(block, torch.zeros_like(value))
        assert (got - value).norm() <= EXACT * size, block  # factors are lowered by 1e-12


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("sides", ["both", "left"])
def test_the_gradient_is_the_projection_of_the_true_one(name, sides):
    """Corollary 2.1.1, with noise 0 and clip inf: the part of the gradient in the carriers' row or column space."""
    model, loss, method = prepare(name, r=3, sides=sides)
    batch = zoo.make_batch(model, batch_size=3)
    true = oracle.weighted_sum(oracle.per_sample_gradients(model, loss, batch), torch.ones(3))
    step(model, loss, method, [batch], first_step=1)
    for parameter_name, p in trainable(model).items():
        g = true[parameter_name]
        if parameter_name in method.targets:
            carriers = method.carriers[parameter_name]
            outside_left = torch.eye(len(carriers.left)) - carriers.left @ carriers.left.T
            outside_right = torch.eye(carriers.right.shape[1]) - carriers.right.T @ carriers.right
            matrix = g.flatten(1)
            if sides == "both":
                matrix = matrix - outside_left @ matrix @ outside_right
            elif carriers.sides == ("L",):
                matrix = matrix - matrix @ outside_right
            else:
                matrix = matrix - outside_left @ matrix
            g = matrix.view_as(g)
        assert (p.grad - g).norm() <= EXACT * (1e-3 + g.norm()), parameter_name


@pytest.mark.parametrize("name", FAMILIES)
def test_full_rank_gives_the_gradient_itself(name):
    model, loss, _ = prepare(name, r=2)
    targets = {n: Target(min(p.shape[0], p.shape[1:].numel())) for n, p in trainable(model).items() if p.dim() > 1}
    method = Carriers(targets)
    batch = zoo.make_batch(model, batch_size=2)
    true = oracle.weighted_sum(oracle.per_sample_gradients(model, loss, batch), torch.ones(2))
    step(model, loss, method, [batch])
    for parameter_name, p in trainable(model).items():
        assert (p.grad - true[parameter_name]).norm() <= EXACT * (1e-3 + true[parameter_name].norm()), parameter_name


def mechanism_of(model, loss, method, noise_multiplier=0.0, clip_norm=math.inf, noise=None):
    return Mechanism(
        model, loss, method=method, clipping=Clipping("flat", clip_norm), noise=noise or NoiseSource(),
        noise_multiplier=noise_multiplier, sample_rate=0.1, expected_batch_size=1, charge=lambda event: None,
    )  # fmt: skip


def step(model, loss, method, batches, noise_multiplier=0.0, clip_norm=math.inf, first_step=0):
    """One step of the mechanism; returns the noise source."""
    mechanism = mechanism_of(model, loss, method, noise_multiplier, clip_norm)
    mechanism.steps = first_step
    mechanism.step(batches)
    return mechanism.noise


# ---- noise


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("sparsity", "batches"), [(0.0, 1), (0.5, 1), (0.5, 0)])
def test_noise_has_the_carriers_dimension(name, sparsity, batches):
    """Sum of r (p + d), and (1 - p) of it with sparsity, counted where noise is drawn; empty draws too."""
    model, loss, method = prepare(name, r=2, sparsity=sparsity)
    noise = step(model, loss, method, [zoo.make_batch(model, batch_size=2)] * batches, 1.0, 1.0)
    carriers = full = 0
    for parameter_name, p in trainable(model).items():
        if parameter_name in method.targets:
            carriers += 2 * (p.shape[0] + p[0].numel())
        else:
            full += p.numel()
    odd = sum(
        2 * (p.shape[0] % 2 + p.shape[1] % 2 * p.shape[2:].numel()) for p in map(trainable(model).get, method.targets)
    )
    assert abs(noise.drawn - full - (1 - sparsity) * carriers) <= (odd if sparsity else 0)
    assert noise.drawn < sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_sparse_dp_sgd_noises_its_part_of_the_elements():
    model, loss, method = prepare("bert", r=None, sparsity=0.75, target_modules=["query"])
    noise = step(model, loss, method, [], 1.0, 1.0)
    head = 3 * 16 + 3
    assert noise.drawn - head == 2 * 16 * 16 // 4
    assert (model.bert.encoder.layer[0].attention.self.query.weight.grad != 0).sum() == 8 * 8


def test_elements_with_large_weights_are_the_ones_that_move():
    model, loss, method = prepare("bert", r=None, sparsity=0.75, target_modules=["query"], mask="elements")
    noise = step(model, loss, method, [], 1.0, 1.0)
    assert noise.drawn - (3 * 16 + 3) == 2 * 16 * 16 // 4
    weight = model.bert.encoder.layer[0].attention.self.query.weight
    moved = weight.grad != 0
    assert moved.sum() == 64 and weight[moved].abs().min() > weight[~moved].abs().max()


def test_sparsity_sets_in_at_its_step_and_masks_follow():
    layer = nn.Linear(6, 4, bias=False)
    method = Carriers({"weight": Target(2)}, sparsity=0.5, sparsity_start=2, refresh=5)
    method.attach(dict(layer.named_parameters()))
    shapes = []
    for i in range(4):
        method.begin_step(i)
        shapes.append(tuple(method.blocks["weight:R"]))
        assert bool(method.carriers["weight"].kept) == (i >= 2)
    assert shapes == [(2, 6), (2, 6), (2, 3), (2, 3)]


# ---- carriers


def carriers_after(seed, steps, global_seed, **settings):
    torch.manual_seed(1)
    layer = nn.Linear(6, 5, bias=False)
    method = Carriers({"weight": Target(2)}, seed=seed, **settings)
    method.attach(dict(layer.named_parameters()))
    torch.manual_seed(global_seed)
    before = torch.get_rng_state()
    for i in range(steps):
        method.begin_step(i)
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is reseeded from secrets
    return method.carriers["weight"].left


def test_carriers_depend_on_the_public_seed_and_the_step_only():
    assert torch.equal(carriers_after(7, 2, 0), carriers_after(7, 2, 99))
    assert not torch.equal(carriers_after(7, 2, 0), carriers_after(8, 2, 0))
    assert not torch.equal(carriers_after(7, 2, 0), carriers_after(7, 3, 0))
    assert torch.equal(carriers_after(7, 2, 0, refresh=2), carriers_after(7, 1, 0))
    assert not torch.equal(carriers_after(7, 3, 0, refresh=2), carriers_after(7, 2, 0, refresh=2))


def test_layers_of_one_shape_get_different_random_carriers():
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    method = Carriers({"0.weight": Target(2), "1.weight": Target(2)}, source="random")
    method.attach(dict(model.named_parameters()))
    method.begin_step(0)
    assert not torch.equal(method.carriers["0.weight"].left, method.carriers["1.weight"].left)


# ---- history


def test_proposition_4_1_history_recovers_the_gradient_of_linear_regression():
    """Gradients of least squares keep their row and column space; W_t - W_0 spans it, and the update is exact."""
    torch.manual_seed(0)
    rank, n = 3, 40
    x = (torch.randn(n, rank) @ torch.randn(rank, 12)).double()  # features of rank 3
    y = x @ torch.randn(12, 8).double()
    layer = nn.Linear(12, 8, bias=False).double()
    method = Carriers({"weight": Target(rank)}, source="history", warmup_steps=0)
    gradients = []
    for i in range(4):
        g = torch.autograd.grad((layer(x) - y).square().sum() / n, layer.weight)[0]
        gradients.append(g)
        step(layer, lambda m, b: (m(b["x"]) - b["y"]).square().sum(1) / n, method, [{"x": x, "y": y}], first_step=i)
        if i:
            assert (layer.weight.grad - g).norm() <= EXACT * g.norm()
        else:  # no history yet: carriers of the weight, which cannot span the gradient
            assert (layer.weight.grad - g).norm() > 1e-3 * g.norm()
        with torch.no_grad():
            layer.weight -= 0.001 * g
    u, _, vh = torch.linalg.svd(gradients[0], full_matrices=False)
    u, vh = u[:, :rank], vh[:rank]
    for g in gradients[1:]:
        assert (g - u @ (u.T @ g)).norm() <= EXACT * g.norm() and (g - (g @ vh.T) @ vh).norm() <= EXACT * g.norm()


def test_history_waits_for_its_warm_up():
    layer = nn.Linear(6, 5, bias=False)
    parameters = dict(layer.named_parameters())
    by_history = Carriers({"weight": Target(1)}, source="history", warmup_steps=2)
    by_weight = Carriers({"weight": Target(1)})
    by_history.attach(parameters), by_weight.attach(parameters)
    same = []
    for i in range(4):
        by_history.begin_step(i), by_weight.begin_step(i)
        same.append(torch.equal(by_history.carriers["weight"].left, by_weight.carriers["weight"].left))
        with torch.no_grad():
            layer.weight += torch.outer(torch.arange(5.0), torch.ones(6))
    assert same == [True, True, False, False]
    direction = torch.arange(5.0) / torch.arange(5.0).norm()
    assert (by_history.carriers["weight"].left[:, 0] @ direction).abs() > 1 - 1e-5


def test_the_start_is_written_once_and_read_on_resume(tmp_path):
    layer = nn.Linear(6, 5, bias=False)
    parameters = dict(layer.named_parameters())
    start = layer.weight.detach().clone()

    def attached():
        method = Carriers({"weight": Target(1)}, source="history", warmup_steps=0)
        method.attach(parameters)
        return method

    attached().begin_run(tmp_path / "quiet", writes=False)
    assert not (tmp_path / "quiet").exists()
    first = attached()
    first.begin_run(tmp_path)
    assert (
        first.start_bytes == (tmp_path / "start.safetensors").stat().st_size // 4 // 30 * 120
        or first.start_bytes == 120
    )
    with torch.no_grad():
        layer.weight += 1
    resumed = attached()
    resumed.begin_run(tmp_path, resumes=True)
    assert torch.equal(resumed.start["weight"], start)
    first.begin_step(3), resumed.begin_step(3)
    assert torch.equal(first.carriers["weight"].left, resumed.carriers["weight"].left)
    (tmp_path / "start.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"`.*start\.safetensors`"):
        attached().begin_run(tmp_path, resumes=True)
    other = Carriers({"weight": Target(1)}, source="history")
    other.attach(dict(nn.Linear(7, 5, bias=False).named_parameters()))
    first.begin_run(tmp_path)
    with pytest.raises(ValueError, match="`weight`"):
        other.begin_run(tmp_path, resumes=True)


# ---- the book


def test_a_layers_inputs_are_dropped_inside_the_backward_pass():
    model, loss, method = prepare("bert", r=2, sparsity=0.3)
    with BookKeeper(model, method) as book:
        book.backward(loss(model, zoo.make_batch(model, batch_size=3)))
        assert all(isinstance(book.entries()[block], Dense) for block in method.blocks if ":" in block)
        for block, value in book.entries().items():
            if ":" in block:
                assert value.dense().shape[1:] == method.blocks[block]
                storage = value.dense().untyped_storage().nbytes() // value.dense().element_size()
                assert storage == value.dense().numel(), "a view keeps the whole tensor alive"


def test_micro_batches_of_any_size_give_the_same_step():
    grads = []
    for size in (1, 2, 4):
        torch.manual_seed(0)
        model, loss, method = prepare("gpt2", r=2, sparsity=0.3)
        batch = zoo.make_batch(model, batch_size=4)
        micro = [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, 4, size)]
        step(model, loss, method, micro, clip_norm=0.5)
        grads.append(torch.cat([p.grad.flatten() for p in trainable(model).values()]))
    torch.testing.assert_close(grads[0], grads[2], rtol=EXACT, atol=1e-12)
    torch.testing.assert_close(grads[1], grads[2], rtol=EXACT, atol=1e-12)


def test_a_target_that_is_not_trainable_is_refused():
    method = Carriers({"weight": Target(1)})
    with pytest.raises(ValueError, match="`weight`"):
        method.attach({})


# ---- inputs that are made again instead of kept


def test_the_widest_inputs_are_not_kept_until_the_backward_pass():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.seen = nn.Linear(4, 16), nn.Linear(16, 4), []

        def forward(self, x):
            hidden = nn.functional.gelu(self.up(x))
            self.seen.append(weakref.ref(hidden.untyped_storage()))
            return self.down(hidden).mean((1, 2))

    model, x = Block(), torch.randn(3, 5, 4)
    for method, is_kept in ((Carriers({"down.weight": Target(2)}), False), (Full(), True)):
        method.attach(trainable(model))
        method.begin_step(0)
        with BookKeeper(model, method) as book:
            losses = model(x)
            assert (model.seen[-1]() is not None) == is_kept
            book.backward(losses)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_gradient_checkpointing_changes_nothing(name, reentrant):
    model, loss, method = prepare(name, r=3)
    batch = zoo.make_batch(model, batch_size=3)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    sums = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with BookKeeper(model, method) as book:
            book.backward(loss(model, batch))
            sums.append(book.weighted_sum(torch.ones(3)))
    for block, value in sums[0].items():
        torch.testing.assert_close(sums[1][block], value, rtol=EXACT, atol=1e-12)


class Projected(nn.Module):
    """A linear layer that reads an embedding directly, as OPT's does."""

    main_input_name = "ids"

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids))


def test_a_target_behind_a_trainable_embedding_is_exact():
    torch.manual_seed(0)
    model, ids = Projected().double(), torch.randint(9, (3, 5))
    method = Carriers({"head.weight": Target(4)})
    method.attach(dict(model.named_parameters()))
    method.begin_step(0)
    with BookKeeper(model, method) as book:
        book.backward(model(ids).square().sum((1, 2)))
        sums = {}
        method.add_clipped_sums(book.pop_entries(), Clipping(clip_norm=math.inf), sums)
    model(ids).square().sum().backward()
    for name, p in model.named_parameters():  # rank 4 of 4: the projection is the gradient itself
        torch.testing.assert_close(method.gradient(name, sums), p.grad)
