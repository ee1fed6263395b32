"""What the recipes do to a model before it is trained: what stays frozen."""

import re

import pytest
import torch
import yaml
from options import RecipeOptions
from training import RecipeTrainer, with_method
from transformers import PreTrainedModel
from vision import make_model

from hf_private import AnchorConfig, CarrierConfig, DPConfig
from tests.recipes.test_recipes import RECIPES
from tests.support import training, zoo

LOWER = r".*\.(embeddings|layer\.0)\..*"


def bert() -> PreTrainedModel:
    return zoo.small("bert", num_hidden_layers=3, hidden_size=16).eval()


@pytest.mark.parametrize("method", ["bk", "rgp", "lora"])
def test_frozen_modules_stay_as_they_are_under_every_method(method, tmp_path):
    model = with_method(bert(), RecipeOptions(method=method, rank=2, frozen_modules=LOWER), task_type="SEQ_CLS")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    carriers = CarrierConfig(r=2, exclude_modules=LOWER) if method == "rgp" else None
    config = DPConfig(noise_multiplier=1.0, expected_batch_size=8, accountant="rdp", carriers=carriers)
    some = {"train_dataset": training.text(), "data_collator": training.Padding()}
    RecipeTrainer(model, training.arguments(tmp_path, max_steps=2), dp_config=config, **some).train()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert {int(n) for name in changed for n in re.findall(r"layer\.(\d)", name)} == {1, 2}
    assert not any("embeddings" in name for name in changed) and any("classifier" in name for name in changed)


def test_a_frozen_name_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="`frozen_modules`"):
        with_method(bert(), RecipeOptions(frozen_modules="layer.0"))


def test_the_residual_networks_have_as_many_weights_as_the_configs_say():
    """The papers call a network of 1.5M weights WRN28-4: that is WRN28-2. ResNet20 has 0.27M."""
    sizes = {name: make_model(name, 32, 3, 10).num_parameters() for name in ("wrn28-4", "wrn28-2", "wrn22-1")}
    assert {name: round(size / 1e6, 2) for name, size in sizes.items()} == {
        "wrn28-4": 5.85, "wrn28-2": 1.47, "wrn22-1": 0.27
    }  # fmt: skip


def test_gep_divides_the_resnet_into_five_groups_as_its_paper_does():
    settings = yaml.safe_load((RECIPES / "configs" / "cifar10_resnet20.yaml").read_text())
    method = AnchorConfig(**settings["anchors"]).build(make_model(settings["model_name_or_path"], 32, 3, 10))
    groups = [sorted(group.names) for group in method.groups.values()]
    assert len(groups) == 5
    assert ["classifier.bias", "classifier.weight", "trunk.norm.bias", "trunk.norm.weight"] in groups
    assert ["trunk.conv.weight"] in groups
