"""Which modules a config names, what is frozen, and what users are told when a name is wrong."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.utils import hub

from hf_private.config import DPConfig
from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.method import Full
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.methods.carriers.method import Carriers, Target
from hf_private.methods.gep.config import AnchorConfig
from hf_private.methods.registry import resolve_method
from tests.support import zoo


def resolve(model, **settings):
    return resolve_method(CarrierConfig(**settings), model)


def build(name):
    return zoo.build(name)[0]


def without_numbers(names):
    return {".".join(part for part in name.split(".") if not part.isdigit()) for name in names}


# ---- what is targeted, and what is trained beside it


def test_no_method_is_plain_book_keeping_and_freezes_nothing():
    model = build("bert")
    method = resolve_method(None, model)
    assert type(method) is Full and all(p.requires_grad for p in model.parameters())


def test_all_linear_targets_the_encoder_and_trains_the_head_at_full_rank():
    model = build("bert")
    method = resolve(model, r=2)
    layer = "bert.encoder.layer."
    assert without_numbers(method.targets) == {
        f"{layer}attention.self.query.weight",
        f"{layer}attention.self.key.weight",
        f"{layer}attention.self.value.weight",
        f"{layer}attention.output.dense.weight",
        f"{layer}intermediate.dense.weight",
        f"{layer}output.dense.weight",
        "bert.pooler.dense.weight",
    }
    assert trainable(model).keys() - method.targets.keys() == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("gpt2", set()),  # the head is the embedding
        ("t5", set()),
        ("gpt2-untied", {"lm_head.weight"}),
        ("llama", {"lm_head.weight"}),
        (
            "roberta",
            {
                "classifier.dense.weight",
                "classifier.dense.bias",
                "classifier.out_proj.weight",
                "classifier.out_proj.bias",
            },
        ),
        ("vit", {"classifier.weight", "classifier.bias"}),
    ],
)
def test_heads_outside_the_base_model_are_trained_unless_tied(name, full):
    model = build(name)
    method = resolve(model, r=2)
    assert trainable(model).keys() - method.targets.keys() == full


def test_excluded_heads_are_frozen():
    model = build("roberta")
    resolve(model, r=2, exclude_modules=["classifier"])
    assert trainable(model) and not any(name.startswith("classifier") for name in trainable(model))


def test_a_head_that_is_named_gets_carriers():
    model = build("bert")
    method = resolve(model, r=2, target_modules=["query", "classifier"])
    assert "classifier.weight" in method.targets
    assert trainable(model).keys() - method.targets.keys() == {"classifier.bias"}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"target_modules": ["query"]}, {"0.attention.self.query", "1.attention.self.query"}),
        ({"target_modules": ["query"], "layers_to_transform": [1]}, {"1.attention.self.query"}),
        (
            {"target_modules": ["query"], "layers_to_transform": 0, "layers_pattern": "layer"},
            {"0.attention.self.query"},
        ),
        (
            {"target_modules": r".*\.1\.attention\.self\.(key|value)"},
            {"1.attention.self.key", "1.attention.self.value"},
        ),
        (
            {"target_modules": ["query", "key"], "exclude_modules": ["key"]},
            {"0.attention.self.query", "1.attention.self.query"},
        ),
        ({"layers_to_transform": [0], "exclude_modules": r".*(dense|key|value)"}, {"0.attention.self.query"}),
        ({"target_modules": {"query"}, "modules_to_save": ["bert.encoder.layer.0"]}, {"1.attention.self.query"}),
    ],
)
def test_names_match_as_in_peft(settings, wanted):
    method = resolve(build("bert"), r=2, **settings)
    prefix, suffix = "bert.encoder.layer.", ".weight"
    assert {name.removeprefix(prefix).removesuffix(suffix) for name in method.targets} == wanted


def test_the_same_modules_as_lora_are_targeted():
    for name in ("bert", "gpt2", "llama", "t5", "vit"):
        for targets in ("all-linear", ["c_attn", "query", "q_proj", "q"]):
            model = build(name)
            if targets != "all-linear":
                targets = [t for t in targets if any(path.endswith(f".{t}") for path, _ in model.named_modules())]
            lora = get_peft_model(build(name), LoraConfig(r=1, target_modules=targets, modules_to_save=["classifier"]))
            adapted = {
                n.partition("base_model.model.")[2] for n, _ in lora.named_parameters() if "base_layer.weight" in n
            }
            ours = resolve(model, r=1, target_modules=targets).targets
            assert {n.replace(".base_layer", "") for n in adapted} == set(ours), name


def test_ranks_follow_the_pattern_and_are_capped_by_small_matrices():
    model = build("llama")  # k_proj and v_proj are 8 x 16
    targets = resolve(model, r=12, rank_pattern={r"layers\.0\.mlp\.up_proj": 5, "up_proj": 3}).targets
    assert targets["model.layers.0.self_attn.q_proj.weight"] == Target(12)
    assert targets["model.layers.0.self_attn.k_proj.weight"] == Target(8)
    assert targets["model.layers.0.mlp.up_proj.weight"] == Target(5)
    assert targets["model.layers.1.mlp.up_proj.weight"] == Target(3)


def test_left_means_the_output_side_in_either_layout():
    assert set(resolve(build("bert"), r=2, sides="left").targets.values()) == {Target(2, ("L",))}
    assert set(resolve(build("gpt2"), r=2, sides="left").targets.values()) == {Target(2, ("R",), inputs_first=True)}


def test_biases_are_trained_on_request():
    model = build("bert")
    resolve(model, r=2, bias="all")
    biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    assert len(biases) > 10 and biases <= trainable(model).keys()
    assert "bert.embeddings.LayerNorm.weight" not in trainable(model)


def test_one_name_of_a_tied_weight_means_all():
    for names in ({"modules_to_save": ["lm_head"]}, {"modules_to_save": ["wte"]}):
        model = build("gpt2")
        method = resolve(model, r=2, **names)
        assert trainable(model).keys() - method.targets.keys() == {"transformer.wte.weight"}
    model = build("gpt2")
    assert resolve(model, r=2, target_modules=["lm_head"]).targets.keys() == {"transformer.wte.weight"}


def test_modules_that_share_a_weight_have_one_pair_of_carriers():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    assert resolve(model, r=2, target_modules=["0", "1"]).targets == {"0.weight": Target(2)}
    with pytest.raises(ValueError, match="`rank_pattern`.*`0.weight`"):
        resolve(model, r=2, target_modules=["0", "1"], rank_pattern={"1": 3})


def test_the_seed_is_handed_on():
    assert resolve_method(CarrierConfig(r=2), build("bert"), seed=5).seed == 5


def test_settings_reach_the_method():
    method = resolve(
        build("bert"),
        r=2,
        source="history",
        warmup_steps=3,
        power_iterations=4,
        refresh=5,
        sparsity=0.2,
        sparsity_start=6,
    )
    assert isinstance(method, Carriers)
    found = (method.source, method.warmup_steps, method.power_iterations, method.refresh, method.sparsity)
    assert found == ("history", 3, 4, 5, 0.2) and method.sparsity_start == 6


# ---- warnings about noise


@pytest.fixture
def warnings(caplog):
    # Transformers' loggers do not propagate, so that pytest does not see them by itself
    logger = logging.getLogger("hf_private.methods.carriers.config")
    before = logger.level, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.setLevel(before[0])


def test_a_large_head_at_full_rank_is_pointed_out(warnings):
    resolve(build("llama"), r=1, target_modules=["q_proj"])
    assert "960 of 1,024 noised dimensions" in warnings.text and "`lm_head.weight`" in warnings.text


def test_carriers_with_more_numbers_than_the_weight_are_pointed_out(warnings):
    resolve(build("bert"), r=16)
    assert "`rank_pattern`" in warnings.text
    warnings.clear()
    resolve(build("bert"), r=2)
    assert not warnings.records


# ---- errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, r"`r`.*got 0\."),
        ({"r": 2.5}, r"`r`.*got 2\.5\."),
        ({"r": None}, r"`r`.*got None\. .*`sparsity`"),
        ({"r": None, "sparsity": 0.5, "sides": "left"}, r"`r`"),
        ({"rank_pattern": {"query": 0}}, r"`rank_pattern\['query'\]`.*got 0\."),
        ({"sparsity": 1.0}, r"`sparsity`.*got 1\.0\."),
        ({"sparsity": -0.1}, r"`sparsity`.*got -0\.1\."),
        ({"source": "gradient"}, r"`source`.*got 'gradient'\."),
        ({"sides": "right"}, r"`sides`.*got 'right'\."),
        ({"head_scale": 0}, r"`head_scale`.*got 0\."),
        ({"head_scale": float("inf")}, r"`head_scale`.*got inf\."),
        ({"source": "momentum", "sides": "left"}, r"`sides`.*got 'left'"),
        ({"source": "public", "r": None, "sparsity": 0.5}, r"`source`.*got 'public'\."),
        ({"mask": "rows"}, r"`mask`.*got 'rows'\."),
        ({"mask": "elements"}, r"`mask`.*got 'elements'"),
        ({"bias": "lora_only"}, r"`bias`.*got 'lora_only'\."),
        ({"refresh": 0}, r"`refresh`.*got 0\."),
        ({"power_iterations": 0}, r"`power_iterations`.*got 0\."),
        ({"warmup_steps": -1}, r"`warmup_steps`.*got -1\."),
        ({"target_modules": []}, r"`target_modules`.*got \[\]\."),
        ({"target_modules": [3]}, r"`target_modules`.*got \[3\]\."),
        ({"modules_to_save": "classifier"}, r"`modules_to_save`.*got 'classifier'\."),
        ({"target_modules": ".*q", "layers_to_transform": [0]}, r"`layers_to_transform`"),
        ({"layers_pattern": "layer"}, r"`layers_pattern`.*`layers_to_transform`"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        CarrierConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target_modules": ["qwery"]},
            r"`target_modules`.*got 'qwery'.*'query'",
        ),
        (
            {"target_modules": ["query", "vaule"]},
            r"`target_modules`.*got 'vaule'.*'value'",
        ),
        (
            {"target_modules": r".*\.qwery"},
            r"`target_modules`.*got .*'query'",
        ),
        (
            {"target_modules": ["query"], "layers_to_transform": [7]},
            r"`target_modules`.*`layers_to_transform`",
        ),
        (
            {"modules_to_save": ["clasifier"]},
            r"`modules_to_save`.*got 'clasifier'.*'classifier'",
        ),
        ({"exclude_modules": ["keys"]}, r"`exclude_modules`.*got 'keys'.*'key'"),
        ({"r": 17}, r"`r`.*got 17\."),
        ({"rank_pattern": {"query": 17}}, r"`rank_pattern`.*`bert\..*query`.*got 17\."),
        (
            {"rank_pattern": {"qwery": 2}},
            r"`rank_pattern`.*got 'qwery'.*'query'",
        ),
        (
            {"target_modules": ["attention"]},
            r"`target_modules`.*got `bert\.encoder\.layer\.0\.attention` \(BertAttention\)",
        ),
        ({"target_modules": ["LayerNorm"]}, r"got `bert\.embeddings\.LayerNorm` \(LayerNorm\)"),
    ],
)
def test_names_that_do_not_fit_the_model_are_refused(settings, message):
    model = build("bert")
    with pytest.raises(ValueError, match=message):
        resolve(model, **{"r": 2} | settings)
    assert all(p.requires_grad for p in model.parameters()), "an error must leave the model as it was"


def test_a_frozen_target_is_refused_by_name():
    model = build("bert")
    model.bert.encoder.layer[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"`bert\.encoder\.layer\.0\.attention\.self\.query`.*`exclude_modules`"):
        resolve(model, r=2)
    model = build("bert")
    model.classifier.requires_grad_(False)
    with pytest.raises(ValueError, match=r"`modules_to_save`.*`classifier"):
        resolve(model, r=2, modules_to_save=["classifier"])


def test_a_weight_that_is_targeted_and_saved_is_refused():
    with pytest.raises(ValueError, match=r"`lm_head`.*`target_modules`.*`modules_to_save`"):
        resolve(build("gpt2"), r=2, target_modules=["lm_head"], modules_to_save=["wte"])


def test_peft_models_are_refused():
    model = get_peft_model(build("bert"), LoraConfig(r=1, target_modules=["query"]))
    with pytest.raises(ValueError, match="`model`.*`carriers`"):
        resolve(model, r=1)


def test_resolving_twice_changes_nothing():
    model = build("bert")
    first = resolve(model, r=2).targets
    names = trainable(model).keys()
    assert resolve(model, r=2).targets == first and trainable(model).keys() == names


# ---- files


def test_a_config_goes_to_json_and_back(tmp_path):
    config = CarrierConfig(
        r=4,
        target_modules={"query", "key"},
        exclude_modules=r".*\.0\..*",
        rank_pattern={"key": 2},
        modules_to_save=["pooler"],
        source="history",
        sparsity=0.25,
        sides="left",
        layers_to_transform=[1],
    )
    config.save_pretrained(tmp_path / "new")
    written = json.loads((tmp_path / "new" / "carrier_config.json").read_text())
    assert written["target_modules"] == ["key", "query"] and list(written) == sorted(written)
    assert CarrierConfig.from_pretrained(tmp_path / "new") == config
    assert DPConfig.from_dict(DPConfig(noise_multiplier=1.0, carriers=config).to_dict()).carriers == config


def test_fields_of_a_newer_version_are_skipped(tmp_path):
    (tmp_path / "carrier_config.json").write_text(json.dumps({"r": 3, "head_scale": 0.3, "colour": "blue"}))
    assert CarrierConfig.from_pretrained(tmp_path) == CarrierConfig(r=3)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(OSError, match="carrier_config.json"):
        CarrierConfig.from_pretrained(tmp_path)


def test_carriers_may_be_given_as_a_dict_or_json():
    wanted = CarrierConfig(r=4, sparsity=0.3)
    for given in ({"r": 4, "sparsity": 0.3}, '{"r": 4, "sparsity": 0.3}'):
        assert DPConfig(noise_multiplier=1.0, carriers=given).carriers == wanted


def test_resolution_works_without_data():
    with torch.device("meta"):
        model = hf.BertForSequenceClassification(hf.BertConfig(num_hidden_layers=1))
    method = resolve(model, r=8)
    method.attach(trainable(model))
    assert method.blocks["bert.encoder.layer.0.intermediate.dense.weight:R"] == (8, 768)


# ---- as PEFT people expect


def test_peft_says_where_the_config_belongs():
    with pytest.raises(TypeError, match=r"`peft_config`.*CarrierConfig.*DPConfig\(carriers=\.\.\.\)"):
        get_peft_model(build("bert"), CarrierConfig(r=2))
    with pytest.raises(TypeError, match=r"DPConfig\(anchors=\.\.\.\)"):
        get_peft_model(build("bert"), AnchorConfig())


def test_a_file_says_whose_it_is_and_what_older_files_mean(tmp_path):
    CarrierConfig(r=3).save_pretrained(tmp_path)
    path = tmp_path / "carrier_config.json"
    values = json.loads(path.read_text())
    assert values["method_type"] == "CARRIERS" and CarrierConfig.from_json_file(path) == CarrierConfig(r=3)
    with pytest.raises(ValueError, match="`method_type`.*'CARRIERS'"):
        AnchorConfig.from_json_file(path)
    del values["head_scale"], values["method_type"]
    path.write_text(json.dumps(values))
    assert CarrierConfig.from_pretrained(tmp_path) == CarrierConfig(r=3, head_scale=1.0)


def test_a_config_is_uploaded_like_pefts(tmp_path, monkeypatch):
    uploaded = {}

    class Api:
        def create_repo(self, repo_id, **_):
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(self, repo_id, operations, **_):
            uploaded[repo_id] = [operation.path_in_repo for operation in operations]

    monkeypatch.setattr(hub, "hf_api", Api)
    CarrierConfig(r=3).push_to_hub("me/carriers")
    CarrierConfig(r=3).save_pretrained(tmp_path / "two", push_to_hub=True, repo_id="me/two")
    assert {name: "carrier_config.json" in files for name, files in uploaded.items()} == {
        "me/carriers": True,
        "me/two": True,
    }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"r": 8, "sparsity": 0.0, "source": "weight"}, "RGP: low-rank gradient carriers (r=8)"),  # an old statement
        ({"r": 8}, ["LSG without sparsity", "the weight", "r=8", "refresh=20", "head_scale=0.3"]),
        ({"r": 8, "source": "history"}, ["RGP:", "history"]),
        ({"r": 8, "source": "random"}, ["RGP-random:"]),
        ({"r": 8, "source": "momentum"}, ["RGP:", "noised gradients"]),
        ({"r": 8, "source": "public", "dataset_fingerprint": "0f"}, ["RGP:", "public data", "0f"]),
        ({"r": 8, "sparsity": 0.3, "head_scale": 1.0}, ["LSG:", "sparsity=0.3"]),
        ({"r": None, "sparsity": 0.3}, ["Sparse DP-SGD", "neurons"]),
        ({"r": None, "sparsity": 0.3, "mask": "elements"}, ["Sparse DP-SGD", "elements"]),
    ],
)
def test_the_card_says_which_method_ran(values, words):
    if isinstance(words, str):
        assert CarrierConfig.describe(values) == words
        return
    text = CarrierConfig.describe(CarrierConfig(**values).to_dict())
    assert all(word in text for word in words), text
    assert ("head_scale" in text) == (values.get("head_scale") != 1.0)
