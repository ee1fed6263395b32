"""Promise 1: norms and weighted sums equal a for-loop of plain autograd, for every family that the README lists."""

import pytest
import torch
from torch import nn

from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.method import Full
from hf_private.gradients.persample import Dense, Outer
from tests.support import oracle, zoo
from tests.support.oracle import EXACT, assert_exact


@pytest.mark.parametrize("name", zoo.COVERED)
def test_full_fine_tuning_is_exact(name):
    model, loss = zoo.build(name)
    model.eval()
    assert_exact(model, loss, zoo.make_batch(model, batch_size=3))


@pytest.mark.parametrize("name", zoo.COVERED)
@pytest.mark.parametrize(("batch_size", "length"), [(1, 7), (4, 1)])
def test_single_records_and_single_tokens_are_exact(name, batch_size, length):
    model, loss = zoo.build(name)
    model.eval()
    assert_exact(model, loss, zoo.make_batch(model, batch_size, length))


@pytest.mark.parametrize("name", [name for name in zoo.FAMILIES if name != "albert"])  # has none
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_is_exact(name, reentrant):
    if reentrant and name == "deberta-v2":
        pytest.skip("what all records share cannot enter a reentrant checkpoint: torch raises an error")
    model, loss = zoo.build(name)
    batch = zoo.make_batch(model, batch_size=3)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    with BookKeeper(model) as book:
        book.backward(loss(model, batch))
        norms, sums = book.norms(), book.weighted_sum(torch.ones(3))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with BookKeeper(model) as book:
        book.backward(loss(model, batch))
        torch.testing.assert_close(book.norms(), norms, rtol=EXACT, atol=0)
        for block, value in book.weighted_sum(torch.ones(3)).items():
            torch.testing.assert_close(value, sums[block], rtol=EXACT, atol=1e-12)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "resnet-gn"])
def test_gram_and_instantiated_paths_agree(name):
    class Ghost(Full):
        def observe(self, name, value):
            return {name: value}

    class Instantiated(Full):
        def observe(self, name, value):
            return {name: Dense(value.dense())}

    model, loss = zoo.build(name)
    model.eval()
    batch = zoo.make_batch(model, batch_size=3)
    for method in (Ghost(), Instantiated()):
        assert_exact(model, loss, batch, method=method)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit"])
def test_bf16_weights_are_exact_within_bf16(name):
    """The engine upcasts (a, ds); autograd rounds every weight gradient to bf16: they agree to a few bf16 units."""
    model, loss = zoo.build(name, torch.bfloat16)
    model.eval()
    assert_exact(model, loss, zoo.make_batch(model, batch_size=3), tolerance=3e-2)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_bf16_autocast_is_exact_within_bf16(name):
    model, loss = zoo.build(name, torch.float32)
    model.eval()

    def autocast(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    assert_exact(model, autocast, zoo.make_batch(model, batch_size=3), tolerance=5e-2)


def test_a_convolution_under_autocast_takes_what_a_linear_layer_gives():
    """The linear layer's output is bf16, the convolution's weight is float32."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(6, 4), "second": nn.Conv1d(4, 6, 1)})
    model.forward = lambda x: model["second"](model["first"](x).mT)

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch["x"]).float().square().sum((1, 2))

    assert_exact(model, loss, {"x": torch.randn(3, 5, 6)}, tolerance=5e-2)


def test_dropout_draws_one_mask_per_forward():
    """With dropout on, the book describes the very forward pass that ran: its sum is that pass's gradient."""
    model, loss = zoo.build("bert")
    model.train()
    batch = zoo.make_batch(model, batch_size=3)
    torch.manual_seed(1)
    wanted = oracle.gradient(model, loss(model, batch).sum())
    torch.manual_seed(1)
    with BookKeeper(model) as book:
        book.backward(loss(model, batch))
        sums = book.weighted_sum(torch.ones(3))
    for name, g in wanted.items():
        torch.testing.assert_close(sums[name], g, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_implementations_are_exact(attention):
    model, loss = zoo.build("llama")
    model.eval()
    model.set_attn_implementation(attention)
    assert_exact(model, loss, zoo.make_batch(model, batch_size=3))


def test_frozen_parts_and_bias_only_training_are_exact():
    model, loss = zoo.build("bert")
    model.eval()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    assert_exact(model, loss, zoo.make_batch(model, batch_size=3))


def test_tied_weights_need_their_cross_term():
    """Adding squares of the two uses is the known bug: the oracle must tell the difference."""
    model, loss = zoo.build("gpt2")
    model.eval()
    with BookKeeper(model) as book:
        book.backward(loss(model, zoo.make_batch(model, batch_size=3)))
        tied = book.entries()["transformer.wte.weight"]
        if not isinstance(tied, Dense):
            assert not torch.allclose(tied.sq_norm(), tied.outer.sq_norm() + tied.rows.sq_norm(), rtol=1e-3)
    ghost = type("Ghost", (Full,), {"observe": lambda self, name, value: {name: value}})()
    with BookKeeper(model, ghost) as book:
        book.backward(loss(model, zoo.make_batch(model, batch_size=3)))
        tied = book.entries()["transformer.wte.weight"]
        assert not torch.allclose(tied.sq_norm(), tied.outer.sq_norm() + tied.rows.sq_norm(), rtol=1e-3)


def test_mixopt_picks_the_smaller_form_per_layer():
    class Ghost(Full):
        seen: dict = {}

        def observe(self, name, value):
            records = super().observe(name, value)
            self.seen[name] = type(records[name])
            return records

    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 2, bias=False))
    with BookKeeper(model, method := Ghost()) as book:
        book.backward(model(torch.randn(3, 8, 64)).square().sum((1, 2)))
    assert method.seen == {"0.weight": Outer, "1.weight": Dense}


class SeveralKinds(nn.Module):
    """Layer kinds and input ranks that no family above has."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2)
        self.conv3 = nn.Conv3d(2, 4, (2, 3, 1), groups=2)
        self.rms = nn.RMSNorm(6)
        self.norm = nn.LayerNorm((4, 6))
        self.four = nn.Linear(6, 5)

    def forward(self, x):
        a = self.conv1(x).transpose(1, 2)
        a = self.norm(self.rms(a).unsqueeze(1))
        b = self.conv3(x.view(len(x), 2, 2, 3, -1)).flatten(1).sum(1)
        return self.four(a).sum((1, 2, 3)) * b


def test_other_layer_kinds_are_exact():
    torch.manual_seed(0)
    model = SeveralKinds().double()
    assert_exact(model, lambda m, b: m(b["x"]), {"x": torch.randn(3, 4, 9).double()})


def test_a_parameter_list_beside_covered_layers_is_exact():
    class Scaled(SeveralKinds):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.randn(()))])

        def forward(self, x):
            return super().forward(x) * self.scales[0]

    model = Scaled().double()
    for batch_size in (1, 3, 4):
        assert_exact(model, lambda m, b: m(b["x"]), {"x": torch.randn(batch_size, 4, 9).double()})


def test_a_parameter_with_two_names_in_one_module_is_exact():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = self.shift = nn.Parameter(torch.randn(4, dtype=torch.float64))

        def forward(self, x):
            return (x * self.scale) ** 2 + self.shift

    model = nn.Sequential(nn.Linear(4, 4).double(), Twice())
    assert_exact(model, lambda m, b: m(b["x"]).sum((1, 2)), {"x": torch.randn(3, 5, 4, dtype=torch.float64)})


def test_one_bookkeeper_handles_batches_of_any_size():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batches = [{"x": torch.randn(records, 4).double()} for records in (3, 1, 5)]
    wanted = [oracle.per_sample_gradients(model, square_loss, batch) for batch in batches]
    with BookKeeper(model) as book:
        for batch, gradients in zip(batches, wanted, strict=True):
            book.backward(square_loss(model, batch))
            with pytest.raises(ValueError, match="`model`"):  # one book does not mix two batches
                model(torch.zeros(len(gradients) + 1, 4).double())
            torch.testing.assert_close(book.norms(), oracle.norms(gradients))
            ones = torch.ones(len(gradients)).double()
            sums = {name: value.weighted_sum(ones) for name, value in book.pop_entries().items()}
            torch.testing.assert_close(sums, oracle.weighted_sum(gradients, ones), check_stride=False)


def square_loss(model, batch):
    return model(batch["x"]).square().sum(1)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def doubled(layer):
    """As Accelerate's hooks do it: another forward, on the instance."""
    before = layer.forward
    layer.forward = lambda x: 2 * before(x)
    return layer


@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), nn.LayerNorm(4), Doubled(4, 4), doubled(nn.Linear(4, 4)), doubled(nn.LayerNorm(4))]
)
def test_a_layer_with_its_own_forward_is_exact(layer):
    """Layers of a known class run without a look at their calls: of that very class only, with its own forward."""
    model = nn.Sequential(layer, nn.Linear(4, 3)).double()
    batch = {"x": torch.randn(5, 2, 4).double()}
    plain = model(batch["x"])
    with BookKeeper(model):
        torch.testing.assert_close(model(batch["x"]), plain)
    assert_exact(model, lambda model, batch: model(batch["x"]).square().sum((1, 2)), batch)
