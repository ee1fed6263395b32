"""Promise 1 for adapters: LoRA, DoRA, IA3 and prefixes are exact, prompts alone only."""

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

from hf_private.gradients.bookkeeper import BookKeeper, trainable
from tests.support import zoo
from tests.support.oracle import assert_exact

LORA = [name for name in zoo.FAMILIES if name not in ("bert-mlm", "bert-choice")]


@pytest.mark.parametrize("name", LORA)
def test_lora_is_exact(name):
    model, loss = zoo.build(name)
    heads = [head for head in ("classifier", "score") if hasattr(model, head) and name != "distilbert"]
    config = LoraConfig(
        r=2, target_modules="all-linear", lora_dropout=0.0, modules_to_save=heads or None, use_rslora=name == "bert"
    )
    model = get_peft_model(model, config)
    for p in trainable(model).values():
        p.data.add_(0.1 * torch.randn_like(p))
    model.double().eval()
    assert_exact(model, zoo.loss_of(model), zoo.make_batch(model, batch_size=3))


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]),
        PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
        LoraConfig(r=2, target_modules=["word_embeddings", "query"]),
    ],
    ids=["ia3", "prefix", "embedding-lora"],
)
def test_other_adapters_are_exact(config):
    model, _ = zoo.build("bert")
    model = get_peft_model(model, config).double().eval()
    for p in trainable(model).values():
        p.data.add_(0.1 * torch.randn_like(p))
    assert_exact(model, zoo.loss_of(model), zoo.make_batch(model, batch_size=3))


def test_prompt_tuning_is_exact_alone_and_refused_in_a_batch():
    """PEFT looks its prompt up once and repeats it, so the records' gradients are gone before any rule sees them."""
    model, _ = zoo.build("bert")
    model = get_peft_model(model, PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)).double().eval()
    loss = zoo.loss_of(model)
    assert_exact(model, loss, zoo.make_batch(model, batch_size=1))
    with pytest.raises(RuntimeError) as caught, BookKeeper(model) as book:
        book.backward(loss(model, zoo.make_batch(model, batch_size=3)))
    assert "`prompt_encoder.default.embedding`" in caught.value.__notes__[0]


def test_dora_is_exact():
    model, _ = zoo.build("bert")
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["query"], use_dora=True)).double().eval()
    for p in trainable(model).values():
        p.data.add_(0.1 * torch.randn_like(p))
    loss = zoo.loss_of(model)
    for size in (1, 3):
        assert_exact(model, loss, zoo.make_batch(model, batch_size=size))
