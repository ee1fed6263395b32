"""Models that read images beside a text: their loss, made-up batches, and runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from hf_private.gradients.selfcheck import SelfCheckError, self_check
from hf_private.tasks.heads import Head, head_of
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import ordinary_tokens, synthetic_batch
from tests.support import oracle, training, zoo

TEXT = zoo.LLAMA | dict(max_position_embeddings=80)
PATCHES = dict(
    depth=2, embed_dim=16, num_heads=2, hidden_size=16, patch_size=4, spatial_merge_size=2, temporal_patch_size=2
)
TOKENS = dict(image_token_id=5, video_token_id=6, vision_start_token_id=7, vision_end_token_id=8)
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}


def make(name: str) -> Any:
    torch.manual_seed(0)
    vision = hf.CLIPVisionConfig(**zoo.IMAGE)
    if name == "llava":
        config = hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**TEXT), image_token_id=5)
        return hf.LlavaForConditionalGeneration(config)
    if name == "llava-next":
        config = hf.LlavaNextConfig(
            vision_config=vision, text_config=hf.LlamaConfig(**TEXT), image_token_id=5, image_grid_pinpoints=[[12, 24]]
        )
        return hf.LlavaNextForConditionalGeneration(config)
    if name == "gemma3":
        config = hf.Gemma3Config(
            vision_config=hf.SiglipVisionConfig(**zoo.IMAGE | dict(vision_use_head=False, image_size=16)),
            text_config=hf.Gemma3TextConfig(**zoo.GEMMA | dict(max_position_embeddings=80)),
            mm_tokens_per_image=4, image_token_id=5,
        )  # fmt: skip
        return hf.Gemma3ForConditionalGeneration(config)
    config = hf.Qwen2VLConfig(vision_config=PATCHES, text_config=TEXT | dict(rope_parameters=ROPE), **TOKENS)
    return hf.Qwen2VLForConditionalGeneration(config)


NAMES = ("llava", "llava-next", "gemma3", "qwen2-vl")


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_transformers_own_and_the_gradients_are_exact(name: str) -> None:
    model = make(name).double().eval()
    assert head_of(model) is Head.CAUSAL_LM
    loss = PerSampleLoss(model)
    for records, length in ((5, 7), (4, 8), (1, 5)):
        batch = synthetic_batch(model, records, length)
        oracle.assert_exact(model, loss, batch, tolerance=1e-6)
    batch = synthetic_batch(model, 3, 7)
    losses = loss(model, batch)
    for n in range(3):
        kept = int(batch["attention_mask"][n].sum())
        alone = oracle.record(batch, n)
        alone = {k: x[:, :kept] if x.shape[:2] == batch["attention_mask"][:1].shape else x for k, x in alone.items()}
        torch.testing.assert_close(losses[n], model(**alone).loss.to(losses), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_made_up_record_has_an_image_and_a_token_for_each_of_its_parts(name: str) -> None:
    model = make(name)
    batch = synthetic_batch(model, 4, 7)
    assert len(batch["pixel_values"]) == 4
    counts = (batch["input_ids"] == 5).sum(1)
    assert counts.unique().numel() == 1 and counts[0] == batch["input_ids"].shape[1] - 7
    assert (batch["labels"][batch["input_ids"] == 5] == -100).all()
    assert not set(ordinary_tokens(model).tolist()) & {0, 1, 2, 5}
    state = torch.random.get_rng_state()
    again = synthetic_batch(model, 4, 7)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(x, again[key]) for key, x in batch.items())


def test_images_that_mix_are_found() -> None:
    """A batch of text alone would not show it: the vision tower may let the images of a batch meet."""
    model = make("llava").eval()
    tower, plain = model.model.vision_tower, model.model.vision_tower.forward
    tower.forward = lambda pixel_values, **kwargs: plain(pixel_values + 0.01 * pixel_values.mean(0), **kwargs)
    model.model.vision_tower.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(False)
    with pytest.raises(SelfCheckError, match="not independent"):
        self_check(model, PerSampleLoss(model), lambda *args: synthetic_batch(model, *args))


def test_images_of_an_unknown_form_need_public_examples() -> None:
    model = make("llava")
    model.model.get_image_features = lambda pixel_values, sides: None
    with pytest.raises(ValueError, match="`public_examples`"):
        synthetic_batch(model, 2, 5)


class Collator(training.Padding):
    """Pads the text on the right, and stacks the images."""

    def __call__(self, records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(records)
        stacked = [name for name in records[0] if name.startswith(("pixel", "image"))]
        images = {name: torch.stack([record[name] for record in records]) for name in stacked}
        return batch | images | {"mm_token_type_ids": (batch["input_ids"] == 5).long()}


@pytest.mark.parametrize("name", ["llava", "qwen2-vl"])
def test_it_trains_and_rehearses(tmp_path: Path, name: str) -> None:
    model = make(name)
    if name == "llava":  # it reads the last but one layer, without the class token
        for part in (model.model.vision_tower.encoder.layers[-1], model.model.vision_tower.post_layernorm):
            part.requires_grad_(False)
    made = synthetic_batch(model, 12, 7, torch.Generator().manual_seed(3))
    records = []
    for n in range(12):
        kept = int(made["attention_mask"][n].sum())
        texts = {key: made[key][n, :kept].tolist() for key in ("input_ids", "labels")}
        records.append(texts | {key: x[n] for key, x in made.items() if key.startswith(("pixel", "image"))})
    run = training.trainer(tmp_path, model, records, data_collator=Collator())
    run.rehearse()
    assert run.train().global_step == 4
    assert training.steps(tmp_path) == 4
