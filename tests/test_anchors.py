"""GEP and B-GEP against gradients that were formed: nothing here uses the engine's own way of computing them."""

import gc
import math
import weakref
from collections.abc import Callable

import cases
import oracle
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_private.accounting import Event, epsilon_of
from hf_private.anchor_config import AnchorConfig, resolve_anchors
from hf_private.anchor_data import AnchorBooks
from hf_private.bookkeeping import BookKeeper, trainable
from hf_private.clipping import Clipping
from hf_private.config import DPConfig
from hf_private.losses import PerSampleLoss
from hf_private.mechanism import Mechanism
from hf_private.methods import anchors
from hf_private.methods.anchors import Anchors, Group, combine, defect, embed, orthonormal
from hf_private.noise import NoiseSource
from hf_private.persample import Dense, Outer, Rows
from hf_private.targets import resolve_method

EXACT = 1e-8
RECORDS, ANCHORS = 4, 9


class MLP(nn.Module):
    """Two layers, one of them used twice."""

    def __init__(self, sizes: tuple[int, ...] = (5, 6, 6, 3), bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) if index == 0 else layer(x.tanh())
            if x.shape[-1] == layer.in_features:  # a second use of one weight
                x = layer(x)
        return x


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def numbers(model, records, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype, width = next(model.parameters()).dtype, next(model.parameters()).shape[1]
    classes = list(model.parameters())[-1].shape[0]
    x = torch.randn(records, width, generator=generator, dtype=torch.float64).to(dtype)
    return {"x": x, "y": torch.randint(classes, (records,), generator=generator)}


def mlp():
    torch.manual_seed(0)
    return MLP().double(), cross_entropy, numbers


def family(name):
    model, loss = cases.build(name)
    return model.eval(), loss, lambda model, records, seed=0: cases.make_batch(model, records, seed=seed)


def lora_gpt2():
    model, _, batch = family("gpt2")
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)).double()
    return model.eval(), PerSampleLoss(model), batch


CASES: dict[str, tuple[Callable, dict]] = {
    "MLP": (mlp, {"k": 12}),
    "MLP, stages": (mlp, {"k": 12, "groups": "stage", "power_iterations": 3}),
    "ResNet": (lambda: family("resnet-gn"), {"k": 12, "groups": ["stem|norm", "grouped|dilated|down", "classifier"]}),
    "BERT, head and last layer": (
        lambda: family("bert"),
        {"k": 16, "target_modules": "all-linear", "layers_to_transform": 1},
    ),
    "GPT-2, tied": (lambda: family("gpt2"), {"k": 12, "target_modules": ["c_fc", "lm_head"]}),
    "LoRA on GPT-2": (lora_gpt2, {"k": 14}),
}


def prepare(case, **settings):
    """Model, loss, a private batch and the attached method, its subspace found from other, public records."""
    build, config = CASES[case]
    model, loss, batch = build()
    method = resolve_anchors(AnchorConfig(**{"num_anchors": ANCHORS, **config, **settings}), model)
    method.books = AnchorBooks(model, loss, public(model, batch))
    method.attach(trainable(model))
    method.begin_step(0)
    return model, loss, batch(model, RECORDS), method


def public(model, batch, count=ANCHORS, rows=4):
    """Public records in micro-batches; they do not depend on the step."""

    whole = batch(model, count, seed=7)
    parts = [{name: value[at : at + rows] for name, value in whole.items()} for at in range(0, count, rows)]
    return lambda step: parts


def basis_of(method):
    """The bases as one block-diagonal matrix (k, p), parameters in order."""
    total = sum(group.k for group in method.groups.values())
    blocks, first = [], {}
    for name, (_, k) in method.groups.items():
        first[name] = sum(first[other][1] for other in first), k
    for name, p in method.parameters.items():
        start, k = first[method.group_of[name]]
        block = torch.zeros(total, p.numel(), dtype=torch.float64)
        block[start : start + k] = method.basis[name].flatten(1)
        blocks.append(block)
    return torch.cat(blocks, 1)


def formed(gradients):
    """Oracle gradients as a matrix (N, p)."""
    return torch.stack([torch.cat([g.flatten() for g in one.values()]) for one in gradients])


def released(method, sums):
    """Embedding (k,) and residual (p,) of what a method gives."""
    w = torch.cat([sums[f"@{name}"] for name in method.groups])
    return w, torch.cat([sums[name].flatten() for name in method.parameters]) if method.residual else None


def clip(rows, clip_norm):
    return (rows * (clip_norm / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)


# ---- the oracle


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("residual", [True, False], ids=["GEP", "B-GEP"])
def test_embeddings_residuals_and_sums_equal_the_oracles(case, residual):
    model, loss, batch, method = prepare(case, residual=residual)
    g, basis = formed(oracle.per_sample_gradients(model, loss, batch)), basis_of(method)
    w = g @ basis.T
    r = g - w @ basis
    s1, s2 = w.norm(dim=1).median().item(), r.norm(dim=1).median().item()
    method.residual_clip_norm = s2
    with BookKeeper(model, method) as book:
        book.backward(loss(model, batch))
        records = book.records()
        embeddings = torch.cat([records[f"@{name}"].g for name in method.groups], 1)
        assert (embeddings - w).norm() <= EXACT * w.norm()
        sums = method.clipped_sums(records, Clipping(clip_norm=s1))
    assert set(sums) == set(method.blocks) and all(sums[name].shape == shape for name, shape in method.blocks.items())
    got_w, got_r = released(method, sums)
    want_w, want_r = clip(w, s1), clip(r, s2)
    assert (got_w - want_w).norm() <= EXACT * want_w.norm()
    gradient = torch.cat([x.flatten() for x in method.gradients(sums).values()])
    wanted = want_w @ basis
    if residual:
        assert (got_r - want_r).norm() <= EXACT * want_r.norm()
        wanted = wanted + want_r
    assert list(method.gradients(sums)) == list(method.parameters)
    assert (gradient - wanted).norm() <= EXACT * wanted.norm()


@pytest.mark.parametrize("case", CASES)
def test_the_subspace_is_that_of_the_power_method_on_formed_gradients(case):
    model, loss, _, method = prepare(case)
    batch = CASES[case][0]()[2](model, ANCHORS, seed=7)
    anchor_gradients, iterations = oracle.per_sample_gradients(model, loss, batch), method.power_iterations
    for members, _ in method.groups.values():
        g = formed([{name: one[name] for name in members} for one in anchor_gradients])
        found = torch.cat([method.basis[name].flatten(1) for name in members], 1)
        b = torch.cat([method._gaussian(name, 0).flatten(1) for name in members], 1)
        for _ in range(iterations):
            b = torch.linalg.qr(((g @ b.T).T @ g).T).Q.T
        rank = min(len(b), torch.linalg.matrix_rank(g).item())  # beyond, directions are arbitrary
        captured, wanted = (g @ found.T @ found), (g @ b.T @ b)
        assert rank == 0 or (captured - wanted).norm() <= 1e-7 * g.norm()
        assert defect([method.basis[name] for name in members]) < 1e-12


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_micro_batches_change_nothing(micro_batch):
    model, loss, batch, method = prepare("MLP")
    parts = [{k: v[i : i + micro_batch] for k, v in batch.items()} for i in range(0, RECORDS, micro_batch)]
    whole, split = (run(model, loss, method, b, clip_norm=0.3) for b in ([batch], parts))
    assert (whole - split).norm() <= EXACT * whole.norm()
    before = {name: part.clone() for name, part in method.basis.items()}
    method.books = AnchorBooks(model, loss, public(model, numbers, rows=micro_batch))
    method.begin_step(0)
    assert all((method.basis[name] - part).norm() < 1e-7 for name, part in before.items())


def run(model, loss, method, batches, noise_multiplier=0.0, clip_norm=math.inf, step=0, key=b"0" * 32):
    """The gradient of one step of the mechanism."""
    mechanism = Mechanism(
        model,
        loss,
        method=method,
        clipping=Clipping(clip_norm=clip_norm),
        noise=NoiseSource("fast", key),
        noise_multiplier=noise_multiplier,
        sample_rate=0.1,
        expected_batch_size=1,
        charge=lambda event: None,
    )
    mechanism.steps = step
    mechanism.step(batches)
    return torch.cat([p.grad.flatten() for p in trainable(model).values()])


def low_rank_batch(rank, records, seed, width=8):
    """Inputs of a linear model of two classes, without bias: its gradients, x (p - y)^T, span `rank` dimensions."""
    directions = torch.randn(rank, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, rank, generator=generator, dtype=torch.float64) @ directions
    return {"x": x, "y": torch.randint(2, (records,), generator=generator)}


@pytest.mark.parametrize(("rank", "k"), [(3, 3), (3, 5), (3, 2)])
def test_lemma_3_1(rank, k):
    """Gradients of exact rank k and m > k anchors: no residual is left. With k below the rank there is one."""
    model = MLP((8, 2), bias=False).double()
    method = Anchors({"all": Group(("layers.0.weight",), k)})
    method.books = AnchorBooks(model, cross_entropy, lambda step: [low_rank_batch(rank, rank + 1, seed=1)])
    method.attach(trainable(model))
    method.begin_step(0)
    batch = low_rank_batch(rank, 20, seed=2)
    g = formed(oracle.per_sample_gradients(model, cross_entropy, batch))
    assert torch.linalg.matrix_rank(g) == rank
    with BookKeeper(model, method) as book:
        book.backward(cross_entropy(model, batch))
        _, residual = released(method, method.clipped_sums(book.records(), Clipping(clip_norm=math.inf)))
    relative = (residual.norm() / g.sum(0).norm()).item()
    assert relative < 1e-10 if k >= rank else relative > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_remark_1(case):
    """Without clipping and noise GEP gives the gradient itself, and B-GEP its projection."""
    model, loss, batch, method = prepare(case)
    true = formed(oracle.per_sample_gradients(model, loss, batch)).sum(0)
    assert (run(model, loss, method, [batch]) - true).norm() <= EXACT * true.norm()
    model, loss, batch, method = prepare(case, residual=False)
    basis = basis_of(method)
    projection = basis.T @ (basis @ true)
    assert (run(model, loss, method, [batch]) - projection).norm() <= EXACT * true.norm()
    assert (projection - true).norm() > 1e-3 * true.norm()


# ---- sensitivity


def adversarial(ratio, k=6, p=400, records=8, seed=0):
    """A float32 basis and gradients that lie in its span but for a residual `ratio` times smaller, all aligned."""
    generator = torch.Generator().manual_seed(seed)
    basis = orthonormal(torch.randn(k, p, generator=generator))
    inside = torch.randn(k, generator=generator, dtype=torch.float64) @ basis.double()
    outside = torch.randn(p, generator=generator, dtype=torch.float64)
    outside -= basis.double().T @ (basis.double() @ outside)
    sizes = 10.0 ** torch.linspace(-4, 4, records, dtype=torch.float64)
    one = inside / inside.norm() + outside / outside.norm() / ratio
    return basis, (sizes[:, None] * one).float()


def sums_of(basis, g, form, clipping, slack=None):
    """What GEP releases of float32 gradients (N, p) in a form, in float64: embedding and residual."""
    method = Anchors({"all": Group(("w",), len(basis))}, residual_clip_norm=0.2)
    shape = (20, 20)
    method.attach({"w": nn.Parameter(torch.zeros(shape))})
    method.basis = {"w": basis.view(len(basis), *shape)}
    method.slack = anchors.SLACK[torch.float32] + defect([basis]) if slack is None else slack
    g = g.view(-1, *shape)
    if form == "dense":
        value = Dense(g)
    else:  # 20 positions, more than the gradient's rank: nothing is gained by forming it
        value = Outer(torch.eye(20).expand(len(g), 20, 20), g)
        value.instantiating_is_smaller = lambda: False
    sums = method.clipped_sums(method.observe("w", value), clipping)
    return [part.double() for part in released(method, sums)]


@pytest.mark.parametrize("mode", ["flat", "automatic"])
@pytest.mark.parametrize("form", ["dense", "outer"])
@pytest.mark.parametrize("ratio", [1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6])
def test_no_gradient_releases_more_than_both_clip_norms(ratio, form, mode):
    """Alone, and as the difference between two batches of 100 records that all pull in one direction, in float32."""
    clipping = Clipping(mode, clip_norm=1.0)
    for seed in range(3):
        basis, g = adversarial(ratio, seed=seed)
        for n in range(len(g)):
            w, r = sums_of(basis, g[n : n + 1], form, clipping)
            assert w.norm() <= 1.0 and r.norm() <= 0.2
        many = g[-1:] * torch.linspace(1, 2, 100)[:, None]
        with_it, without = sums_of(basis, many, form, clipping), sums_of(basis, many[:-1], form, clipping)
        for one, other, limit in zip(with_it, without, (1.0, 0.2), strict=True):
            assert (one - other).norm() <= limit


def test_without_slack_the_sensitivity_is_exceeded():
    """The control: the bare difference of float32 norms releases a multiple of S2."""
    worst = 0.0
    for seed in range(5):
        basis, g = adversarial(1e4, seed=seed)
        for n in range(len(g)):
            worst = max(worst, sums_of(basis, g[n : n + 1], "dense", Clipping(clip_norm=1.0), slack=1e-30)[1].norm())
    assert worst > 2 * 0.2


def test_slack_covers_a_basis_that_is_not_orthonormal():
    basis, g = adversarial(1e3)
    bent = basis * 1.0001
    assert defect([bent]) == pytest.approx(2e-4 * math.sqrt(6), rel=1e-2)
    for n in range(len(g)):
        assert sums_of(bent, g[n : n + 1], "dense", Clipping(clip_norm=1.0))[1].norm() <= 0.2


def test_a_record_that_is_not_finite_is_left_out():
    basis, g = adversarial(10)
    clipping = Clipping(clip_norm=1.0)
    for bad in (math.nan, math.inf):
        broken = g.clone()
        broken[3, 5] = bad
        kept = sums_of(basis, torch.cat([g[:3], g[4:]]), "dense", clipping)
        for one, other in zip(sums_of(basis, broken, "dense", clipping), kept, strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm()


def test_per_layer_clipping_is_refused():
    basis, g = adversarial(10)
    with pytest.raises(ValueError, match="`clipping` must be one of"):
        sums_of(basis, g, "dense", Clipping("per-layer"))
    model = MLP()
    with pytest.raises(ValueError, match="`clipping` must be one of"):
        resolve_method(DPConfig(noise_multiplier=1.0, clipping="per-layer", anchors={"k": 5}), model)


# ---- noise and accounting


def test_golden_epsilon():
    """Both parts at 1.253827 on the same sample, 680 steps: 6.377, and not 4.772 as for samples of their own."""
    method = Anchors({"all": Group(("w",), 1)})
    q, sigma = 2000 / 67349, 1.253827
    releases = method.releases(sigma / math.sqrt(2))
    assert releases == pytest.approx((sigma, sigma))
    event = Event(sample_rate=q, releases=releases, steps=680)
    assert event.noise_multiplier == pytest.approx((sigma**-2 + sigma**-2) ** -0.5)
    assert epsilon_of([event], 1e-5) == pytest.approx(6.377, abs=0.02)
    wrong = Event(sample_rate=q, releases=(sigma,), steps=2 * 680)
    assert epsilon_of([wrong], 1e-5) == pytest.approx(4.772, abs=0.02)
    assert Anchors({"all": Group(("w",), 1)}, residual=False).releases(sigma) == (sigma,)


@pytest.mark.parametrize("residual", [True, False])
def test_noise_has_the_scale_of_each_part(residual):
    """Of an empty batch only noise is left: sqrt(2) sigma S1 and sqrt(2) sigma S2 for GEP, sigma S1 for B-GEP."""
    model = MLP((60, 50, 40)).double()
    method = resolve_anchors(AnchorConfig(k=40, num_anchors=40, groups=[".*"], residual=residual), model)
    method.books = AnchorBooks(model, cross_entropy, public(model, numbers, count=40))
    sigma, s1, drawn = 1.5, 2.0, []
    for step in range(20):
        noised = run(model, cross_entropy, method, [], sigma, s1, step)
        basis = basis_of(method)
        drawn.append((basis @ noised, noised - basis.T @ (basis @ noised)))
    embedding, rest = (torch.cat(parts).square() for parts in zip(*drawn, strict=True))
    first = sigma * s1 * (math.sqrt(2) if residual else 1)
    second = math.sqrt(2) * sigma * s1 / 5 if residual else 0.0
    assert embedding.mean().sqrt().item() == pytest.approx(math.hypot(first, second), rel=0.1)
    assert (rest.sum() / 20 / (noised.numel() - 40)).sqrt().item() == pytest.approx(second, rel=0.05, abs=1e-9)


# ---- the public part


def test_the_anchor_pass_leaves_no_trace():
    """Gradients, mode and the secret state of the generators are what they were; dropout is public inside."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)).train()
    method = resolve_anchors(AnchorConfig(k=6, num_anchors=ANCHORS), model)
    method.books = AnchorBooks(model, cross_entropy, public(model, numbers))
    method.attach(trainable(model))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    bases = []
    for secret in (1, 2):
        torch.manual_seed(secret)
        state = torch.get_rng_state()
        method.begin_step(3)
        assert torch.equal(torch.get_rng_state(), state)
        bases.append(basis_of(method))
    assert torch.equal(*bases)
    assert model.training and all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    method.begin_step(4)
    assert not torch.equal(basis_of(method), bases[0])


def test_refresh_and_seed():
    _, _, _, method = prepare("MLP", refresh=3)
    first = basis_of(method)
    method.begin_step(1)
    assert torch.equal(basis_of(method), first)
    method.begin_step(3)
    assert not torch.equal(basis_of(method), first)
    method.seed = 1
    method.begin_step(0)
    assert not torch.equal(basis_of(method), first)


def test_a_broken_public_record_is_left_out():
    model, loss, _ = mlp()
    method = resolve_anchors(AnchorConfig(k=12, num_anchors=ANCHORS), model)
    batch = numbers(model, ANCHORS, seed=7)
    rest = {name: value[1:] for name, value in batch.items()}
    batch["x"][0, 0] = math.nan
    bases = []
    for records in (batch, rest):
        method.books = AnchorBooks(model, loss, lambda step, records=records: [records])
        method.attach(trainable(model))
        method.begin_step(0)
        bases.append(basis_of(method))
    assert bases[0].isfinite().all() and (bases[0] - bases[1]).norm() < 1e-7


def test_gradients_that_are_zero_leave_an_orthonormal_basis():
    """LoRA starts with B = 0, where A has no gradient."""
    model, _, batch = family("gpt2")
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"])).double().eval()
    loss = PerSampleLoss(model)
    method = resolve_anchors(AnchorConfig(k=8, num_anchors=ANCHORS), model)
    method.books = AnchorBooks(model, loss, public(model, batch))
    method.attach(trainable(model))
    method.begin_step(0)
    assert all(defect([method.basis[name] for name in group.names]) < 1e-12 for group in method.groups.values())


def test_without_anchor_data_there_is_no_step():
    method = Anchors({"all": Group(("weight", "bias"), 2)})
    method.attach(dict(nn.Linear(3, 2).named_parameters()))
    with pytest.raises(ValueError, match="`anchor_dataset` must be given"):
        method.begin_step(0)


@pytest.mark.parametrize(
    "value",
    [
        Outer(torch.randn(5, 3, 4), torch.randn(5, 3, 6)),
        Outer(torch.randn(5, 1, 4), torch.randn(5, 1, 6), shape=torch.Size((4, 2, 3))),
        Rows(torch.randint(4, (5, 7)), torch.randn(5, 7, 6), torch.Size((4, 6))),
        Outer(torch.randn(5, 3, 4), torch.randn(5, 3, 6))
        + Rows(torch.randint(4, (5, 7)), torch.randn(5, 7, 6), torch.Size((4, 6))),
        Dense(torch.randn(5, 4, 6)),
    ],
    ids=["outer", "convolution", "rows", "tied", "dense"],
)
def test_every_form_is_embedded_and_combined(value):
    g = value.dense()
    basis, weights = torch.randn(2, *g.shape[1:]), torch.randn(5, 2)
    torch.testing.assert_close(embed(value, basis), torch.einsum("nx,kx->nk", g.flatten(1), basis.flatten(1)))
    wanted = torch.einsum("nk,nx->kx", weights, g.flatten(1)).view(2, *g.shape[1:])
    torch.testing.assert_close(combine(value, weights), wanted, atol=1e-5, rtol=1e-4)


# ---- memory


class LivePeak(TorchDispatchMode):
    """Most bytes of tensors that were made inside and alive at one time, each storage counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key in given or key in self.known:
                    continue
                self.known.add(key)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def peak(action: Callable) -> int:
    gc.collect()
    with LivePeak() as counter:
        action()
    return counter.peak


def private_pass(model, method, parts):
    for part in parts:
        with BookKeeper(model, method) as book:
            book.backward(cross_entropy(model, part))
            method.clipped_sums(book.records(), Clipping())


def test_memory_is_that_of_the_basis_whatever_m_and_the_batch():
    """m public and B private records in micro-batches of 8: the peak is that of one micro-batch and a few bases."""
    model = MLP((96, 97, 10))
    parameters, k = sum(p.numel() for p in model.parameters()), 16
    measured = {}
    for count in (64, 512):
        method = resolve_anchors(AnchorConfig(k=k, num_anchors=count, groups=[".*"]), model)
        method.books = AnchorBooks(model, cross_entropy, public(model, numbers, count, rows=8))
        method.attach(trainable(model))
        measured["anchors", count] = peak(lambda method=method: method.begin_step(0))
        parts = public(model, numbers, count, rows=8)(0)
        measured["private", count] = peak(lambda m=method, p=parts: private_pass(model, m, p))
    basis = 4 * k * parameters
    assert abs(measured["anchors", 512] - measured["anchors", 64]) < 0.05 * basis
    assert abs(measured["private", 512] - measured["private", 64]) < 0.05 * basis
    assert measured["anchors", 512] < min(6 * basis, 512 * parameters * 4 / 2)  # never m x p
    assert measured["private", 512] < 2 * basis


def test_a_basis_that_is_too_large_is_refused_before_it_is_allocated(monkeypatch):
    with torch.device("meta"):
        model = nn.Linear(100_000, 100_000, bias=False)
    method = Anchors({"all": Group(("weight",), 100)})
    with pytest.raises(
        ValueError, match=r"`k` must leave the basis below .* GiB.*got 100 vectors in 1 groups: \d+\.\d GiB"
    ):
        method.attach(trainable(model))
    small = nn.Linear(4, 4, bias=False)
    monkeypatch.setattr(anchors, "memory_limit", lambda device: 16 * 3 * 4 * 4 - 1)
    with pytest.raises(ValueError, match="`k` must leave"):
        Anchors({"all": Group(("weight",), 3)}).attach(trainable(small))
    monkeypatch.setattr(anchors, "memory_limit", lambda device: 16 * 3 * 4 * 4)
    Anchors({"all": Group(("weight",), 3)}).attach(trainable(small))
