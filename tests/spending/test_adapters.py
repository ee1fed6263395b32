"""Promise 1 for adapters: exact in batches, or exact alone and refused by name in a batch."""

import pytest
import torch
from peft import (
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)

from hf_private.gradients.bookkeeper import BookKeeper, trainable
from hf_private.gradients.layers import UncoveredError
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


PROMPT = dict(num_virtual_tokens=3, encoder_hidden_size=8)
NAMES = {"bert": ["query", "value"], "llama": ["q_proj", "down_proj"]}


@pytest.mark.parametrize("kind", ["dora", "vera", "lokr", "prompt", "p-tuning", "p-tuning with an LSTM"])
@pytest.mark.parametrize("name", NAMES)
def test_adapters_that_compute_their_weights_are_exact_in_batches(name, kind):
    task, names = ("SEQ_CLS" if name == "bert" else "CAUSAL_LM"), NAMES[name]
    config = {
        "dora": LoraConfig(r=2, target_modules=names, use_dora=True),
        "vera": VeraConfig(r=2, target_modules=names),
        "lokr": LoKrConfig(r=2, target_modules=names),
        "prompt": PromptTuningConfig(task_type=task, num_virtual_tokens=3),
        "p-tuning": PromptEncoderConfig(task_type=task, **PROMPT),
        "p-tuning with an LSTM": PromptEncoderConfig(task_type=task, encoder_reparameterization_type="LSTM", **PROMPT),
    }[kind]
    model = get_peft_model(zoo.make(name), config).double().eval()
    for p in trainable(model).values():
        p.data.add_(0.1 * torch.randn_like(p))
    loss = zoo.loss_of(model)
    for size, length in ((1, 7), (4, 8), (3, 7)):
        assert_exact(model, loss, zoo.make_batch(model, size, length))


@pytest.mark.parametrize("kind", ["oft", "loha"])
def test_adapters_with_functions_of_their_own_are_exact_alone_and_refused_by_name_in_a_batch(kind):
    """OFT writes its weights into an empty matrix; LoHa has a gradient of its own."""
    names = NAMES["llama"]
    config = (
        OFTConfig(r=0, oft_block_size=4, target_modules=names)
        if kind == "oft"
        else LoHaConfig(r=2, target_modules=names)
    )
    model = get_peft_model(zoo.make("llama"), config).double().eval()
    for p in trainable(model).values():
        p.data.add_(0.1 * torch.randn_like(p))
    loss = zoo.loss_of(model)
    assert_exact(model, loss, zoo.make_batch(model, batch_size=1))
    with (
        pytest.raises(UncoveredError, match=r"^`base_model.*(oft_R|hada_w1_a).*Remedy"),
        BookKeeper(model) as book,
    ):
        book.backward(loss(model, zoo.make_batch(model, batch_size=3)))


def test_the_loss_behind_a_prompt_is_that_of_peft():
    model = get_peft_model(zoo.make("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    batch = zoo.make_batch(model.double(), batch_size=1)
    torch.testing.assert_close(zoo.loss_of(model)(model, batch)[0].float(), model(**batch).loss.float())
