"""Per-record losses against Transformers' own loss, their independence of neighbours, and every refusal."""

import copy
import inspect

import pytest
import torch
import transformers as hf
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from hf_private.losses import HEAD_CLASSES, IGNORE_INDEX, OTHER_OBJECTIVE, Head, PerSampleLoss, base_model, head_of
from hf_private.synthetic import TOKEN_HEADS, perturb, synthetic_batch, widen

V, H, B, T = 60, 16, 4, 7
SIZE = {"hidden_size": H, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": V}
CLOSE = {"rtol": 1e-6, "atol": 1e-6, "check_dtype": False}  # some of Transformers' losses round float64 to float32
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(**kw):
    return hf.BertConfig(**SIZE, **DRY, max_position_embeddings=32, num_labels=kw.pop("num_labels", 3), **kw)


def roberta(**kw):
    return hf.RobertaConfig(**SIZE, **DRY, max_position_embeddings=12, type_vocab_size=1, num_labels=3, **kw)


def distilbert(**kw):
    return hf.DistilBertConfig(dim=H, n_heads=2, n_layers=2, hidden_dim=24, vocab_size=V, dropout=0.0, **kw)


def gpt2(**kw):
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
    size = {"n_embd": H, "n_head": 2, "n_layer": 2, "n_positions": 32, "vocab_size": V, "num_labels": 3}
    return hf.GPT2Config(**size, **off, bos_token_id=1, eos_token_id=1, **kw)


def llama(**kw):
    return hf.LlamaConfig(**SIZE, num_key_value_heads=1, pad_token_id=0, num_labels=3, **kw)


def t5():
    size = {"d_model": H, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": V, "num_labels": 3}
    return hf.T5Config(**size, dropout_rate=0.0, classifier_dropout=0.0, decoder_start_token_id=0)


def bart():
    size = {"d_model": H, "vocab_size": V, "max_position_embeddings": 32, "num_labels": 3, "dropout": 0.0}
    sides = {f"{s}_{k}": v for s in ("encoder", "decoder") for k, v in (("layers", 2), ("ffn_dim", 24))}
    return hf.BartConfig(**size, **sides, encoder_attention_heads=2, decoder_attention_heads=2)


def modernbert(**kw):
    special = {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    return hf.ModernBertConfig(**SIZE, **special, num_labels=3, attention_dropout=0.0, local_attention=4, **kw)


def vit(**kw):
    size = {k: v for k, v in SIZE.items() if k != "vocab_size"}
    return hf.ViTConfig(**size, **DRY, image_size=8, patch_size=4, num_labels=kw.pop("num_labels", 3), **kw)


def resnet():
    return hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=3)


def mixtral(**kw):
    kw["experts_implementation"] = "eager"  # the others have no float64
    return hf.MixtralConfig(**SIZE, num_key_value_heads=1, num_local_experts=2, pad_token_id=0, **kw)


CASES = {
    "bert-cls": (hf.BertForSequenceClassification, bert),
    "bert-regression": (hf.BertForSequenceClassification, lambda: bert(num_labels=1)),
    "bert-regression-3": (hf.BertForSequenceClassification, lambda: bert(problem_type="regression")),
    "bert-multi": (hf.BertForSequenceClassification, lambda: bert(problem_type="multi_label_classification")),
    "bert-token": (hf.BertForTokenClassification, bert),
    "bert-qa": (hf.BertForQuestionAnswering, lambda: bert(num_labels=2)),
    "bert-mlm": (hf.BertForMaskedLM, bert),
    "bert-choice": (hf.BertForMultipleChoice, bert),
    "bert-lm": (hf.BertLMHeadModel, lambda: bert(is_decoder=True)),
    "roberta-cls": (hf.RobertaForSequenceClassification, roberta),
    "roberta-mlm": (hf.RobertaForMaskedLM, roberta),
    "distilbert-cls": (hf.DistilBertForSequenceClassification, lambda: distilbert(num_labels=3)),
    "distilbert-qa": (hf.DistilBertForQuestionAnswering, distilbert),
    "distilbert-choice": (hf.DistilBertForMultipleChoice, distilbert),
    "modernbert-mlm": (hf.ModernBertForMaskedLM, modernbert),
    "modernbert-cls": (hf.ModernBertForSequenceClassification, modernbert),
    "gpt2-lm": (hf.GPT2LMHeadModel, gpt2),
    "gpt2-cls": (hf.GPT2ForSequenceClassification, lambda: gpt2(pad_token_id=0)),
    "llama-lm": (hf.LlamaForCausalLM, llama),
    "llama-cls": (hf.LlamaForSequenceClassification, llama),
    "llama-token": (hf.LlamaForTokenClassification, llama),
    "llama-qa": (hf.LlamaForQuestionAnswering, llama),
    "mixtral-lm": (hf.MixtralForCausalLM, mixtral),
    "t5-seq2seq": (hf.T5ForConditionalGeneration, t5),
    "t5-cls": (hf.T5ForSequenceClassification, t5),
    "bart-seq2seq": (hf.BartForConditionalGeneration, bart),
    "bart-cls": (hf.BartForSequenceClassification, bart),
    "bart-qa": (hf.BartForQuestionAnswering, bart),
    "vit-image": (hf.ViTForImageClassification, vit),
    "vit-regression": (hf.ViTForImageClassification, lambda: vit(num_labels=1)),
    "resnet-image": (hf.ResNetForImageClassification, resnet),
}
QA = [name for name in CASES if name.endswith("-qa")]
TEXT = [name for name in CASES if "image" not in name and not name.startswith("vit")]
TOKENS = [name for name in CASES if name.split("-")[1] in ("token", "mlm", "lm", "seq2seq")]


def make(name: str) -> nn.Module:
    """A tiny float64 model, in eval mode so that BatchNorm keeps records apart."""
    cls, config = CASES[name]
    torch.manual_seed(0)
    return cls(config()).double().eval()


def draw(model: nn.Module, seed: int = 0, batch_size: int = B) -> dict[str, Tensor]:
    return synthetic_batch(model, batch_size, T, torch.Generator().manual_seed(seed))


def double(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, grads, strict=True)]
    )


def weights(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """How much of the batch each record is in Transformers' mean: its labelled tokens, or 1."""
    labels = batch.get("labels")
    if head_of(model) not in TOKEN_HEADS:
        return torch.ones(B)
    return (labels[:, 1:] if head_of(model) is Head.CAUSAL_LM else labels).ne(IGNORE_INDEX).sum(-1).double()


def unpadded(batch: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """The record alone, without padding."""
    one = {name: value[row : row + 1] for name, value in batch.items()}
    size = int(one["attention_mask"].sum(-1).max())
    return {k: v[..., :size] if k in ("input_ids", "attention_mask", "token_type_ids") else v for k, v in one.items()}


# Equal to Transformers


@pytest.mark.parametrize("name", CASES)
def test_equals_the_loss_of_transformers_up_to_normalisation(name: str) -> None:
    model = make(name)
    batch = double(draw(model))
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


@pytest.mark.parametrize("name", CASES)
def test_a_record_alone_has_the_loss_of_transformers(name: str) -> None:
    """Padding invariance: in a batch, and alone without padding, the same loss; and that is Transformers' loss."""
    model = make(name)
    batch = double(draw(model))
    losses = PerSampleLoss(model)(model, batch)
    for row in range(B):
        one = {k: v[row : row + 1] for k, v in batch.items()}
        if name in TEXT:
            one = unpadded(batch, row)
            if head_of(model) in (Head.CAUSAL_LM, Head.MASKED_LM, Head.TOKEN_CLASSIFICATION):
                one["labels"] = one["labels"][:, : one["input_ids"].shape[1]]
        theirs = model(**one).loss
        torch.testing.assert_close(losses[row], theirs, **CLOSE)


def test_question_answering_positions_outside_the_record_do_not_count() -> None:
    model = make("bert-qa")
    batch = draw(model)
    row = 1
    size = int(batch["attention_mask"][row].sum())
    assert size < T
    for beyond in (size, T, T + 5):
        batch["start_positions"][row] = batch["end_positions"][row] = beyond
        losses = PerSampleLoss(model)(model, batch)
        assert losses[row] == 0 and losses.isfinite().all()
        assert gradient(model, losses[row]).eq(0).all()


def test_shift_labels_are_honoured() -> None:
    model = make("llama-lm")
    batch = draw(model)
    expected = PerSampleLoss(model)(model, batch)
    labels = batch.pop("labels")
    batch["shift_labels"] = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    torch.testing.assert_close(PerSampleLoss(model)(model, batch), expected)
    batch["shift_labels"] = batch["shift_labels"].roll(1, dims=0)
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    assert not torch.allclose(PerSampleLoss(model)(model, batch), expected)


@pytest.mark.parametrize("alias", ["label", "label_ids"])
def test_label_aliases(alias: str) -> None:
    model = make("bert-cls")
    batch = draw(model)
    expected = PerSampleLoss(model)(model, batch)
    batch[alias] = batch.pop("labels")
    torch.testing.assert_close(PerSampleLoss(model)(model, batch), expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_problem_type_follows_the_dtype_and_is_not_written(dtype: torch.dtype) -> None:
    model = make("bert-cls")
    batch = double(draw(model))
    batch["labels"] = torch.eye(3)[batch["labels"]].double() if dtype is torch.float32 else batch["labels"].to(dtype)
    losses = PerSampleLoss(model)(model, batch)
    assert model.config.problem_type is None
    if dtype is not torch.int32:  # torch's cross entropy wants int64
        torch.testing.assert_close(losses.mean(), model(**batch).loss)


@pytest.mark.parametrize("name", ["bert-cls", "bert-mlm", "gpt2-lm", "t5-seq2seq", "bert-choice"])
def test_label_smoothing_is_that_of_transformers(name: str) -> None:
    model = make(name)
    batch = draw(model)
    losses = PerSampleLoss(model, label_smoothing=0.2)(model, batch)
    share = weights(model, batch)
    theirs = LabelSmoother(0.2)(model(**batch), batch["labels"], shift_labels=head_of(model) is Head.CAUSAL_LM)
    torch.testing.assert_close((losses * share).sum() / share.sum(), theirs, **CLOSE)
    assert not torch.allclose(losses, PerSampleLoss(model)(model, batch))


@pytest.mark.parametrize("name", ["gpt2-lm", "bert-cls", "bert-qa", "vit-image"])
def test_half_precision_is_lifted(name: str) -> None:
    model = make(name).bfloat16()
    batch = draw(model)
    losses = PerSampleLoss(model)(model, batch)
    assert losses.dtype is torch.float32
    if name == "gpt2-lm":
        share = weights(model, batch)
        torch.testing.assert_close(((losses * share).sum() / share.sum()).float(), model(**batch).loss)


def test_logits_are_not_copied() -> None:
    """The peak of the loss is the log-softmax of the logits and nothing else of that size."""
    model = make("gpt2-lm").float()
    batch = draw(model)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        PerSampleLoss(model)(model, batch)
    large = {t.untyped_storage().data_ptr() for t in kept if t.numel() == B * T * V}
    assert len(large) == 1


# Independent of neighbours


@pytest.mark.parametrize("name", CASES)
def test_a_neighbour_changes_nothing(name: str) -> None:
    """Another record's content, length and labels move its own loss and the mean of Transformers, but no other's."""
    model = make(name)
    batch = double(draw(model))
    other = double(perturb(model, batch, row=1, generator=torch.Generator().manual_seed(5)))
    loss = PerSampleLoss(model)
    before, after = loss(model, batch), loss(model, other)
    rest = [0, 2, 3]
    torch.testing.assert_close(after[rest], before[rest], rtol=1e-9, atol=1e-12)
    assert abs(after[1] - before[1]) > 1e-4
    for row in rest:
        torch.testing.assert_close(gradient(model, after[row]), gradient(model, before[row]), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", TEXT)
def test_padding_changes_nothing(name: str) -> None:
    """A longer neighbour only adds padding: loss and gradient of every record stay."""
    model = make(name)
    batch = double(draw(model))
    wide = widen(model, batch, columns=3)
    assert wide["input_ids"].shape[-1] == T + 3
    loss = PerSampleLoss(model)
    before, after = loss(model, batch), loss(model, wide)
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient(model, after[1]), gradient(model, before[1]), rtol=1e-7, atol=1e-10)
    if name in QA:
        assert abs(model(**wide).loss - model(**batch).loss) > 1e-3  # control: theirs feels the padding


def test_control_a_model_that_mixes_padding_in_is_seen() -> None:
    sizes = {k: v for k, v in SIZE.items() if k != "num_attention_heads"}
    model = hf.FNetForSequenceClassification(hf.FNetConfig(**sizes)).eval()
    batch = draw(model)
    loss = PerSampleLoss(model)
    assert not torch.allclose(loss(model, widen(model, batch, 3)), loss(model, batch), rtol=1e-3)


@pytest.mark.parametrize("name", TOKENS)
def test_control_the_loss_of_transformers_couples_records(name: str) -> None:
    """Record 0's share of Transformers' gradient moves with the number of its neighbour's labels; ours does not."""
    model = make(name)
    batch = draw(model)
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
    batch = draw(model)
    batch["labels"][2] = IGNORE_INDEX
    losses = PerSampleLoss(model)(model, batch)
    assert losses[2] == 0 and losses.isfinite().all() and losses.requires_grad
    assert gradient(model, losses[2]).eq(0).all()
    assert gradient(model, losses.sum()).isfinite().all()
    batch["labels"][:] = IGNORE_INDEX
    assert gradient(model, PerSampleLoss(model)(model, batch).sum()).eq(0).all()


# The model's own loss and cache


@pytest.mark.parametrize("name", CASES)
def test_the_forward_gets_no_labels_and_no_cache(name: str) -> None:
    model = make(name)
    seen = {}
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    outputs = []
    model.register_forward_hook(lambda module, args, output: outputs.append(output))
    batch = draw(model)
    keys = set(batch)
    PerSampleLoss(model)(model, double(batch))
    assert set(batch) == keys
    assert not {"labels", "start_positions", "end_positions"} & seen.keys() and seen["return_dict"] is True
    assert "loss" not in outputs[0] and outputs[0].get("past_key_values") is None


def test_tuples_are_not_returned_even_if_configured() -> None:
    model = make("bert-cls")
    model.config.return_dict = False
    assert PerSampleLoss(model)(model, draw(model)).shape == (B,)


@pytest.mark.parametrize("name", ["bert-cls", "gpt2-lm", "t5-seq2seq", "bert-token", "bert-qa", "vit-image"])
def test_peft_models_are_known_by_their_base(name: str) -> None:
    tasks = {
        "cls": "SEQ_CLS",
        "lm": "CAUSAL_LM",
        "seq2seq": "SEQ_2_SEQ_LM",
        "token": "TOKEN_CLS",
        "qa": "QUESTION_ANS",
    }
    plain = make(name)
    batch = double(draw(plain))
    batch.pop("token_type_ids", None)  # PEFT's question answering drops them
    expected = PerSampleLoss(plain)(plain, batch)
    targets = {"gpt2": ["c_attn"], "t5": ["q", "v"], "vit": ["q_proj", "v_proj"]}.get(name.split("-")[0], ["query"])
    config = LoraConfig(r=2, target_modules=targets, task_type=tasks.get(name.split("-")[1]))
    model = get_peft_model(plain, config).double().eval()
    assert base_model(model) is plain
    losses = PerSampleLoss(model)(model, batch)
    torch.testing.assert_close(losses, expected)  # an adapter is zero at the start
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert any(g is not None and g.ne(0).any() for g in torch.autograd.grad(losses[0], adapters, allow_unused=True))


def test_subclasses_are_known_by_their_parents() -> None:
    class Mine(hf.BertForTokenClassification):
        pass

    assert head_of(Mine(bert())) is Head.TOKEN_CLASSIFICATION


# Custom losses


def test_custom_loss_gets_the_label_tensor() -> None:
    model = make("bert-cls")
    batch = draw(model)

    def loss(outputs, labels):
        return nn.functional.cross_entropy(outputs.logits, labels, reduction="none")

    torch.testing.assert_close(PerSampleLoss(model, custom=loss)(model, batch), PerSampleLoss(model)(model, batch))


def test_custom_loss_gets_a_dict_of_several_labels() -> None:
    model = make("bert-qa")
    batch = draw(model)

    def loss(outputs, labels):
        assert set(labels) == {"start_positions", "end_positions"}
        return outputs.start_logits.gather(1, labels["start_positions"][:, None])[:, 0]

    assert PerSampleLoss(model, custom=loss)(model, batch).shape == (B,)


def test_custom_loss_on_seq2seq_and_on_an_unknown_model() -> None:
    model = make("t5-seq2seq")
    expected = model(**draw(model)).logits.mean((1, 2))
    custom = PerSampleLoss(model, custom=lambda outputs, labels: outputs.logits.mean((1, 2)))
    torch.testing.assert_close(custom(model, draw(model)), expected)

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
        (torch.zeros(()), r"shape \(4,\).*got shape \(\)"),
        (torch.zeros(4, 1), r"got shape \(4, 1\)"),
        (1.0, "got float"),
    ],
)
def test_custom_loss_of_a_wrong_shape(returned: object, message: str) -> None:
    model = make("bert-cls")
    with pytest.raises(ValueError, match=message):
        PerSampleLoss(model, custom=lambda outputs, labels: returned)(model, draw(model))


# Refusals: models


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: hf.BertForPreTraining(bert()), "got BertForPreTraining.*per_sample_loss=fn"),
        (lambda: hf.BertModel(bert()), "got BertModel.*per_sample_loss=fn"),
        (lambda: hf.BartForCausalLM(bart()), "got BartForCausalLM.*per_sample_loss=fn"),
        (lambda: hf.MixtralForCausalLM(mixtral(output_router_logits=True)), "`output_router_logits`.*Mixtral"),
        (lambda: hf.ModernBertForMaskedLM(modernbert(sparse_prediction=True)), "`sparse_prediction`.*ModernBert"),
        (
            lambda: hf.SwitchTransformersForConditionalGeneration(
                hf.SwitchTransformersConfig(d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, vocab_size=9)
            ),
            "expert_capacity",
        ),
    ],
)
def test_models_that_are_refused(model, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerSampleLoss(model())


def test_a_replaced_loss_function_is_refused() -> None:
    model = make("llama-lm")
    model.loss_function = lambda **kw: 0.0
    with pytest.raises(ValueError, match="loss_function.*LlamaForCausalLM.*per_sample_loss=fn"):
        PerSampleLoss(model)
    assert PerSampleLoss(model, custom=lambda outputs, labels: outputs.logits.mean((1, 2))).head is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bert-cls", {"label_smoothing": 1.0}, "`label_smoothing` must be >= 0 and < 1, got 1.0"),
        ("bert-cls", {"label_smoothing": -0.1}, "got -0.1"),
        ("bert-qa", {"label_smoothing": 0.1}, "question answering, got 0.1"),
        ("bert-cls", {"label_smoothing": 0.1, "custom": max}, "`per_sample_loss`, got 0.1"),
    ],
)
def test_wrong_options(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerSampleLoss(make(name), **options)


@pytest.mark.parametrize("name", ["bert-regression", "bert-multi"])
def test_label_smoothing_needs_exclusive_classes(name: str) -> None:
    model = make(name)
    with pytest.raises(ValueError, match="`label_smoothing` must be 0 for"):
        PerSampleLoss(model, label_smoothing=0.1)(model, draw(model))


def test_causal_models_that_do_not_shift_are_listed() -> None:
    """Whatever computes its causal loss by itself, without a shift, must be refused: read from the sources."""
    unshifted = set()
    for name in HEAD_CLASSES[Head.CAUSAL_LM]:
        cls = getattr(hf, name, None)
        if cls is not None and "CrossEntropyLoss()" in (source := inspect.getsource(cls.forward)):
            if ":-1" not in source:
                unshifted.add(name)
    assert unshifted and unshifted <= OTHER_OBJECTIVE
    assert OTHER_OBJECTIVE <= set().union(*HEAD_CLASSES.values())


# Refusals: batches


def left_padded(batch: dict[str, Tensor]) -> None:
    batch["attention_mask"] = batch["attention_mask"].flip(-1)
    batch["labels"] = batch["labels"].flip(-1) if batch["labels"].ndim > 1 else batch["labels"]


def block_mask(batch: dict[str, Tensor]) -> None:
    batch["attention_mask"] = torch.ones(B, 1, T, T)


def labelled_padding(batch: dict[str, Tensor]) -> None:
    batch["labels"] = batch["input_ids"].clone()


def restarting(batch: dict[str, Tensor]) -> None:
    batch["position_ids"] = torch.tensor([0, 1, 2, 0, 1, 2, 3]).expand(B, T)


def no_mask(batch: dict[str, Tensor]) -> None:
    batch.pop("attention_mask")


def no_mask_left(batch: dict[str, Tensor]) -> None:
    batch.pop("attention_mask")
    batch["input_ids"] = batch["input_ids"].flip(-1)


def left_targets(batch: dict[str, Tensor]) -> None:
    batch["labels"] = batch["labels"].flip(-1)


def padded_targets(batch: dict[str, Tensor]) -> None:
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == IGNORE_INDEX, 0)


def no_labels(batch: dict[str, Tensor]) -> None:
    batch.pop("labels")


def key(name: str, value: object = 1):
    return lambda batch: batch.update({name: value})


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("gpt2-lm", left_padded, "`attention_mask` must be padded on the right.*padding_side = 'right'"),
        ("bert-cls", left_padded, "`attention_mask` must be padded on the right"),
        ("bert-choice", left_padded, "`attention_mask` must be padded on the right"),
        ("llama-lm", block_mask, r"one entry per token, got \(4, 1, 7, 7\)"),
        ("llama-lm", labelled_padding, "-100 at padding tokens"),
        ("bert-mlm", labelled_padding, "-100 at padding tokens"),
        ("llama-lm", restarting, "`position_ids` must rise.*packed"),
        ("bert-cls", no_mask, "`attention_mask` must be given"),
        ("llama-lm", no_mask_left, "`attention_mask` must be given"),
        ("t5-seq2seq", left_targets, "`labels` must be padded on the right"),
        ("t5-seq2seq", padded_targets, "`labels` must be padded with -100, got pad_token_id=0"),
        ("bert-cls", no_labels, r"must hold labels.*got only \['attention_mask', 'input_ids', 'token_type_ids'\]"),
        ("llama-lm", key("cu_seq_lens_q"), "packed sequences ..'cu_seq_lens_q'"),
        ("llama-lm", key("seq_idx"), "packed sequences ..'seq_idx'"),
        ("llama-lm", key("max_length_k"), "packed sequences ..'max_length_k'"),
        ("mixtral-lm", key("output_router_logits", True), "`output_router_logits` must be False"),
        ("bert-cls", key("label", torch.zeros(4)), r"`labels` once.*got \['label', 'labels'\]"),
        ("bert-cls", key("labels", torch.zeros(4, 3).long()), r"one class per record.*got \(4, 3\)"),
        ("bert-multi", key("labels", torch.zeros(4)), r"must have the shape \(4, 3\).*got \(4,\)"),
        (
            "bert-token",
            key("labels", torch.zeros(4).long()),
            r"must have the shape \(4, 7\) of the logits, got \(4,\)",
        ),
        ("bert-qa", key("end_positions", None), "start_positions and end_positions, got .'start_positions'"),
    ],
)
def test_batches_that_are_refused(name: str, spoil, message: str) -> None:
    model = make(name)
    batch = draw(model)
    PerSampleLoss(model)(model, batch)
    spoil(batch)
    with pytest.raises(ValueError, match=message):
        PerSampleLoss(model)(model, batch)


def test_flattened_batches_are_refused() -> None:
    model = make("llama-lm")
    features = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    for kw in ({}, {"return_position_ids": False, "return_flash_attn_kwargs": True}):
        batch = hf.DataCollatorWithFlattening(return_tensors="pt", **kw)(features)
        with pytest.raises(ValueError, match="packed sequences"):
            PerSampleLoss(model)(model, batch)


def test_right_padding_without_a_mask_is_harmless_for_causal_models() -> None:
    model = make("llama-lm")
    batch = draw(model)
    expected = PerSampleLoss(model)(model, batch)
    batch.pop("attention_mask")
    torch.testing.assert_close(PerSampleLoss(model)(model, batch), expected)


def test_rising_positions_are_welcome() -> None:
    model = make("llama-lm")
    batch = draw(model)
    expected = PerSampleLoss(model)(model, batch)
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    torch.testing.assert_close(PerSampleLoss(model)(model, batch), expected)


def test_prompt_tuning_is_refused_where_it_lengthens_the_logits() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = get_peft_model(hf.GPT2LMHeadModel(gpt2()), config)
    with pytest.raises(ValueError, match=r"\(4, 9\) of the logits, got \(4, 7\).*Prompt tuning"):
        PerSampleLoss(model)(model, draw(model))


# Synthetic batches


@pytest.mark.parametrize("name", CASES)
def test_synthetic_batches_are_valid_different_and_public(name: str) -> None:
    model = make(name)
    batch = draw(model)
    for key_, value in draw(model).items():
        assert torch.equal(value, batch[key_])
    state = torch.random.get_rng_state()
    assert not all(torch.equal(v, batch[k]) for k, v in draw(model, seed=1).items())
    assert torch.equal(torch.random.get_rng_state(), state)
    if name in TEXT:
        sizes = batch["attention_mask"].sum(-1)
        assert sizes[0].eq(T).all() and sizes[1].lt(T).all()
        assert len(batch["input_ids"].flatten(1).unique(dim=0)) == B
        assert ("token_type_ids" in batch) == name.startswith("bert")
    else:
        assert batch["pixel_values"].dtype is torch.float64


@pytest.mark.parametrize("name", CASES)
def test_perturb_moves_one_row(name: str) -> None:
    model = make(name)
    batch = draw(model)
    copied = {k: v.clone() for k, v in batch.items()}
    other = perturb(model, batch, row=2)
    main = model.main_input_name
    assert all(torch.equal(v, copied[k]) for k, v in batch.items()) and other.keys() == batch.keys()
    assert (other[main] != batch[main]).flatten(1).any(-1).tolist() == [False, False, True, False]
    for k in batch:
        assert torch.equal(other[k][[0, 1, 3]], batch[k][[0, 1, 3]])


def test_images_cannot_be_widened() -> None:
    model = make("vit-image")
    batch = draw(model)
    assert all(torch.equal(v, batch[k]) for k, v in widen(model, batch, 3).items())


def test_positions_bound_the_length() -> None:
    model = make("roberta-cls")  # 12 positions, of which the first two belong to padding
    batch = synthetic_batch(model, 3, 50)
    assert batch["input_ids"].shape == (3, 10)
    assert PerSampleLoss(model)(model, batch).isfinite().all()


def test_synthetic_batches_of_length_1_and_of_one_record() -> None:
    model = make("gpt2-lm")
    assert synthetic_batch(model, 1, 1)["attention_mask"].all()
    with pytest.raises(ValueError, match="`length` must allow 60 different rows, got 1"):
        synthetic_batch(model, 60, 1)
    with pytest.raises(ValueError, match="`batch_size` must be"):
        synthetic_batch(model, 0, 5)
