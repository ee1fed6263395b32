"""What the engine refuses by name, and that it leaves the model as it was."""

import gc
import weakref

import pytest
import torch
from torch import nn

from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.layers import UncoveredError
from tests.support import zoo
from tests.support.oracle import assert_exact


def test_the_model_is_restored_and_nothing_leaks():
    model, loss = zoo.build("gpt2", torch.float32)
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    marker = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = marker
    batch = zoo.make_batch(model, batch_size=3)
    counts = {}
    for step in range(50):
        with BookKeeper(model) as book:
            losses = loss(model, batch)
            book.backward(losses)
            book.weighted_sum(book.norms())
        graph = weakref.ref(losses)
        del losses, book
        if step in (5, 49):
            gc.collect()
            assert graph() is None
            counts[step] = sum(type(x) is torch.Tensor for x in gc.get_objects())
    assert counts[49] <= counts[5]
    assert model.lm_head.weight.grad is marker
    for name, m in model.named_modules():
        assert m.__dict__.keys() == before[name].keys()
        assert not m._forward_pre_hooks and "forward" not in m.__dict__
    assert all(p.requires_grad for p in model.parameters())


def test_the_model_is_restored_after_an_error():
    model, loss = zoo.build("bert")
    with pytest.raises(ValueError, match="`losses`"), BookKeeper(model) as book:
        book.backward(loss(model, zoo.make_batch(model, 3)).mean())
    assert all("forward" not in m.__dict__ and not m._forward_pre_hooks for m in model.modules())


def test_no_parameter_gradient_is_computed_by_autograd():
    model, loss = zoo.build("bert")
    seen = []
    with BookKeeper(model) as book:
        handles = [p.register_hook(seen.append) for p in model.parameters()]  # before, they are refused
        book.backward(loss(model, zoo.make_batch(model, 3)))
    for handle in handles:
        handle.remove()
    assert not seen


@pytest.mark.parametrize("shape", [(), (2,), (3, 1)])
def test_losses_of_the_wrong_shape_are_refused(shape):
    model, loss = zoo.build("bert")
    with pytest.raises(ValueError, match=r"`losses`.*\(3,\)"), BookKeeper(model) as book:
        book.backward(loss(model, zoo.make_batch(model, 3)).sum() * torch.ones(shape))


def test_an_empty_batch_is_refused():
    model, x = nn.Linear(3, 2), torch.zeros(0, 3)
    with pytest.raises(ValueError, match="`model` must be called"), BookKeeper(model):
        model(x)


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "resnet-gn"])
def test_a_record_with_nan_contributes_nothing_and_the_others_are_unchanged(name):
    model, loss = zoo.build(name)
    model.eval()
    batch = zoo.make_batch(model, batch_size=3)

    def poisoned(model, batch):
        return loss(model, batch) * torch.tensor([1.0, float("nan"), 1.0], dtype=torch.float64)

    with BookKeeper(model) as book:
        book.backward(loss(model, batch))
        norms, sums = book.norms(), book.weighted_sum(torch.tensor([0.5, 0.0, 2.0]))
    with BookKeeper(model) as book:
        book.backward(poisoned(model, batch))
        assert torch.equal(torch.isfinite(book.norms()), torch.tensor([True, False, True]))
        torch.testing.assert_close(book.norms()[[0, 2]], norms[[0, 2]])
        for block, value in book.weighted_sum(torch.tensor([0.5, 0.0, 2.0])).items():
            torch.testing.assert_close(value, sums[block])


class Multiply(torch.autograd.Function):
    """A function of its own, which nobody sees into."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, *grads):
        x, w = ctx.saved_tensors
        return grads[0] @ w.t(), x.t() @ grads[0]


class RawMatrix(nn.Module):
    """A weight used by a function that no rule knows, as it is or computed of others."""

    def __init__(self, computed):
        super().__init__()
        self.first, self.w, self.computed = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 2)), computed

    def forward(self, x):
        return Multiply.apply(self.first(x), self.w.exp() if self.computed else self.w)


@pytest.mark.parametrize("computed", [False, True])
def test_an_uncovered_use_is_an_error_by_name_and_exact_in_a_batch_of_one(computed):
    model = RawMatrix(computed).double()

    def loss(model, batch):
        return model(batch["x"]).square().sum(1)

    with (
        pytest.raises(UncoveredError, match=r"(?s)`w`.*`parameter.requires_grad_\(False\)`"),
        BookKeeper(model) as book,
    ):
        book.backward(loss(model, {"x": torch.randn(3, 3).double()}))
    assert_exact(model, loss, {"x": torch.randn(1, 3).double()})


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (nn.BatchNorm1d(4), "BatchNorm1d"),
        (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), "InstanceNorm1d.*track_running_stats=False"),
    ],
)
def test_modules_that_mix_records_are_refused_with_path_and_remedy(module, match):
    model = nn.Sequential(nn.Linear(3, 4), module)
    with pytest.raises(UncoveredError, match=rf"`1`.*{match}"), BookKeeper(model):
        pass


def test_a_computed_weight_is_exact():
    class Standardised(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight - self.weight.mean(), self.bias)

    torch.manual_seed(0)
    model = Standardised(3, 2).double()
    for batch_size in (1, 2, 4):
        assert_exact(
            model, lambda model, batch: model(batch["x"]).square().sum(1), {"x": torch.randn(batch_size, 3).double()}
        )


def weight_norm(layer):
    return nn.utils.parametrizations.weight_norm(layer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm", [weight_norm, nn.utils.weight_norm])
def test_weight_norm_is_exact(norm):
    """wav2vec2's convolution has it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), norm(nn.Linear(4, 2))).double()

    def loss(model, batch):
        return model(batch["x"]).square().sum(1)

    for batch_size in (1, 2, 4):
        assert_exact(model, loss, {"x": torch.randn(batch_size, 3).double()})


class Unbatched(nn.Conv1d):
    """A convolution of the first record alone."""

    def forward(self, x):
        return super().forward(x[0]).unsqueeze(0)


def test_a_layer_that_sees_one_record_alone_is_exact_alone_and_refused_in_company():
    model = nn.Sequential(nn.Conv1d(3, 4, 1), Unbatched(4, 2, 1)).double()

    def loss(model, batch):
        return model(batch["x"]).expand(len(batch["x"]), -1, -1).square().sum((1, 2))

    assert_exact(model, loss, {"x": torch.randn(1, 3, 5).double()})
    with pytest.raises(UncoveredError, match="`0.weight`.*Remedy"), BookKeeper(model) as book:
        book.backward(loss(model, {"x": torch.randn(3, 3, 5).double()}))
