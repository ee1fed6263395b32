"""The self-check passes what is exact and refuses what is not; it leaves no trace."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_private.gradients import selfcheck
from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.comparison import Comparison
from hf_private.gradients.layers import UncoveredError
from hf_private.gradients.method import Full
from hf_private.gradients.persample import Dense
from hf_private.gradients.selfcheck import SelfCheckError, _check_against_autograd, self_check
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch
from tests.support import zoo

# The first name in the message is a remedy, not a parameter: the refusal is about records that are not independent.
COUPLES = "^[^`]*`per_device_train_batch_size=1`"


def check(model, loss=None, **kwargs):
    loss = loss or PerSampleLoss(model)
    return self_check(model, loss, partial(synthetic_batch, model), **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in zoo.FAMILIES if name != "resnet-gn"])
def test_every_listed_family_passes(name, dtype):
    model, _ = zoo.build(name, dtype)
    assert "exact" in check(model)


class Mixed(nn.Module):
    """Wraps a classifier and lets the records meet in one of several ways."""

    def __init__(self, how: str):
        super().__init__()
        self.inner, _ = zoo.build("bert", torch.float32)
        self.how, self.config = how, self.inner.config
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, **inputs):
        logits = self.inner(**inputs).logits
        if self.how == "statistic":
            logits = logits - logits.mean(0, keepdim=True).tanh()
        if self.how == "neighbour":
            logits = logits + 0.3 * logits.roll(1, 0)
        if self.how == "training" and self.training:
            logits = logits + 0.3 * logits.roll(1, 0)
        sometimes = {"with one seed": torch.initial_seed() == 5, "sometimes": bool(torch.rand(()) < 0.3)}
        if self.training and sometimes.get(self.how):
            logits = logits + 0.3 * logits.roll(1, 0).detach()
        if self.how == "weight":
            with torch.no_grad():
                self.inner.classifier.weight.clamp_(-1e9, 1e9)
        if self.how == "buffer" and self.training:
            self.seen += logits.detach().mean()
        return hf.modeling_outputs.SequenceClassifierOutput(logits=logits)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("statistic", "`inner.classifier.weight`"),
        ("neighbour", "`inner.classifier.weight`"),
        ("training", COUPLES),
        ("sometimes", COUPLES),
        ("with one seed", COUPLES),
        ("buffer", "`seen`"),
        ("weight", "`inner.classifier.weight`"),
    ],
)
def test_models_that_couple_records_are_refused(how, match):
    model = Mixed(how)

    def loss(model, batch):
        batch = dict(batch)
        return F.cross_entropy(
            model(**{k: x for k, x in batch.items() if k != "labels"}).logits, batch["labels"], reduction="none"
        )

    with pytest.raises((SelfCheckError, UncoveredError), match=match):
        self_check(model, loss, partial(synthetic_batch, model.inner))


def test_a_model_that_is_exact_alone_only_passes_alone_and_is_refused_in_a_batch():
    model = Mixed("neighbour")

    def loss(model, batch):
        logits = model(**{k: x for k, x in batch.items() if k != "labels"}).logits
        return F.cross_entropy(logits, batch["labels"], reduction="none")

    make = partial(synthetic_batch, model.inner)
    assert "batches of 1" in self_check(model, loss, make, records_meet=False)
    with pytest.raises(UncoveredError, match="`inner.classifier.weight`"):
        self_check(model, loss, make)


class Queries(nn.Module):
    """Ten learned queries that are looked up without a batch axis: ten rows, of which no record owns any."""

    main_input_name = "input_ids"

    def __init__(self, queries: int):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.queries, self.head = nn.Embedding(50, 16), nn.Embedding(queries, 16), nn.Linear(16, 3)

    def forward(self, input_ids):
        x, q = self.words(input_ids), self.queries(torch.arange(self.queries.num_embeddings))
        weights = torch.einsum("qd,btd->bqt", q, x).softmax(-1)
        return self.head((weights @ x).mean(1))


@pytest.mark.parametrize("queries", [10, 210])  # a multiple of some batch sizes, and of all
def test_queries_that_all_records_share_are_exact(queries):
    def made(size, length, generator=None):
        draw = generator or torch.Generator().manual_seed(0)
        ids = torch.randint(50, (size, length), generator=draw)
        return {"input_ids": ids, "labels": torch.randint(3, (size,), generator=draw)}

    def loss(model, batch):
        return F.cross_entropy(model(batch["input_ids"]), batch["labels"], reduction="none")

    assert "exact" in self_check(Queries(queries), loss, made)


def test_the_sum_is_checked_record_by_record():
    """One parameter's gradients are given to other records: their plain sum stays what it was."""
    model, loss = zoo.build("bert", torch.float32)

    class Swapped(Full):
        def observe(self, name, value):
            mixed_up = name == "bert.embeddings.LayerNorm.bias"
            return {name: Dense(value.dense().flip(0))} if mixed_up else super().observe(name, value)

    model.eval()
    batch = synthetic_batch(model, 7, 11)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_private.gradients.selfcheck.BookKeeper", lambda model, **_: BookKeeper(model, Swapped()))
        with pytest.raises(SelfCheckError, match="^`bert.embeddings.LayerNorm.bias`"):
            groups = {"": [name for name, _ in model.named_parameters()]}
            _check_against_autograd(Comparison(model, loss, torch.float32, 0.0, groups), batch)


def test_a_loss_that_couples_records_is_refused():
    model, loss = zoo.build("bert", torch.float32)

    def coupled(model, batch):
        losses = loss(model, batch)
        return losses / losses.detach().mean()

    with pytest.raises(SelfCheckError, match=COUPLES):
        check(model, coupled)


def test_decoder_inputs_that_are_given_keep_their_length():
    """The decoder's inputs may be as long as the encoder's, and have no padding of their own."""
    model, loss = zoo.build("bart", torch.float32)

    def made(*arguments):
        batch = synthetic_batch(model, *arguments)
        return batch | {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])}

    assert "exact" in self_check(model, loss, made)


def test_made_up_records_that_are_alike_are_refused():
    """The mean over a batch of one and the same record is that record's own value."""
    model, loss = zoo.build("bert", torch.float32)

    def alike(size, length, generator=None):
        return {
            key: x[:1].expand(size, *x.shape[1:]) for key, x in synthetic_batch(model, 1, length, generator).items()
        }

    def centred(model, batch):
        losses = loss(model, batch)
        return losses * losses.detach().mean()

    with pytest.raises(SelfCheckError, match="`public_batch`"):
        self_check(model, centred, alike)


def test_an_unused_parameter_is_refused_by_name():
    model, _ = zoo.build("bert", torch.float32)
    model.unused = nn.Linear(2, 2)
    with pytest.raises(SelfCheckError, match="^`unused.weight`, `unused.bias`"):
        check(model)


def test_a_loss_that_depends_on_padding_is_refused():
    """Outputs that move with the padding of the batch couple records through their lengths."""
    model, loss = zoo.build("bert", torch.float32)

    def padded(model, batch):
        return loss(model, batch) * batch["input_ids"].shape[1]

    with pytest.raises(SelfCheckError, match=COUPLES):
        check(model, padded)


def test_the_check_restores_model_and_generator():
    model, _ = zoo.build("bert", torch.float32)
    model.train()
    model.bert.encoder.eval()
    marker = torch.ones_like(model.classifier.weight)
    model.classifier.weight.grad = marker
    state, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    check(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert model.classifier.weight.grad is marker
    assert all(p.grad is None for name, p in model.named_parameters() if name != "classifier.weight")


def self_paced(losses):
    return losses * torch.sigmoid(losses - losses.mean()).detach()


COUPLED = {  # (logits, labels) -> losses in which the records of a batch meet
    "divided by the mean": lambda logits, y: each(logits, y) / each(logits, y).detach().mean(),
    "class weights of the batch": lambda logits, y: each(logits, y) * (1 + 0.3 * y) / (1 + 0.3 * y).mean(),
    "centred logits": lambda logits, y: each(logits - logits.detach().mean(0), y),
    "self-paced": lambda logits, y: self_paced(each(logits, y)),
}


def each(logits, labels):
    return F.cross_entropy(logits.float(), labels, reduction="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", COUPLED)
def test_losses_that_couple_records_are_refused_in_any_precision(how, dtype):
    """A fresh model's losses are nearly equal: norms hardly move, and not at all within the rounding of bfloat16."""
    model, _ = zoo.build("bert", dtype)

    def loss(model, batch, of=COUPLED[how]):
        inputs = {key: x for key, x in batch.items() if key != "labels"}
        return of(model(**inputs).logits, batch["labels"])

    with pytest.raises(SelfCheckError, match=COUPLES):
        check(model, loss)
    assert "exact" in check(model, lambda model, batch: loss(model, batch, each))


# ---- directions, precisions, and what is found first

BERT = dict(
    vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
PADDED = {  # padding reaches the tokens beside it
    "fnet": lambda: hf.FNetForSequenceClassification(hf.FNetConfig(**BERT)),
    "yoso": lambda: hf.YosoForSequenceClassification(hf.YosoConfig(**BERT)),
    "convbert": lambda: hf.ConvBertForSequenceClassification(
        hf.ConvBertConfig(**BERT, head_ratio=1, conv_kernel_size=3, embedding_size=16)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PADDED)
def test_models_in_which_padding_moves_gradients_are_refused_in_any_precision(name, dtype):
    torch.manual_seed(0)
    model = PADDED[name]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    for p in (p for name, p in model.named_parameters() if "conv_" in name):
        p.requires_grad_(False)
    with pytest.raises(SelfCheckError, match=COUPLES):
        check(model.to(dtype))


def test_a_coupling_that_shows_at_some_lengths_only_is_seen():
    """Doge keeps the four keys of most weight; of equal ones, those that the length of the batch decides."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    model = hf.DogeForCausalLM(hf.DogeConfig(**sizes, keep_window_size=4, pad_token_id=0))
    with pytest.raises(SelfCheckError, match="equal scores"):
        check(model)


def louder_if_padded(model, batch):
    """Losses that grow by a tenth where more than half of a row is padding."""
    losses = PerSampleLoss(model)(model, batch)
    return losses * (1 + 0.1 * (2 * batch["attention_mask"].sum(1) < batch["attention_mask"].shape[1]))


def test_padding_is_checked_for_short_records_too():
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=3))
    with pytest.raises(SelfCheckError, match=COUPLES):
        check(model, louder_if_padded)


def turned(model, batch):
    """Losses whose gradients keep their norms, but turn with the length of the batch: to another logit."""
    inputs = {key: x for key, x in batch.items() if key != "labels"}
    labels = (batch["labels"] + batch["input_ids"].shape[1]) % 3
    losses = F.cross_entropy(model(**inputs).logits, labels, reduction="none")
    return losses - losses.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_of_direction_is_seen(dtype):
    """Neither losses nor norms show it: a fresh head's logits are nearly alike."""
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=3)).to(dtype)
    torch.nn.init.zeros_(model.classifier.weight)
    for name, p in model.named_parameters():
        p.requires_grad_("classifier" in name)
    with pytest.raises(SelfCheckError, match=COUPLES):
        check(model, turned)


def lora_llama():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = zoo.build("llama", torch.float32)[0]
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))


def test_rounding_of_tiny_gradients_is_no_coupling():
    """In a record of two tokens, the queries' gradient is 0 but for rounding."""
    model = lora_llama()
    assert "exact" in check(model)
    with pytest.raises(SelfCheckError, match=COUPLES):  # AUTO-S with such a gamma would scale it up
        check(model, gamma=1e-12)


@pytest.mark.parametrize("scale", [1e-7, 1e-10])
def test_tiny_gradients_are_compared_down_to_the_floor(scale):
    """AUTO-S scales a gradient up by at most 1 / gamma: 1e-8 here is 1e-6 of the clip norm, and no coupling."""
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=3))
    nn.init.zeros_(model.classifier.weight)
    for name, p in model.named_parameters():
        p.requires_grad_("classifier" in name)

    def tiny(model, batch):
        return scale * turned(model, batch)

    if scale > 1e-8:
        with pytest.raises(SelfCheckError, match=COUPLES):
            check(model, tiny, gamma=0.01)
    else:
        assert "exact" in check(model, tiny, gamma=0.01)


class Heads(nn.Module):
    """Two heads on the mean of frozen embeddings."""

    main_input_name = "input_ids"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, 16).requires_grad_(False)
        self.first, self.second = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, input_ids):
        states = self.words(input_ids).mean(1)
        return self.first(states), self.second(states)


def test_a_layer_with_a_tiny_gradient_is_compared_by_itself_if_it_is_clipped_by_itself():
    """`automatic-per-layer` scales it up to the size of the others."""

    def made(size, length, generator=None):
        draw = generator or torch.Generator().manual_seed(0)
        ids = torch.randint(50, (size, length), generator=draw)
        return {"input_ids": ids, "labels": torch.randint(3, (size,), generator=draw)}

    def loss(model, batch):
        """The second head's gradient turns with the number of records."""
        first, second = model(batch["input_ids"])
        faint = 1e-6 * each(second, (batch["labels"] + len(batch["labels"])) % 3)
        return each(first, batch["labels"]) + faint - faint.detach()

    assert "exact" in self_check(Heads(), loss, made)
    with pytest.raises(SelfCheckError, match=COUPLES):
        self_check(Heads(), loss, made, group_of=lambda name: name.rpartition(".")[0])


def test_weights_that_are_not_finite_are_found_first():
    model, _ = zoo.build("bert", torch.float32)
    with torch.no_grad():
        model.bert.pooler.dense.weight[0, 0] = float("nan")
    with pytest.raises(SelfCheckError, match=r"`bert.pooler.dense.weight`: .*not finite"):
        check(model)


def test_a_model_that_is_random_in_evaluation_mode_is_found_first():
    model, loss = zoo.build("bert", torch.float32)

    def noisy(model, batch):
        return loss(model, batch) * (1 + 0.1 * torch.rand(()))

    with pytest.raises(SelfCheckError, match="random in evaluation mode"):
        check(model, noisy)


def test_a_loss_that_is_not_finite_is_found_first():
    model, loss = zoo.build("bert", torch.float32)
    with pytest.raises(SelfCheckError, match="loss of a synthetic record is inf"):
        check(model, lambda model, batch: loss(model, batch) / 0)


class Counting(nn.Module):
    """A buffer that a forward pass writes, or replaces by a longer one."""

    def __init__(self, replace: bool, dtype: torch.dtype):
        super().__init__()
        self.inner, _ = zoo.build("bert", dtype)
        self.config, self.replace = self.inner.config, replace
        self.register_buffer("seen", torch.zeros(2, dtype=dtype))

    def forward(self, **inputs):
        logits = self.inner(**inputs).logits
        if self.replace:
            self.seen = torch.cat([self.seen, logits.detach().mean().view(1)])
        else:
            self.seen += logits.detach().mean()
        return hf.modeling_outputs.SequenceClassifierOutput(logits=logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replace", [False, True])
def test_buffers_and_weights_are_restored_when_the_check_raises(replace, dtype):
    model = Counting(replace, dtype)
    before, seen = {name: p.detach().clone() for name, p in model.named_parameters()}, model.seen

    def loss(model, batch):
        inputs = {key: x for key, x in batch.items() if key != "labels"}
        return F.cross_entropy(model(**inputs).logits.float(), batch["labels"], reduction="none")

    with pytest.raises(SelfCheckError, match="`seen`"):
        self_check(model, loss, partial(synthetic_batch, model.inner))
    assert model.seen is seen and torch.equal(seen, torch.zeros(2, dtype=dtype))
    assert all(p.dtype == dtype and torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_model_computes_in_float32_whatever_wraps_it():
    """Accelerate puts autocast around the forward method, and keeps the original beside it."""
    model, loss = zoo.build("bert", torch.float32)
    seen = set()
    model.bert.encoder.layer[0].intermediate.dense.register_forward_hook(lambda m, x, y: seen.add(y.dtype))
    model._original_forward, original = model.forward, model.forward
    model.forward = wrapped = torch.autocast("cpu", torch.bfloat16)(original)
    check(model, loss)
    assert seen == {torch.float32} and model.forward is wrapped
    loss(model, synthetic_batch(model, 2, 5))
    assert torch.bfloat16 in seen


def test_a_coupling_that_happens_sometimes_is_seen_in_some_seed():
    """The stated probability of missing one with probability 0.3."""
    seeds = selfcheck.GRADIENT_SEEDS + selfcheck.LOSS_SEEDS
    assert 0.7**seeds < 0.03


def test_passes_are_counted():
    """Forward and backward passes of records, as (forward, backward): no more work than a check of norms only."""
    model, loss = zoo.build("bert", torch.float32)
    passes = []

    def counted(model, batch):
        losses = loss(model, batch)
        passes.append((len(losses), torch.is_grad_enabled()))
        return losses

    check(model, counted)
    backward = sum(records for records, grad in passes if grad)
    forward = sum(records for records, grad in passes if not grad)
    assert (backward, forward) == (27, 60)


def test_it_says_that_it_runs(capsys):
    model, _ = zoo.build("bert", torch.float32)
    check(model, records_meet=False)
    assert "Checking per-sample gradients" in capsys.readouterr().err  # how often it is drawn depends on the machine


class Routed(nn.Module):
    """A linear layer of which PEFT adapts the weight, not the layer."""

    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.gate(x).tanh())


def test_lora_on_the_weight_of_a_linear_layer_passes():
    torch.manual_seed(0)
    model = get_peft_model(Routed(), LoraConfig(r=2, target_modules=[], target_parameters=["gate.weight"]))

    def make(records, length, generator=None):
        return {"x": torch.randn(records, length, 6, generator=generator)}

    assert "exact" in self_check(model, lambda model, batch: model(batch["x"]).square().mean((1, 2)), make)


def test_lora_on_experts_passes():
    """PEFT writes their weights to themselves in each forward pass, which changes nothing."""
    model = get_peft_model(zoo.make("mixtral"), LoraConfig(r=2, target_modules=[], target_parameters=["down_proj"]))
    assert "exact" in check(model)


class Adapted(nn.Module):
    """PEFT's name for the layer below an adapter."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Module()
        self.base_layer.weight = nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.adapter = nn.Linear(6, 6)

    def forward(self, x):
        self.base_layer.weight.data += 1e-3 * x.mean()
        return self.adapter(x @ self.base_layer.weight)


def test_a_layer_with_an_adapter_may_not_change_its_weights():
    def make(records, length, generator=None):
        return {"x": torch.randn(records, length, 6, generator=generator)}

    with pytest.raises(SelfCheckError, match="base_layer.weight`"):
        self_check(Adapted(), lambda model, batch: model(batch["x"]).square().mean((1, 2)), make)


def test_batch_norm_that_needs_several_records_is_refused_by_name():
    """torch has no statistic of one value, so the forward pass of one record fails in training mode."""
    model = nn.Sequential()
    model.add_module("norm", nn.BatchNorm1d(4))
    model.add_module("head", nn.Linear(4, 2))

    def make(records, length, generator=None):
        return {"x": torch.randn(records, 4, generator=generator or torch.Generator().manual_seed(0))}

    with pytest.raises(SelfCheckError, match="`norm`: BatchNorm1d"):
        self_check(model, lambda model, batch: model(batch["x"]).square().sum(1), make)
