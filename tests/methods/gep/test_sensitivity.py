"""GEP: what one record can change, the noise that covers it, and its price."""

import math

import pytest
import torch
from torch import nn

from hf_private.accounting.events import Event
from hf_private.gradients.persample import Dense, Outer
from hf_private.mechanism.clipping import Clipping
from hf_private.methods.gep import method as anchors
from hf_private.methods.gep.config import AnchorConfig
from hf_private.methods.gep.method import Anchors, Group, defect
from hf_private.methods.gep.public_data import AnchorBooks
from hf_private.methods.registry import resolve_method
from hf_private.methods.subspace import orthonormal
from tests.support.budget import epsilon_of
from tests.support.gep_cases import basis_of, public, released, run
from tests.support.zoo import MLP, cross_entropy


def adversarial(ratio, k=6, p=400, records=8, seed=0):
    """A float32 basis and gradients that lie in its span but for a residual `ratio` times smaller, all aligned."""
    generator = torch.Generator().manual_seed(seed)
    basis = orthonormal(torch.randn(k, p, generator=generator).t()).t()
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
    sums = {}
    method.add_clipped_sums(method.observe("w", value), clipping, sums)
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
    with pytest.raises(ValueError, match="`clipping`"):
        sums_of(basis, g, "dense", Clipping("per-layer"))
    model = MLP()
    with pytest.raises(ValueError, match="`clipping`"):
        resolve_method(AnchorConfig(k=5), model, clipping="per-layer")


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
    method = AnchorConfig(k=40, num_anchors=40, groups=[".*"], residual=residual).build(model)
    method.books = AnchorBooks(model, cross_entropy, public(model, count=40))
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


def test_a_gradient_of_millions_of_equal_numbers_stays_within_the_second_clip_norm():
    """|g|^2 - |w|^2 cancels: a norm that loses a thousandth of itself would lose most of a small residual."""
    shape, share = (768, 1024), 3e-4
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(shape, generator=generator).sign() * 0.0013 * 512
    along = (g.double() / g.double().norm()).flatten()
    across = torch.randn(along.shape, generator=generator, dtype=torch.float64)
    across -= (across @ along) * along
    basis = (along * (1 - share) ** 0.5 + across / across.norm() * share**0.5).float().unsqueeze(0)
    method = Anchors({"all": Group(("w",), 1)}, residual_clip_norm=0.2)
    method.attach({"w": nn.Parameter(torch.zeros(shape))})
    method.basis = {"w": basis.view(1, *shape)}
    method.slack = anchors.SLACK[torch.float32] + defect([basis])
    sums = {}
    method.add_clipped_sums(method.observe("w", Dense(g.unsqueeze(0))), Clipping("flat", clip_norm=1.0), sums)
    assert sums["w"].double().norm() <= 0.2
