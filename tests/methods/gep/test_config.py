"""AnchorConfig: wrong settings, groups of parameters and their shares, what is trained."""

import math

import pytest

from hf_private.config import DPConfig
from hf_private.gradients.bookkeeper import trainable
from hf_private.methods.gep.config import AnchorConfig, anchors_of, group, share_out
from hf_private.methods.gep.method import Anchors, Group
from tests.support import zoo


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "`k`.*got 0"),
        ({"num_anchors": 0}, "`num_anchors`"),
        ({"power_iterations": 0}, "`power_iterations`"),
        ({"refresh": 0}, "`refresh`"),
        ({"residual": "yes"}, "`residual`"),
        ({"residual_clip_norm": 0}, "`residual_clip_norm`.*got 0"),
        ({"residual_clip_norm": math.inf}, "`residual_clip_norm`"),
        ({"residual_clip_norm": 1.0, "residual": False}, "`residual_clip_norm`"),
        ({"groups": "block"}, "`groups`.*got 'block'"),
        ({"groups": []}, "`groups`"),
        ({"modules_to_save": ["head"]}, "`modules_to_save`.*`target_modules`"),
        ({"bias": "all"}, "`bias`.*`target_modules`"),
        ({"target_modules": []}, "`target_modules`"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        AnchorConfig(**settings)


def test_groups_and_shares():
    names = [
        "embed.weight",
        "stages.0.a.weight",
        "stages.0.b.1.weight",
        "stages.1.a.weight",
        "head.weight",
        "head.bias",
    ]
    assert list(group("layer", names)) == ["embed", "stages.0.a", "stages.0.b.1", "stages.1.a", "head"]
    assert list(group("stage", names)) == ["embed", "stages.0", "stages.1", "head"]
    assert group(["head|embed", r"stages\.\d"], names) == {
        "head|embed": [names[0], *names[4:]],
        r"stages\.\d": names[1:4],
    }
    with pytest.raises(ValueError, match="`groups`.*`embed.weight`"):
        group(["stages", "head"], names)
    with pytest.raises(ValueError, match="`groups`.*got 'tail'"):
        group(["tail", ".*"], names)
    with pytest.raises(ValueError, match="`k`"):
        share_out(1, {"a": 5, "b": 5})
    assert share_out(30, {"a": 400, "b": 1600}) == {"a": 10, "b": 20}
    assert share_out(9, {"a": 2, "b": 10**6}) == {"a": 1, "b": 8}


def test_what_is_trained():
    model, _ = zoo.build("bert")
    config = AnchorConfig(k=20, target_modules=["query"], num_anchors=20)
    method = config.build(model)
    wanted = {n for n in dict(model.named_parameters()) if "query.weight" in n or n.startswith("classifier.")}
    assert set(trainable(model)) == wanted == set(method.group_of)
    model, _ = zoo.build("bert")
    assert set(anchors_of(AnchorConfig(k=100), model).group_of) == set(trainable(model))
    with pytest.raises(ValueError, match="`num_anchors`.*11"):
        anchors_of(AnchorConfig(k=11, num_anchors=5, groups=[".*"]), model)
    with pytest.raises(ValueError, match="`groups`.*got `"):
        Anchors({"all": Group(("classifier.bias",), 1)}).attach(trainable(model))


def test_the_config_as_text():
    config = DPConfig(target_epsilon=1.0, anchors='{"k": 7, "groups": ["head"]}')
    assert config.anchors == AnchorConfig(k=7, groups=["head"])
    assert DPConfig.from_dict(config.to_dict()) == config
