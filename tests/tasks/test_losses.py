"""Per-record losses against Transformers' own loss, and their independence of neighbours."""

import copy

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.trainer_pt_utils import LabelSmoother

from hf_private.tasks.head_losses import token_loss
from hf_private.tasks.heads import IGNORE_INDEX, Head, base_model, head_of
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import TOKEN_HEADS, widen
from tests.support import oracle
from tests.support.zoo import LENGTH, MODELS, SIZE, VOCABULARY, config, from_config, make, make_batch, with_head

B, T, V = 4, LENGTH, VOCABULARY
CLOSE = {"rtol": 1e-6, "atol": 1e-6, "check_dtype": False}  # some of Transformers' losses round float64 to float32
QA = with_head(Head.QUESTION_ANSWERING)
TEXT = [name for name in MODELS if not name.startswith(("vit", "resnet"))]
TOKENS = with_head(*TOKEN_HEADS)


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    return oracle.flat(oracle.gradient(model, loss))


def weights(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """How much of the batch each record is in Transformers' mean: its labelled tokens, or 1."""
    labels = batch.get("labels")
    if head_of(model) not in TOKEN_HEADS:
        return torch.ones(B)
    return (labels[:, 1:] if head_of(model) is Head.CAUSAL_LM else labels).ne(IGNORE_INDEX).sum(-1).double()


def unpadded(batch: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """The record alone, without padding."""
    one = oracle.record(batch, row)
    size = int(one["attention_mask"].sum(-1).max())
    return {k: v[..., :size] if k in ("input_ids", "attention_mask", "token_type_ids") else v for k, v in one.items()}


# Equal to Transformers


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_loss_of_transformers_up_to_normalisation(name: str) -> None:
    model = make(name)
    batch = make_batch(model, B)
    if name in QA:  # Transformers lets padding compete in the softmax; without padding the two are the same
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    share = weights(model, batch)
    before = copy.deepcopy(model.config.to_dict())
    losses = PerSampleLoss(model)(model, batch)
    assert model.config.to_dict() == before
    theirs = model(**batch).loss
    torch.testing.assert_close((losses * share).sum() / share.sum(), theirs, **CLOSE)
    ours, theirs = gradient(model, (losses * share).sum() / share.sum()), gradient(model, theirs)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    assert losses.shape == (B,) and losses.unique().numel() == B


@pytest.mark.parametrize("name", MODELS)
def test_a_record_alone_has_the_loss_of_transformers(name: str) -> None:
    """Padding invariance: in a batch, and alone without padding, the same loss; and that is Transformers' loss."""
    model = make(name)
    batch = make_batch(model, B)
    losses = PerSampleLoss(model)(model, batch)
    for row in range(B):
        one = oracle.record(batch, row)
        if name in TEXT:
            one = unpadded(batch, row)
            if head_of(model) in (Head.CAUSAL_LM, Head.MASKED_LM, Head.TOKEN_CLASSIFICATION):
                one["labels"] = one["labels"][:, : one["input_ids"].shape[1]]
        theirs = model(**one).loss
        torch.testing.assert_close(losses[row], theirs, **CLOSE)


def test_question_answering_positions_outside_the_record_do_not_count() -> None:
    model = make("bert-qa")
    batch = make_batch(model, B)
    row = 1
    size = int(batch["attention_mask"][row].sum())
    assert size < T
    for beyond in (size, T, T + 5):
        batch["start_positions"][row] = batch["end_positions"][row] = beyond
        losses = PerSampleLoss(model)(model, batch)
        assert losses[row] == 0 and losses.isfinite().all()
        assert gradient(model, losses[row]).eq(0).all()


def test_shift_labels_are_honoured() -> None:
    model = make("llama")
    batch = make_batch(model, B)
    expected = PerSampleLoss(model)(model, batch)
    labels = batch.pop("labels")
    batch["shift_labels"] = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    torch.testing.assert_close(PerSampleLoss(model)(model, batch), expected)
    batch["shift_labels"] = batch["shift_labels"].roll(1, dims=0)
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    assert not torch.allclose(PerSampleLoss(model)(model, batch), expected)


@pytest.mark.parametrize("alias", ["label", "label_ids"])
def test_label_aliases(alias: str) -> None:
    model = make("bert")
    batch = make_batch(model, B)
    expected = PerSampleLoss(model)(model, batch)
    batch[alias] = batch.pop("labels")
    torch.testing.assert_close(PerSampleLoss(model)(model, batch), expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_problem_type_follows_the_dtype_and_is_not_written(dtype: torch.dtype) -> None:
    model = make("bert")
    batch = make_batch(model, B)
    batch["labels"] = torch.eye(3)[batch["labels"]].double() if dtype is torch.float32 else batch["labels"].to(dtype)
    losses = PerSampleLoss(model)(model, batch)
    assert model.config.problem_type is None
    if dtype is not torch.int32:  # torch's cross entropy wants int64
        torch.testing.assert_close(losses.mean(), model(**batch).loss)


@pytest.mark.parametrize("name", ["bert", "bert-mlm", "gpt2", "t5", "bert-choice"])
def test_label_smoothing_is_that_of_transformers(name: str) -> None:
    model = make(name)
    batch = make_batch(model, B)
    losses = PerSampleLoss(model, label_smoothing=0.2)(model, batch)
    share = weights(model, batch)
    theirs = LabelSmoother(0.2)(model(**batch), batch["labels"], shift_labels=head_of(model) is Head.CAUSAL_LM)
    torch.testing.assert_close((losses * share).sum() / share.sum(), theirs, **CLOSE)
    assert not torch.allclose(losses, PerSampleLoss(model)(model, batch))


@pytest.mark.parametrize("name", ["gpt2", "bert", "bert-qa", "vit"])
def test_losses_of_half_precision_models_are_float32(name: str) -> None:
    model = make(name).bfloat16()
    batch = make_batch(model, B)
    losses = PerSampleLoss(model)(model, batch)
    assert losses.dtype is torch.float32
    if name == "gpt2":
        share = weights(model, batch)
        torch.testing.assert_close(((losses * share).sum() / share.sum()).float(), model(**batch).loss)


def test_logits_are_not_copied() -> None:
    """Of the logits' size, the loss keeps their softmax and nothing else."""
    model = make("gpt2").float()
    batch = make_batch(model, B)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        PerSampleLoss(model)(model, batch)
    large = {t.untyped_storage().data_ptr() for t in kept if t.numel() == B * T * V}
    assert len(large) == 1


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_of_tokens_has_the_gradient_of_torchs(smoothing: float) -> None:
    logits = torch.randn(B, T, V, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(V, (B, T)).masked_fill(torch.rand(B, T) < 0.3, -100)
    share = torch.rand(B, dtype=torch.float64)
    theirs = nn.functional.cross_entropy(logits.mT, labels, reduction="none", label_smoothing=smoothing)
    theirs = theirs.sum(1) / (labels != -100).sum(1).clamp(min=1)
    ours = token_loss(logits, labels, smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    (expected,) = torch.autograd.grad((theirs * share).sum(), logits)
    for _ in range(2):  # a graph that is kept gives the same again
        (found,) = torch.autograd.grad((ours * share).sum(), logits, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError):
        token_loss(logits, labels.clamp(min=0) + V)  # no such class


def test_the_loss_of_unlikely_tokens_is_as_precise_as_torchs() -> None:
    """Classes whose probability underflows, far from 0."""
    logits = torch.tensor([[[0.0, 500.0], [3000.0, 3001.0]]])
    labels = torch.tensor([[0, 0]])
    theirs = nn.functional.cross_entropy(logits.double().mT, labels, reduction="none").mean(1)
    torch.testing.assert_close(token_loss(logits, labels).double(), theirs, rtol=1e-6, atol=0)


def test_the_gradient_of_the_logits_is_allocated_once() -> None:
    """torch's cross entropy makes it twice."""

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.numel() == B * T * V:
                storages.add(out.untyped_storage().data_ptr())
                alive.append(out)
            return out

    logits, labels = torch.randn(B, T, V, requires_grad=True), torch.randint(V, (B, T))
    ours, theirs = token_loss(logits, labels), nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    made = []
    for loss in (ours.sum(), theirs):
        storages, alive = set(), []
        with Made():
            torch.autograd.grad(loss, logits)
        made.append(len(storages))
    ours, theirs = made
    assert ours == 1 < theirs


# Independent of neighbours


@pytest.mark.parametrize("name", MODELS)
def test_replacing_a_record_changes_no_other_loss(name: str) -> None:
    """Another record's content, length and labels move its own loss and the mean of Transformers, but no other's."""
    model = make(name)
    batch = make_batch(model, B)
    drawn = make_batch(model, B, seed=5)
    other = {key: torch.cat([rows[:1], drawn[key][1:2], rows[2:]]) for key, rows in batch.items()}
    loss = PerSampleLoss(model)
    before, after = loss(model, batch), loss(model, other)
    rest = [0, 2, 3]
    torch.testing.assert_close(after[rest], before[rest], rtol=1e-9, atol=1e-12)
    assert abs(after[1] - before[1]) > 1e-4
    for row in rest:
        torch.testing.assert_close(gradient(model, after[row]), gradient(model, before[row]), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in TEXT if "gemma" not in name])  # its norms are float32 at most
def test_padding_changes_nothing(name: str) -> None:
    """A longer neighbour only adds padding: loss and gradient of every record stay."""
    model = make(name)
    batch = make_batch(model, B)
    wide = widen(model, batch, columns=3)
    assert wide["input_ids"].shape[-1] == T + 3
    loss = PerSampleLoss(model)
    before, after = loss(model, batch), loss(model, wide)
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient(model, after[1]), gradient(model, before[1]), rtol=1e-7, atol=1e-10)
    if name in QA:
        assert abs(model(**wide).loss - model(**batch).loss) > 1e-3  # control: theirs feels the padding


def test_control_a_model_that_reads_padding_is_detected() -> None:
    sizes = {k: v for k, v in SIZE.items() if k != "num_attention_heads"}
    model = from_config(hf.FNetConfig(**sizes, architectures=["FNetForSequenceClassification"])).eval()
    batch = make_batch(model, B)
    loss = PerSampleLoss(model)
    assert not torch.allclose(loss(model, widen(model, batch, 3)), loss(model, batch), rtol=1e-3)


@pytest.mark.parametrize("name", TOKENS)
def test_control_the_loss_of_transformers_couples_records(name: str) -> None:
    """Record 0's share of Transformers' gradient moves with the number of its neighbour's labels; ours does not."""
    model = make(name)
    batch = make_batch(model, B)
    fewer = {k: v.clone() for k, v in batch.items()}
    counted = (fewer["labels"][1] != IGNORE_INDEX).nonzero().flatten()
    fewer["labels"][1, counted[1:]] = IGNORE_INDEX
    decoder = {}
    if head_of(model) is Head.SEQ2SEQ_LM:  # the same decoder inputs, so that only the count of labels differs
        decoder["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])

    def share_of_record_0(labels: Tensor) -> Tensor:
        """d(their mean) / d(logits of record 0)"""
        outputs = model(**{**batch, **decoder, "labels": labels})
        return torch.autograd.grad(outputs.loss, outputs.logits)[0][0]

    assert len(counted) > 1
    assert not torch.allclose(share_of_record_0(batch["labels"]), share_of_record_0(fewer["labels"]), rtol=1e-2)
    loss = PerSampleLoss(model)
    ours = [gradient(model, loss(model, {**one, **decoder})[0]) for one in (batch, fewer)]
    torch.testing.assert_close(*ours)


@pytest.mark.parametrize("name", TOKENS)
def test_a_record_without_labels_has_loss_0_and_gradient_0(name: str) -> None:
    model = make(name)
    batch = make_batch(model, B)
    batch["labels"][2] = IGNORE_INDEX
    losses = PerSampleLoss(model)(model, batch)
    assert losses[2] == 0 and losses.isfinite().all() and losses.requires_grad
    assert gradient(model, losses[2]).eq(0).all()
    assert gradient(model, losses.sum()).isfinite().all()
    batch["labels"][:] = IGNORE_INDEX
    assert gradient(model, PerSampleLoss(model)(model, batch).sum()).eq(0).all()


# The model's own loss and cache


@pytest.mark.parametrize("name", MODELS)
def test_the_forward_gets_no_labels_and_no_cache(name: str) -> None:
    model = make(name)
    seen = {}
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    outputs = []
    model.register_forward_hook(lambda module, args, output: outputs.append(output))
    batch = make_batch(model, B)
    keys = set(batch)
    PerSampleLoss(model)(model, batch)
    assert set(batch) == keys
    assert not {"labels", "start_positions", "end_positions"} & seen.keys() and seen["return_dict"] is True
    assert "loss" not in outputs[0] and outputs[0].get("past_key_values") is None


def test_tuples_are_not_returned_even_if_configured() -> None:
    model = make("bert")
    model.config.return_dict = False
    assert PerSampleLoss(model)(model, make_batch(model, B)).shape == (B,)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "bert-token", "bert-qa", "vit"])
def test_a_peft_model_has_the_loss_of_its_base_model(name: str) -> None:
    tasks = {"bert": "SEQ_CLS", "gpt2": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM", "bert-token": "TOKEN_CLS"}
    task = "QUESTION_ANS" if name in QA else tasks.get(name)
    plain = make(name)
    batch = make_batch(plain, B)
    batch.pop("token_type_ids", None)  # PEFT's question answering drops them
    expected = PerSampleLoss(plain)(plain, batch)
    targets = {"gpt2": ["c_attn"], "t5": ["q", "v"], "vit": ["q_proj", "v_proj"]}.get(name, ["query"])
    config = LoraConfig(r=2, target_modules=targets, task_type=task)
    model = get_peft_model(plain, config).double().eval()
    assert base_model(model) is plain
    losses = PerSampleLoss(model)(model, batch)
    torch.testing.assert_close(losses, expected)  # an adapter is zero at the start
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert any(g is not None and g.ne(0).any() for g in torch.autograd.grad(losses[0], adapters, allow_unused=True))


def test_a_subclass_has_the_head_of_its_parent() -> None:
    class Mine(hf.BertForTokenClassification):
        pass

    assert head_of(Mine(config("bert-token"))) is Head.TOKEN_CLASSIFICATION


# Custom losses


def test_custom_loss_gets_the_label_tensor() -> None:
    model = make("bert")
    batch = make_batch(model, B)

    def loss(outputs, labels):
        return nn.functional.cross_entropy(outputs.logits, labels, reduction="none")

    torch.testing.assert_close(PerSampleLoss(model, custom=loss)(model, batch), PerSampleLoss(model)(model, batch))


def test_custom_loss_gets_a_dict_of_several_labels() -> None:
    model = make("bert-qa")
    batch = make_batch(model, B)

    def loss(outputs, labels):
        assert set(labels) == {"start_positions", "end_positions"}
        return outputs.start_logits.gather(1, labels["start_positions"][:, None])[:, 0]

    assert PerSampleLoss(model, custom=loss)(model, batch).shape == (B,)


def test_custom_loss_on_seq2seq_and_on_an_unknown_model() -> None:
    model = make("t5")
    expected = model(**make_batch(model, B)).logits.mean((1, 2))
    custom = PerSampleLoss(model, custom=lambda outputs, labels: outputs.logits.mean((1, 2)))
    torch.testing.assert_close(custom(model, make_batch(model, B)), expected)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x):
            return self.linear(x)

    plain = Plain()
    custom = PerSampleLoss(plain, custom=lambda outputs, labels: (outputs[:, 0] - labels) ** 2)
    assert custom(plain, {"x": torch.randn(5, 3), "labels": torch.randn(5)}).shape == (5,)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(()), r"\(4,\).*got shape \(\).*`per_sample_loss=fn`"),
        (torch.zeros(4, 1), r"got shape \(4, 1\).*`per_sample_loss=fn`"),
        (1.0, "got float.*`per_sample_loss=fn`"),
    ],
)
def test_custom_loss_of_a_wrong_shape(returned: object, message: str) -> None:
    model = make("bert")
    with pytest.raises(ValueError, match=message):
        PerSampleLoss(model, custom=lambda outputs, labels: returned)(model, make_batch(model, B))
