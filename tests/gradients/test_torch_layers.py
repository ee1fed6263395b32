"""The layers of torch, against one record at a time, at sizes where the records divide the lengths and where not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from hf_private.gradients.bookkeeper import BookKeeper
from tests.support.oracle import assert_exact

WIDTH = 8
SIZES = [(4, 8), (3, 7), (4, 4), (1, 5), (2, 6)]  # records, length; the first alone would fit a wrong axis


class Between(nn.Module):
    """A layer between two linear ones, so that its input and output have gradients. `use` calls it on (N, T, d)."""

    def __init__(self, layer: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.below, self.layer, self.head, self.use = nn.Linear(WIDTH, WIDTH), layer, nn.LazyLinear(3), use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self.layer, self.below(x).tanh()))


class Raw(nn.Module):
    """A parameter that is used by itself."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(*shape))


class Scaled(nn.Module):
    """A parametrization of a weight with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH, 1) + 0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return self.scale * weight


def call(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def channels_first(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.mT).mT


def image(layer: nn.Module, x: Tensor) -> Tensor:
    """Two pixels high: of images of one column, torch's gradient of instance norm is wrong in some layouts."""
    return layer(x.mT.unsqueeze(-1).repeat(1, 1, 1, 2)).mean(-1).mT


def bags(layer: nn.Module, x: Tensor) -> Tensor:
    """A bag of words for each token, and the activation, so that the layers below have a gradient."""
    ids = torch.stack([x[..., 0] > 0, x[..., 1] > 0], -1).long() + 3 * torch.arange(x.shape[1]).view(-1, 1) % 8
    return layer(ids.flatten(0, 1)).view(*x.shape[:2], -1) * x


def encoder_layer(**options) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, **options)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True), lambda m, x: m(x, x, x)[0]),
    "attention, positions first": (
        lambda: nn.MultiheadAttention(WIDTH, 2),
        lambda m, x: m(x.transpose(0, 1), *[x.transpose(0, 1)] * 2)[0].transpose(0, 1),
    ),
    "attention, keys of another width": (
        lambda: nn.MultiheadAttention(WIDTH, 2, kdim=4, vdim=4, batch_first=True),
        lambda m, x: m(x, x[..., :4], x[..., 4:])[0],
    ),
    "attention, a key of its own": (
        lambda: nn.MultiheadAttention(WIDTH, 2, add_bias_kv=True, batch_first=True),
        lambda m, x: m(x, x, x)[0],
    ),
    "encoder layer": (lambda: encoder_layer(batch_first=True), call),
    "encoder layer, norm first": (lambda: encoder_layer(batch_first=True, norm_first=True), call),
    "encoder layer, positions first": (encoder_layer, lambda m, x: m(x.transpose(0, 1)).transpose(0, 1)),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True),
        lambda m, x: m(x, x),
    ),
    "gru": (lambda: nn.GRU(WIDTH, 5, batch_first=True), lambda m, x: m(x)[0]),
    "gru, two layers, both ways": (
        lambda: nn.GRU(WIDTH, 5, 2, bidirectional=True, batch_first=True),
        lambda m, x: m(x)[0],
    ),
    "lstm": (lambda: nn.LSTM(WIDTH, 5, batch_first=True), lambda m, x: m(x)[0]),
    "lstm, time first": (lambda: nn.LSTM(WIDTH, 5), lambda m, x: m(x.transpose(0, 1))[0].transpose(0, 1)),
    "lstm, projected": (lambda: nn.LSTM(WIDTH, 5, proj_size=3, batch_first=True), lambda m, x: m(x)[0]),
    "lstm cell": (lambda: nn.LSTMCell(WIDTH, 5), lambda m, x: torch.stack([m(x[:, t])[0] for t in range(3)], 1)),
    "rnn": (lambda: nn.RNN(WIDTH, 5, batch_first=True), lambda m, x: m(x)[0]),
    "embedding bag": (lambda: nn.EmbeddingBag(11, WIDTH, mode="mean"), bags),
    "embedding bag, sum": (lambda: nn.EmbeddingBag(11, WIDTH, mode="sum"), bags),
    "instance norm": (lambda: nn.InstanceNorm1d(WIDTH, affine=True), channels_first),
    "instance norm of images": (lambda: nn.InstanceNorm2d(WIDTH, affine=True), image),
    "prelu": (lambda: nn.PReLU(WIDTH), channels_first),
    "prelu, one": (nn.PReLU, call),
    "transposed convolution": (lambda: nn.ConvTranspose1d(WIDTH, 6, 3, padding=1), channels_first),
    "transposed convolution of images": (lambda: nn.ConvTranspose2d(WIDTH, 4, (3, 1)), image),
    "depthwise convolution": (lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), channels_first),
    "bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, 5), lambda m, x: m(x, x.flip(1))),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(WIDTH, 6)), call),
    "weight norm of a convolution": (
        lambda: parametrizations.weight_norm(nn.Conv1d(WIDTH, 6, 3, padding=1), dim=2),
        channels_first,
    ),
    "older weight norm": (lambda: nn.utils.weight_norm(nn.Linear(WIDTH, 6)), call),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="cayley"), call),
    "parametrization": (
        lambda: parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", Scaled()),
        call,
    ),
    "x @ w": (lambda: Raw(WIDTH, 6), lambda m, x: x @ m.w),
    "x @ w.T": (lambda: Raw(6, WIDTH), lambda m, x: x @ m.w.T),
    "w @ x": (lambda: Raw(6, WIDTH), lambda m, x: (m.w @ x.mT).mT),
    "addmm": (lambda: Raw(WIDTH, 6), lambda m, x: torch.addmm(m.w[0], x.flatten(0, 1), m.w).view(*x.shape[:2], -1)),
    "einsum": (lambda: Raw(6, WIDTH), lambda m, x: torch.einsum("ntd,ed->nte", x, m.w)),
    "einsum, positions first": (
        lambda: Raw(WIDTH, 2, 3),
        lambda m, x: torch.einsum("tnd,dhe->tnhe", x.transpose(0, 1), m.w).transpose(0, 1).flatten(2),
    ),
    "einsum, two axes summed": (
        lambda: Raw(6, 2, WIDTH // 2),
        lambda m, x: torch.einsum("nthd,ehd->net", x.unflatten(-1, (2, -1)), m.w).mT,
    ),
    "einsum, a weight for each feature": (lambda: Raw(WIDTH, 3), lambda m, x: torch.einsum("ntd,de->ntde", x, m.w)),
    "einsum, three operands": (lambda: Raw(WIDTH, 6), lambda m, x: torch.einsum("ntd,ntd,de->nte", x, x, m.w)),
    "bmm": (
        lambda: Raw(2, WIDTH // 2, 3),
        lambda m, x: torch.bmm(x.view(-1, 2, WIDTH // 2).transpose(0, 1), m.w).transpose(0, 1).reshape(len(x), -1, 6),
    ),
    "bmm of a view": (
        lambda: Raw(6, WIDTH // 2),
        lambda m, x: (
            torch.bmm(x.view(-1, 2, WIDTH // 2).transpose(0, 1), m.w.view(2, 3, -1).mT)
            .transpose(0, 1)
            .reshape(len(x), -1, 6)
        ),
    ),
    "baddbmm": (
        lambda: Raw(2, WIDTH // 2, 3),
        lambda m, x: (
            torch.baddbmm(m.w[:, :1], x.view(-1, 2, WIDTH // 2).transpose(0, 1), m.w)
            .transpose(0, 1)
            .reshape(len(x), -1, 6)
        ),
    ),
    "weight + 1": (lambda: Raw(WIDTH), lambda m, x: F.layer_norm(x, (WIDTH,), m.w + 1)),
    "a class token": (lambda: Raw(1, 1, WIDTH), lambda m, x: torch.cat([m.w.expand(len(x), -1, -1), x], 1)),
}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).log_softmax(-1)[..., 0].square().flatten(1).mean(1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_torch_is_exact_at_any_size(name: str) -> None:
    torch.manual_seed(0)
    make, use = LAYERS[name]
    model = Between(make(), use).double()
    model(torch.randn(2, 7, WIDTH).double())
    for records, length in SIZES:
        assert_exact(model, loss, {"x": torch.randn(records, length, WIDTH).double()}, tolerance=1e-6)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers_are_exact_without_copies(batch_first, kind):
    """Two layers, both directions, and the state at the end counts, too."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"below": nn.Linear(6, 6), "rnn": kind(6, 5, 2, bidirectional=True, batch_first=batch_first)}
    )
    model = Called(model, lambda m, x: outputs(m["rnn"], m["below"](x))).double()

    def loss(model, batch):
        return model(batch["x"]).square().sum(1)

    for batch_size, length in ((2, 3), (4, 8), (1, 4), (3, 3), (4, 1)):
        assert_exact(model, loss, {"x": torch.randn(batch_size, length, 6).double()})
    with BookKeeper(model) as book:
        book.backward(loss(model, {"x": torch.randn(3, 4, 6).double()}))
        assert not book.copied


class Called(nn.Module):
    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x):
        return self.call(self.inner, x)


def outputs(rnn, x):
    y, state = rnn(x if rnn.batch_first else x.transpose(0, 1))
    y = y if rnn.batch_first else y.transpose(0, 1)
    ends = state if isinstance(state, tuple) else (state,)
    return torch.cat([y.flatten(1), *(s.transpose(0, 1).flatten(1) for s in ends)], 1)
