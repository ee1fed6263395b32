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
        (lambda: hf.BertForPreTraining(config("bert")), "got BertForPreTraining.*per_sample_loss=fn"),
        (lambda: hf.BertModel(config("bert")), "got BertModel.*per_sample_loss=fn"),
        (lambda: hf.BartForCausalLM(config("bart")), "got BartForCausalLM.*per_sample_loss=fn"),
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
            "expert_capacity",
        ),
    ],
)
def test_models_that_are_refused(model, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerSampleLoss(model())


def test_a_replaced_loss_function_is_refused() -> None:
    model = make("llama")
    model.loss_function = lambda **kw: 0.0
    with pytest.raises(ValueError, match="loss_function.*LlamaForCausalLM.*per_sample_loss=fn"):
        PerSampleLoss(model)
    assert PerSampleLoss(model, custom=lambda outputs, labels: outputs.logits.mean((1, 2))).head is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bert", {"label_smoothing": 1.0}, "`label_smoothing` must be >= 0 and < 1, got 1.0"),
        ("bert", {"label_smoothing": -0.1}, "got -0.1"),
        ("bert-qa", {"label_smoothing": 0.1}, "question answering, got 0.1"),
        ("bert", {"label_smoothing": 0.1, "custom": max}, "`per_sample_loss`, got 0.1"),
    ],
)
def test_wrong_options(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerSampleLoss(make(name), **options)


@pytest.mark.parametrize("name", ["bert-regression", "bert-multi"])
def test_label_smoothing_needs_exclusive_classes(name: str) -> None:
    model = make(name)
    with pytest.raises(ValueError, match="`label_smoothing` must be 0 for"):
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
        ("gpt2", left_padded, "`attention_mask` must be padded on the right.*padding_side = 'right'"),
        ("bert", left_padded, "`attention_mask` must be padded on the right"),
        ("bert-choice", left_padded, "`attention_mask` must be padded on the right"),
        ("llama", block_mask, r"one entry per token, got \(4, 1, 7, 7\)"),
        ("llama", labelled_padding, "-100 at padding tokens"),
        ("bert-mlm", labelled_padding, "-100 at padding tokens"),
        ("llama", restarting, "`position_ids` must rise.*packed"),
        ("bert", no_mask, "`attention_mask` must be given"),
        ("llama", no_mask_left, "`attention_mask` must be given"),
        ("t5", left_targets, "`labels` must be padded on the right"),
        ("t5", padded_targets, "`labels` must be padded with -100, got pad_token_id=0"),
        ("bert", no_labels, r"must hold labels.*got only \['attention_mask', 'input_ids', 'token_type_ids'\]"),
        ("llama", key("cu_seq_lens_q"), "packed sequences ..'cu_seq_lens_q'"),
        ("llama", key("seq_idx"), "packed sequences ..'seq_idx'"),
        ("llama", key("max_length_k"), "packed sequences ..'max_length_k'"),
        ("mixtral", key("output_router_logits", True), "`output_router_logits` must be False"),
        ("bert", key("label", torch.zeros(4)), r"`labels` once.*got \['label', 'labels'\]"),
        ("bert", key("labels", torch.zeros(4, 3).long()), r"one class per record.*got \(4, 3\)"),
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
        with pytest.raises(ValueError, match="packed sequences"):
            PerSampleLoss(model)(model, batch)


def test_right_padding_without_a_mask_is_harmless_for_causal_models() -> None:
    model = make("llama")
    batch = make_batch(model, B)
    expected = PerSampleLoss(model)(model, batch)
    batch.pop("attention_mask")
    torch.testing.assert_close(PerSampleLoss(model)(model, batch), expected)


def test_rising_positions_are_welcome() -> None:
    model = make("llama")
    batch = make_batch(model, B)
    expected = PerSampleLoss(model)(model, batch)
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    torch.testing.assert_close(PerSampleLoss(model)(model, batch), expected)


def test_prompt_tuning_is_refused_where_it_lengthens_the_logits() -> None:
    tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = get_peft_model(make("gpt2"), tuning)
    with pytest.raises(ValueError, match=r"\(4, 9\) of the logits, got \(4, 7\).*Prompt tuning"):
        PerSampleLoss(model)(model, make_batch(model, B))
