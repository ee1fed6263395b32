"""Heads whose inputs the engine makes itself: decoders that shift their labels, images of a nested config."""

import pytest
import torch
import transformers as hf

from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch
from tests.support import zoo
from tests.support.oracle import assert_exact, record

DECODER = zoo.FAMILIES["bart"][1]
TOWER = dict(vision_config=zoo.IMAGE, text_config=zoo.SIZE, num_labels=3)
HEADS = {
    "M2M100ForConditionalGeneration": DECODER,
    "BlenderbotForConditionalGeneration": DECODER,
    "BlenderbotSmallForConditionalGeneration": DECODER,
    "CLIPForImageClassification": TOWER | dict(projection_dim=8),
    "SiglipForImageClassification": TOWER,
}


@pytest.mark.parametrize("name", HEADS)
def test_made_up_records_have_the_loss_of_transformers_and_exact_gradients(name: str) -> None:
    config = getattr(hf, name).config_class(**HEADS[name], architectures=[name])
    model = zoo.from_config(config).eval()
    loss = PerSampleLoss(model)
    batch = zoo.make_batch(model, 4, 8)
    alone = torch.stack([model(**record(batch, n)).loss for n in range(4)])
    torch.testing.assert_close(loss(model, batch), alone, rtol=1e-6, atol=1e-6, check_dtype=False)
    for records, length in ((1, 7), (4, 8), (3, 7)):
        assert_exact(model, loss, zoo.make_batch(model, records, length))


def test_a_made_up_image_has_the_size_of_the_nested_config() -> None:
    config = hf.CLIPConfig(**HEADS["CLIPForImageClassification"])
    batch = synthetic_batch(hf.CLIPForImageClassification(config), 2, 5)
    assert batch["pixel_values"].shape == (2, 3, 12, 12)
