"""Models, options and batches whose loss would not be that of one record each: every refusal."""

import inspect

import pytest
import torch
import transformers as hf
from peft import PromptTuningConfig, get_peft_model
from torch import Tensor

from hf_private.tasks.heads import HEAD_CLASSES, IGNORE_INDEX, OTHER_OBJECTIVE, Head
from hf_private.tasks.losses import PerSampleLoss
from tests.support.zoo import LENGTH as T
from tests.support.zoo import config, make, make_batch

B = 4

# Refusals: models


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: hf.BertForPreTraining(config("bert")), "`model`.*BertForPreTraining.*`per_sample_loss=fn`"),
        (lambda: hf.BertModel(config("bert")), "`model`.*BertModel.*`per_sample_loss=fn`"),
        (lambda: hf.BartForCausalLM(config("bart")), "`model`.*BartForCausalLM.*`per_sample_loss=fn`"),
        (
            lambda: make("mixtral", output_router_logits=True),
            "`output_router_logits`.*Mixtral",
        ),
        (
            lambda: make("modernbert-mlm", sparse_prediction=True),
            "`sparse_prediction`.*ModernBert",
        ),
        (
            lambda: hf.SwitchTransformersForConditionalGeneration(
                hf.SwitchTransformersConfig(d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, vocab_size=9)
            ),
            "`model`.*expert_capacity=64",
        ),
    ],
)
def test_models_without_a_loss_per_record_are_refused(model, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerSampleLoss(model())


def test_a_replaced_loss_function_is_refused() -> None:
    model = make("llama")
    model.loss_function = lambda **kw: 0.0
    with pytest.raises(ValueError, match="`model.loss_function`.*`per_sample_loss=fn`"):
        PerSampleLoss(model)
    assert PerSampleLoss(model, custom=lambda outputs, labels: outputs.logits.mean((1, 2))).head is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bert", {"label_smoothing": 1.0}, "`label_smoothing`.*got 1.0"),
        ("bert", {"label_smoothing": -0.1}, "`label_smoothing`.*got -0.1"),
        ("bert-qa", {"label_smoothing": 0.1}, "`label_smoothing`.*got 0.1"),
        ("bert", {"label_smoothing": 0.1, "custom": max}, "`label_smoothing`.*`per_sample_loss`"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerSampleLoss(make(name), **options)


@pytest.mark.parametrize("name", ["bert-regression", "bert-multi"])
def test_label_smoothing_needs_exclusive_classes(name: str) -> None:
    model = make(name)
    with pytest.raises(ValueError, match="`label_smoothing`.*got 0.1"):
        PerSampleLoss(model, label_smoothing=0.1)(model, make_batch(model, B))


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
        ("gpt2", left_padded, "`attention_mask`.*padding_side"),
        ("bert", left_padded, "`attention_mask`.*padding_side"),
        ("bert-choice", left_padded, "`attention_mask`.*padding_side"),
        ("llama", block_mask, r"`attention_mask`.*got \(4, 1, 7, 7\)"),
        ("llama", labelled_padding, "`labels`.*-100"),
        ("bert-mlm", labelled_padding, "`labels`.*-100"),
        ("llama", restarting, "`position_ids`"),
        ("bert", no_mask, "`attention_mask`.*got none"),
        ("llama", no_mask_left, "`attention_mask`.*got none"),
        ("t5", left_targets, "`labels`.*padding_side"),
        ("t5", padded_targets, "`labels`.*got pad_token_id=0"),
        ("bert", no_labels, r"`batch`.*\['attention_mask', 'input_ids', 'token_type_ids'\]"),
        ("llama", key("cu_seq_lens_q"), "`batch`.*'cu_seq_lens_q'"),
        ("llama", key("seq_idx"), "`batch`.*'seq_idx'"),
        ("llama", key("max_length_k"), "`batch`.*'max_length_k'"),
        ("mixtral", key("output_router_logits", True), "`output_router_logits`.*got True"),
        ("bert", key("label", torch.zeros(4)), r"`labels`.*got \['label', 'labels'\]"),
        ("bert", key("labels", torch.zeros(4, 3).long()), r"`labels`.*got \(4, 3\)"),
        ("bert-multi", key("labels", torch.zeros(4)), r"`labels`.*\(4, 3\).*got \(4,\)"),
        (
            "bert-token",
            key("labels", torch.zeros(4).long()),
            r"`labels`.*\(4, 7\).*got \(4,\)",
        ),
        ("bert-qa", key("end_positions", None), "`batch`.*end_positions.*got .'start_positions'"),
    ],
)
def test_batches_that_are_refused(name: str, spoil, message: str) -> None:
    model = make(name)
    batch = make_batch(model, B)
    PerSampleLoss(model)(model, batch)
    spoil(batch)
    with pytest.raises(ValueError, match=message):
        PerSampleLoss(model)(model, batch)


def test_flattened_batches_are_refused() -> None:
    model = make("llama")
    features = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    for kw in ({}, {"return_position_ids": False, "return_flash_attn_kwargs": True}):
        batch = hf.DataCollatorWithFlattening(return_tensors="pt", **kw)(features)
        with pytest.raises(ValueError, match="`position_ids`|`batch`.*cu_seq_lens"):
            PerSampleLoss(model)(model, batch)


def test_right_padding_without_a_mask_is_harmless_for_causal_models() -> None:
    model = make("llama")
    batch = make_batch(model, B)
    expected = PerSampleLoss(model)(model, batch)
    batch.pop("attention_mask")
    torch.testing.assert_close(PerSampleLoss(model)(model, batch), expected)


def test_increasing_position_ids_are_accepted() -> None:
    model = make("llama")
    batch = make_batch(model, B)
    expected = PerSampleLoss(model)(model, batch)
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    torch.testing.assert_close(PerSampleLoss(model)(model, batch), expected)


def test_prompt_tuning_is_refused_where_it_lengthens_the_logits() -> None:
    tuning = PromptTuningConfig(task_type="TOKEN_CLS", num_virtual_tokens=2)
    model = get_peft_model(make("bert-token"), tuning)
    with pytest.raises(ValueError, match=r"`labels`.*\(4, 9\).*got \(4, 7\)"):
        PerSampleLoss(model)(model, make_batch(model, B))


@pytest.mark.parametrize("name", ["mistral", "gemma2", "modernbert"])
def test_padding_beyond_an_attention_window_is_refused_in_float64(name: str) -> None:
    """Eager attention makes NaN of padding that sees nothing, so a long neighbour would remove a short record."""
    model = make(name)
    model.config._attn_implementation = "eager"
    model.double()
    batch = make_batch(model, batch_size=2)
    wide = {key: x[:, :1].repeat(1, 20) if x.dim() > 1 else x for key, x in batch.items()}
    wide["attention_mask"][1, 2:] = 0
    if wide["labels"].dim() > 1:
        wide["labels"][1, 2:] = IGNORE_INDEX
    with pytest.raises(ValueError, match="`attention_mask`"):
        PerSampleLoss(model)(model, wide)
    narrow = {key: x[:, :4] if x.dim() > 1 else x for key, x in wide.items()} if name != "modernbert" else batch
    assert PerSampleLoss(model)(model, narrow).isfinite().all()
    losses = PerSampleLoss(model.float())(model, wide)
    assert losses.isfinite().all()


def test_a_classifier_that_passes_on_its_own_use_of_a_cache_is_not_told_twice() -> None:
    """T5Gemma's passes `use_cache` to its model, beside the keywords that it was given."""
    sizes = dict(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=24, sliding_window=8,
    )  # fmt: skip
    part = hf.T5GemmaModuleConfig(**sizes)
    model = hf.T5GemmaForSequenceClassification(hf.T5GemmaConfig(encoder=part, decoder=part, num_labels=2))
    batch = {"input_ids": torch.randint(5, 40, (2, 5)), "labels": torch.tensor([0, 1])}
    assert PerSampleLoss(model)(model, batch).shape == (2,)
