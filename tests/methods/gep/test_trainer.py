"""GEP's public part: the subspace, its refresh, records that are broken, and memory."""

import gc
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_private.gradients.bookkeeper import BookKeeper, trainable
from hf_private.gradients.persample import Dense, Outer, Rows
from hf_private.mechanism.clipping import Clipping
from hf_private.methods.gep import method as anchors
from hf_private.methods.gep.config import AnchorConfig
from hf_private.methods.gep.method import Anchors, Group, combine, defect, embed
from hf_private.methods.gep.public_data import AnchorBooks
from hf_private.tasks.losses import PerSampleLoss
from tests.support import zoo
from tests.support.gep_cases import ANCHORS, basis_of, prepare, public
from tests.support.zoo import MLP, cross_entropy


def test_the_anchor_pass_leaves_no_trace():
    """Gradients, mode and the secret state of the generators are what they were; dropout is public inside."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)).train()
    method = AnchorConfig(k=6, num_anchors=ANCHORS).build(model)
    method.books = AnchorBooks(model, cross_entropy, public(model))
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
    model, loss = zoo.build("mlp")
    method = AnchorConfig(k=12, num_anchors=ANCHORS).build(model)
    batch = zoo.make_batch(model, ANCHORS, seed=7)
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
    model, _ = zoo.build("gpt2")
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"])).double().eval()
    loss = PerSampleLoss(model)
    method = AnchorConfig(k=8, num_anchors=ANCHORS).build(model)
    method.books = AnchorBooks(model, loss, public(model))
    method.attach(trainable(model))
    method.begin_step(0)
    assert all(defect([method.basis[name] for name in group.names]) < 1e-12 for group in method.groups.values())


def test_without_anchor_data_there_is_no_step():
    method = Anchors({"all": Group(("weight", "bias"), 2)})
    method.attach(dict(nn.Linear(3, 2).named_parameters()))
    with pytest.raises(ValueError, match="`anchor_dataset`"):
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
            method.add_clipped_sums(dict(book.entries()), Clipping(), {})


def test_memory_is_that_of_the_basis_whatever_m_and_the_batch():
    """m public and B private records in micro-batches of 8: the peak is that of one micro-batch and a few bases."""
    model = MLP((96, 97, 10))
    parameters, k = sum(p.numel() for p in model.parameters()), 16
    measured = {}
    for count in (64, 512):
        method = AnchorConfig(k=k, num_anchors=count, groups=[".*"]).build(model)
        method.books = AnchorBooks(model, cross_entropy, public(model, count, rows=8))
        method.attach(trainable(model))
        measured["anchors", count] = peak(lambda method=method: method.begin_step(0))
        parts = public(model, count, rows=8)(0)
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
    with pytest.raises(ValueError, match=r"`k`.*got 100 vectors in 1 groups: \d+\.\d GiB"):
        method.attach(trainable(model))
    small = nn.Linear(4, 4, bias=False)
    monkeypatch.setattr(anchors, "memory_limit", lambda device: 16 * 3 * 4 * 4 - 1)
    with pytest.raises(ValueError, match="`k`"):
        Anchors({"all": Group(("weight",), 3)}).attach(trainable(small))
    monkeypatch.setattr(anchors, "memory_limit", lambda device: 16 * 3 * 4 * 4)
    Anchors({"all": Group(("weight",), 3)}).attach(trainable(small))
