"""`train_only`: which parameters a preset trains, what the card says, and which models it refuses."""

import pytest
import transformers as hf
from peft import LoraConfig, get_peft_model

from hf_private.config import TRAIN_ONLY, DPConfig
from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.method import Full
from hf_private.methods.presets import PRESETS
from hf_private.methods.registry import describe_method, resolve_method
from tests.support import training, zoo


def build(name):
    return zoo.build(name)[0]


def trained(model, preset):
    assert type(resolve_method(None, model, train_only=preset)) is Full
    return set(trainable(model))


def lora(**settings):
    return get_peft_model(
        build("bert"), LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"], **settings)
    )


def test_config_names_the_presets():
    assert tuple(PRESETS) == TRAIN_ONLY


def test_bias_means_biases_and_the_head():
    names = trained(build("bert"), "bias")
    assert {"classifier.weight", "classifier.bias", "bert.embeddings.LayerNorm.bias"} <= names
    assert all(name.endswith("bias") or name.startswith("classifier") for name in names) and len(names) > 10


@pytest.mark.parametrize(("name", "head"), [("bert", "classifier."), ("vit", "classifier."), ("llama", "lm_head.")])
def test_head_means_the_head(name, head):
    names = trained(build(name), "head")
    assert names and all(found.startswith(head) for found in names)


@pytest.mark.parametrize(
    ("name", "layer", "after"),
    [
        ("bert", "bert.encoder.layer.1.", {"bert.pooler.dense.weight", "classifier.weight"}),
        ("llama", "model.layers.1.", {"model.norm.weight", "lm_head.weight"}),
        ("gpt2-untied", "transformer.h.1.", {"transformer.ln_f.weight", "lm_head.weight"}),
    ],
)
def test_the_upper_half_is_that_of_the_layers_and_what_comes_after(name, layer, after):
    model = build(name)
    everything = set(trainable(model))
    names = trained(model, "upper-half")
    assert after <= names and {found for found in everything if found.startswith(layer)} <= names
    assert not any("embeddings" in found or "wte" in found or ".0." in found for found in names)


def test_of_an_odd_number_of_layers_the_middle_one_is_trained():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    model = hf.BertForSequenceClassification(hf.BertConfig(num_hidden_layers=3, **sizes))
    names = trained(model, "upper-half")
    assert {found.split(".")[3] for found in names if ".layer." in found} == {"1", "2"}


def test_lora_b_freezes_a_and_nothing_else():
    model = lora()
    before = set(trainable(model))
    names = trained(model, "lora-B")
    assert before - names == {found for found in before if ".lora_A." in found} and len(before - names) == 2
    assert any("modules_to_save" in found for found in names) and any(".lora_B." in found for found in names)


def test_what_was_frozen_stays_frozen_and_a_second_run_changes_nothing():
    model = build("bert")
    model.bert.encoder.layer[1].attention.requires_grad_(False)
    names = trained(model, "upper-half")
    assert not any("layer.1.attention" in found for found in names)
    assert trained(model, "upper-half") == names


@pytest.mark.parametrize(
    ("preset", "name"),
    [("bias", "llama"), ("head", "gpt2"), ("upper-half", "gpt2"), ("upper-half", "t5"), ("lora-B", "bert")],
)
def test_models_that_a_preset_does_not_fit_are_refused_as_they_were(preset, name):
    model = build(name)
    with pytest.raises(ValueError, match=f"`train_only`.*{preset}" if preset == "lora-B" else "`train_only`.*got"):
        resolve_method(None, model, train_only=preset)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("preset", ["bias", "head", "upper-half"])
def test_adapters_say_themselves_what_they_train(preset):
    with pytest.raises(ValueError, match=f"`train_only`.*{preset}"):
        resolve_method(None, lora(), train_only=preset)


def test_the_card_says_what_was_trained():
    assert describe_method({"train_only": "bias"}).endswith("on biases and the task head (BiTFiT)")
    assert "BiTFiT" not in describe_method({})
    assert "upper half" in describe_method({"train_only": "upper-half"})
    assert describe_method({"train_only": "lora-B"}, peft="LORA").endswith("B (FFA-LoRA) of a LoRA adapter")
    assert describe_method({}, peft="LORA").endswith("(BK) on a LoRA adapter")


def test_a_trainer_moves_what_the_preset_names_only(tmp_path):
    model = lora()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = training.trainer(tmp_path, model, dp={"train_only": "lora-B", "disjoint_data": True}, max_steps=2)
    trainer.train()
    moved = {name for name, p in model.named_parameters() if not p.equal(before[name])}
    assert moved == set(trainable(model)) and not any("lora_A" in name for name in moved)


def test_carriers_have_targets_of_their_own():
    with pytest.raises(ValueError, match="`train_only`.*`target_modules`"):
        DPConfig(target_epsilon=8.0, carriers={"r": 8}, train_only="head")
