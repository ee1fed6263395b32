"""Parameters that no rule knows, and experts: exact or refused, never wrong."""

import logging

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.layers import UncoveredError
from hf_private.gradients.layers.routed import Route
from hf_private.gradients.parts import whole
from hf_private.gradients.persample import Dense, Outer
from hf_private.gradients.slices import Slices
from tests.support import layouts, zoo
from tests.support.oracle import assert_exact, per_sample_gradients, weighted_sum


def outer(records=3, positions=2, rows=4, columns=5):
    return Outer(torch.randn(records, positions, rows).double(), torch.randn(records, positions, columns).double())


def test_slices_are_the_gradients_that_they_stand_for():
    torch.manual_seed(0)
    first, second = (Slices({1: outer(), part: outer()}, torch.Size([6, 4, 5])) for part in (3, 0))
    value = first + second
    g, c = first.dense() + second.dense(), torch.rand(3).double()
    torch.testing.assert_close(value.dense(), g)
    assert isinstance(value, Slices) and g.shape == (3, 6, 4, 5) and not g[:, [2, 4, 5]].any()
    torch.testing.assert_close(value.sq_norm(), g.square().sum((1, 2, 3)))
    torch.testing.assert_close(value.weighted_sum(c), torch.einsum("n,neoi->eoi", c, g))
    torch.testing.assert_close(
        value.weighted_sum(c, torch.ones(6, 4, 5).double()), torch.einsum("n,neoi->eoi", c, g) + 1
    )
    keep = torch.tensor([True, False, True])
    torch.testing.assert_close(value.masked(keep).dense(), g * keep.view(3, 1, 1, 1))


def test_slices_that_overlap_add_up_before_the_norm():
    one, two = Slices({(0, 4): outer(rows=4)}, torch.Size([6, 5])), Slices({(2, 6): outer(rows=4)}, torch.Size([6, 5]))
    total = one + two
    torch.testing.assert_close(total.sq_norm(), (one.dense() + two.dense()).square().sum((1, 2)))
    torch.testing.assert_close((one + outer(rows=6)).dense().shape, torch.Size([3, 6, 5]))


def test_parts_of_parameters_find_their_place():
    value = outer()
    name, found = whole("w@I3:8,5,4@T:5,4", value)
    assert name == "w" and found.shape == (8, 5, 4)
    assert torch.equal(found.dense()[:, 3], value.dense().transpose(1, 2))
    name, found = whole("w@R:12,5@T:3,4,5@I1:3,5,4", outer(rows=5, columns=4))
    assert isinstance(found, Slices) and found.shape == (12, 5)
    torch.testing.assert_close(found.dense()[:, 4:8].shape, torch.Size([3, 4, 5]))
    assert found.dense()[:, 4:8].all() and not found.dense()[:, 8:].any()
    _, found = whole("w@S2-6:8,5@C:4,5", value)
    assert torch.equal(found.dense()[:, 2:6], value.dense()) and not found.dense()[:, 6:].any()
    _, found = whole("w@R:20", Dense(value.dense()))
    assert torch.equal(found.dense(), value.dense().flatten(1))


def test_rows_of_experts_go_to_their_records_and_back():
    records = torch.tensor([2, 0, 0, 2, 2])
    route, x = Route(records, 4), torch.randn(5, 6)
    padded = route.padded(x)
    assert padded.shape == (4, 3, 6)
    assert torch.equal(padded.sum(1), torch.zeros(4, 6).index_add(0, records, x))
    assert torch.equal(route.unpadded(padded), x)


class BatchStatistic(nn.Module):
    """A parameter of its own after a mean over all records, between two layers."""

    def __init__(self, functional: bool):
        super().__init__()
        self.below, self.a, self.head = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 1)
        self.functional = functional

    def forward(self, x):
        y = self.below(x)
        y = F.batch_norm(y, None, None, self.a[0], self.a[1], training=True) if self.functional else y - y.mean(0)
        return self.head(torch.einsum("nd,de->ne", y, self.a))


@pytest.mark.parametrize("functional", [False, True])
def test_a_batch_statistic_above_a_layer_is_refused(functional):
    torch.manual_seed(0)
    model = BatchStatistic(functional).double()
    with pytest.raises(UncoveredError), BookKeeper(model) as book:
        book.backward(model(torch.randn(4, 6).double()).square().sum(1))


class NormOverBatch(nn.Module):
    """Batch statistics over records and positions, of rows that are all equal."""

    def __init__(self):
        super().__init__()
        self.below, self.a = nn.Linear(6, 6), nn.Parameter(torch.randn(2, 6))
        nn.init.zeros_(self.below.weight)

    def forward(self, x):
        return F.batch_norm(self.below(x).mT, None, None, self.a[0], self.a[1], training=True).mT


def test_a_batch_statistic_that_shows_in_gradients_alone_is_refused():
    """With equal rows the statistics of one record are those of the batch: the values agree, the gradients do not."""
    torch.manual_seed(0)
    model, x = NormOverBatch().double(), torch.randn(4, 3, 6).double()
    with pytest.raises(UncoveredError), BookKeeper(model) as book:
        book.backward((model(x) * torch.randn(4, 3, 6)).sum((1, 2)))


# Batch sizes and lengths: of the clear ones, the axis of the records is remembered.
CLEAR_FIRST = [(4, 6), (4, 8), (2, 6), (4, 4), (3, 7), (3, 6), (4, 8)]
UNCLEAR = [(4, 4), (4, 8), (2, 4), (2, 6), (3, 3), (3, 6)]


@pytest.mark.parametrize("name", ["scale, time first", "mean", "softmax", "distances (T, T)", "matrix"])
@pytest.mark.parametrize("sizes", [CLEAR_FIRST, UNCLEAR], ids=["clear first", "unclear"])
def test_one_model_is_never_wrong_at_one_size_after_others(name, sizes):
    model, loss = layouts.build(name)
    for batch_size, length in sizes:
        try:
            assert_exact(model, loss, layouts.make_batch(name, model, batch_size, length))
        except UncoveredError as error:
            assert "`layer" in str(error)


@pytest.mark.parametrize("name", ["distances (T, T)", "sum of sigmoids", "queries", "matrix"])
def test_records_of_several_rows_are_exact(name):
    model, loss = layouts.build(name)
    batch = layouts.make_batch(name, model, 6, 4)
    wanted = per_sample_gradients(model, loss, batch)
    pairs = [{key: wanted[n][key] + wanted[n + 1][key] for key in wanted[n]} for n in (0, 2, 4)]
    factors = torch.tensor([0.5, 2.0, 1.0]).double()
    with BookKeeper(model) as book:
        book.rows_per_record = 2
        book.backward(loss(model, batch).view(3, 2).sum(1))
        sums = book.weighted_sum(factors)
    for key, g in weighted_sum(pairs, factors).items():
        torch.testing.assert_close(sums[key], g)


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm", "batched_mm"])
def test_experts_are_exact_whatever_kernel_is_configured(kernel):
    model, loss = zoo.build("mixtral", torch.float32, experts_implementation=kernel)
    for batch_size, length in [(2, 6), (4, 8)]:
        assert_exact(model, loss, zoo.make_batch(model, batch_size, length), tolerance=1e-4)


def adapted_experts(names):
    adapted = get_peft_model(zoo.make("mixtral"), LoraConfig(r=2, target_modules=[], target_parameters=names))
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                p.normal_(std=0.3)
    return adapted


@pytest.mark.parametrize("other", ["experts.gate_up_proj", "gate.weight"])
def test_experts_with_adapters_are_exact_without_copies_of_their_weights(other):
    """The weight with its adapter, W + s B A, is never formed for each record."""
    adapted = adapted_experts(["mlp.experts.down_proj", f"mlp.{other}"])
    for batch_size, length in [(2, 6), (3, 7)]:
        assert_exact(adapted, zoo.loss_of(adapted), zoo.make_batch(adapted, batch_size, length))
    with BookKeeper(adapted) as book:
        book.backward(zoo.loss_of(adapted)(adapted, zoo.make_batch(adapted, 2, 6)))
        assert not book.formed


class Factors(nn.Module):
    """A product of two narrow matrices, used in ways that no rule covers."""

    def __init__(self, use):
        super().__init__()
        self.head, self.use = nn.Linear(6, 6), use
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2))
        self.frozen = nn.Parameter(torch.randn(6, 6), requires_grad=False)

    def forward(self, x):
        return self.use(self.head(x), self.frozen + 0.5 * (self.b @ self.a))


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: x @ w,
        lambda x, w: F.linear(x, w.T, x[0, 0, :1].detach().expand(6) * 0),
        lambda x, w: F.linear(x, w.float().double()),
        lambda x, w: torch.einsum("ntd,de->nte", x, w / w.norm()),
        lambda x, w: x * w[0] + w.sum(1),
    ],
)  # fmt: skip
def test_a_product_of_narrow_matrices_is_exact_however_it_is_used(use):
    torch.manual_seed(0)
    model = Factors(use).double()
    for batch_size in (1, 2, 4):
        x = torch.randn(batch_size, 4, 6).double()
        assert_exact(model, lambda model, batch: model(batch["x"]).square().sum((1, 2)), {"x": x}, tolerance=1e-6)


class Grouped(nn.Module):
    """A product for each group of features, of the tokens of all records: (groups, records * tokens, width)."""

    def __init__(self, groups=4):
        super().__init__()
        self.below, self.weight, self.groups = (
            nn.Linear(6, groups * 6),
            nn.Parameter(torch.randn(groups, 6, 5)),
            groups,
        )

    def forward(self, x):
        rows, groups = self.below(x).view(-1, self.groups, 6).transpose(0, 1), self.groups
        y = torch.baddbmm(torch.zeros(groups, 1, 5).to(x), rows, self.weight * 1.0)
        return y.view(groups, len(x), -1)


def test_what_one_batch_shows_of_axes_is_tried_first_in_others():
    """With 4 groups and 4 records both axes could hold records; a batch of 7, as in the self-check, shows which."""
    torch.manual_seed(0)
    model = Grouped().double()
    for batch_size in (7, 4, 2, 8):
        batch = {"x": torch.randn(batch_size, 4, 6).double()}
        assert_exact(model, lambda model, batch: model(batch["x"]).square().sum((0, 2)), batch)


class LessPrecise(nn.Module):
    """A scale of double precision in a product of single precision."""

    def __init__(self):
        super().__init__()
        self.below, self.scale, self.kinds = nn.Linear(6, 6), nn.Parameter(torch.randn(3)), []

    def forward(self, x):
        y = self.below(x).float() * self.scale[0]
        self.kinds.append(type(y))
        return y.double()


def test_rounding_in_a_part_of_a_model_does_not_hide_the_records():
    """Else each record's copy would be applied to all records."""
    torch.manual_seed(0)
    model = LessPrecise().double()
    with BookKeeper(model) as book:
        book.backward(model(torch.randn(7, 11, 6).double()).square().sum((1, 2)))
    assert model.kinds == [torch.Tensor]


def test_an_input_that_all_records_share_is_exact():
    """A layer that is applied to the records, and to one row for all of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh()).double()
    scale = torch.randn(1, 6).double()

    def loss(model, batch):
        return (model(batch["x"]) * model[0](scale)).sum(1)

    for batch_size in (1, 2, 4):
        assert_exact(model, loss, {"x": torch.randn(batch_size, 6).double()})


def test_batch_norm_in_eval_mode_is_exact():
    """Its statistics are fixed, so that records stay apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1)).double().eval()
    with torch.no_grad():
        model[1].weight.normal_()
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    for batch_size in (1, 2, 4):
        batch = {"x": torch.randn(batch_size, 2, 3, 3).double()}
        assert_exact(model, lambda model, batch: model(batch["x"]).square().sum((1, 2, 3)), batch)


class Filled(nn.Module):
    """Rows that are filled one by one from what all records share: the records, or the positions."""

    def __init__(self):
        super().__init__()
        self.below, self.table, self.records = nn.Linear(6, 6), nn.Parameter(torch.randn(9, 6)), True

    def forward(self, x):
        records, length, _ = x.shape
        rows = torch.zeros(*((records, length) if self.records else (length, records)), 6).to(x)
        table = F.interpolate(self.table.t()[None], rows.shape[1])[0].t()
        for n in range(len(rows)):
            rows[n] = table
        return (self.below(x) * (rows if self.records else rows.transpose(0, 1))).square()


def test_rows_that_are_filled_from_a_table_are_exact_if_they_are_records():
    """SigLIP 2 fits its positions to each image. With as many positions as records, rows may be either."""
    torch.manual_seed(0)
    model = Filled().double()

    def loss(model, batch):
        return model(batch["x"]).sum((1, 2))

    for batch_size, length in ((5, 7), (4, 4), (1, 3)):
        assert_exact(model, loss, {"x": torch.randn(batch_size, length, 6).double()})
    model.records = False
    with pytest.raises(UncoveredError, match="`table`"), BookKeeper(model) as book:
        book.backward(loss(model, {"x": torch.randn(3, 3, 6).double()}))


class OneRow(nn.Module):
    """The tokens of all records in one row, (1, N * T, d), as in vision models of images of several sizes."""

    def __init__(self):
        super().__init__()
        self.below, self.above = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.above(self.below(x).tanh().flatten(0, 1).unsqueeze(0)).view(*x.shape[:2], 4)


def test_tokens_of_all_records_in_one_row_are_exact_without_copies():
    torch.manual_seed(0)
    model = OneRow().double()
    for batch_size in (7, 4, 1, 3):
        batch = {"x": torch.randn(batch_size, 4, 6).double()}
        assert_exact(model, lambda model, batch: model(batch["x"]).square().sum((1, 2)), batch)
    with BookKeeper(model) as book:
        book.backward(model(batch["x"]).square().sum((1, 2)))
        assert not book.copied


class Transposed(nn.Module):
    """A weight that no rule knows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        return torch.einsum("nd,nd,ed->ne", x, x, self.weight)


def test_copies_of_a_weight_are_announced_once(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Transposed())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with BookKeeper(model) as book:
                book.backward(model(torch.randn(3, 6)).square().sum(1))
    assert [r.getMessage() for r in caplog.records if "copy" in r.getMessage()][0].startswith("`1.weight`: no rule")
    assert len(caplog.records) == 1


class Tiles(nn.Module):
    """Several images for each record, pooled by one learned query; a table that a layer changes in place."""

    def __init__(self):
        super().__init__()
        self.query, self.table = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(3, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.bias = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x):
        tiles = (x + self.bias(self.table)).flatten(0, 1)
        return self.attention(self.query.repeat(len(tiles), 1, 1), tiles, tiles)[0].unflatten(0, (len(x), -1))


def test_attention_with_a_query_that_tiles_share_and_changes_in_place_are_exact():
    torch.manual_seed(0)
    model = Tiles().double()
    for batch_size in (1, 4, 3):
        batch = {"x": torch.randn(batch_size, 2, 3, 4).double()}
        assert_exact(model, lambda model, batch: model(batch["x"]).square().sum((1, 2, 3)), batch)


class Distances(nn.Module):
    """A bias for each head, computed of a table of distances whose sides are as long as a batch may be."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(1, 3, 3, 2))
        self.wide, self.narrow = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.narrow(self.wide(self.table).relu()).flatten()
        return x * bias


def test_what_was_shared_in_a_batch_of_another_size_still_is() -> None:
    torch.manual_seed(0)
    model = Distances().double()
    for records in (7, 3, 9):
        x = torch.randn(records, 9, dtype=torch.float64)
        assert_exact(model, lambda m, batch: m(batch["x"]).square().sum(1), {"x": x})
