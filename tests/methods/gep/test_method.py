"""GEP and B-GEP against gradients that were formed: nothing here uses the engine's own way of computing them."""

import math

import pytest
import torch

from hf_private.gradients.bookkeeper import BookKeeper, trainable
from hf_private.mechanism.clipping import Clipping
from hf_private.methods.gep.method import Anchors, Group, defect
from hf_private.methods.gep.public_data import AnchorBooks
from tests.support import oracle, zoo
from tests.support.gep_cases import (
    ANCHORS,
    CASES,
    RECORDS,
    basis_of,
    clip,
    formed,
    prepare,
    public,
    released,
    run,
)
from tests.support.oracle import EXACT
from tests.support.zoo import MLP, cross_entropy


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
        entries = book.pop_entries()
        embeddings = torch.cat([entries[f"@{name}"].dense() for name in method.groups], 1)
        assert (embeddings - w).norm() <= EXACT * w.norm()
        sums = {}
        method.add_clipped_sums(entries, Clipping(clip_norm=s1), sums)
        assert not entries, "each entry is freed once it is summed"
    assert set(sums) == set(method.blocks) and all(sums[name].shape == shape for name, shape in method.blocks.items())
    got_w, got_r = released(method, sums)
    want_w, want_r = clip(w, s1), clip(r, s2)
    assert (got_w - want_w).norm() <= EXACT * want_w.norm()
    gradient = torch.cat([method.gradient(name, sums).flatten() for name in method.parameters])
    wanted = want_w @ basis
    if residual:
        assert (got_r - want_r).norm() <= EXACT * want_r.norm()
        wanted = wanted + want_r
    assert (gradient - wanted).norm() <= EXACT * wanted.norm()


@pytest.mark.parametrize("case", CASES)
def test_the_subspace_is_that_of_the_power_method_on_formed_gradients(case):
    model, loss, _, method = prepare(case)
    batch = zoo.make_batch(model, ANCHORS, seed=7)
    anchor_gradients, iterations = oracle.per_sample_gradients(model, loss, batch), method.power_iterations
    for members, _ in method.groups.values():
        g = formed([{name: one[name] for name in members} for one in anchor_gradients])
        found = torch.cat([method.basis[name].flatten(1) for name in members], 1)
        b = torch.cat([method._start(name, 0).flatten(1) for name in members], 1)
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
    method.books = AnchorBooks(model, loss, public(model, rows=micro_batch))
    method.begin_step(0)
    assert all((method.basis[name] - part).norm() < 1e-7 for name, part in before.items())


def low_rank_batch(rank, records, seed, width=8):
    """Inputs of a linear model of two classes, without bias: its gradients, x (p - y)^T, span `rank` dimensions."""
    directions = torch.randn(rank, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, rank, generator=generator, dtype=torch.float64) @ directions
    return {"x": x, "labels": torch.randint(2, (records,), generator=generator)}


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
        sums = {}
        method.add_clipped_sums(book.pop_entries(), Clipping(clip_norm=math.inf), sums)
    _, residual = released(method, sums)
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
