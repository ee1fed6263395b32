"""Families that nobody listed: exact or refused by name, never wrong. The self-check stands behind that."""

from functools import partial

import pytest
import torch
import transformers as hf

from hf_private.gradients.layers import UncoveredError
from hf_private.gradients.selfcheck import SelfCheckError, self_check
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch
from tests.support import zoo
from tests.support.oracle import EXACT as EXACT_IN_FLOAT64
from tests.support.oracle import assert_exact
from tests.support.zoo import IMAGE, LLAMA, SIZE
from tests.tasks.test_audio import WAVE, WHISPER

EXACT = {
    "SqueezeBertForSequenceClassification": SIZE
    | dict(embedding_size=16, q_groups=2, k_groups=2, v_groups=2, post_attention_groups=1, intermediate_groups=2),
    "GPTJForCausalLM": SIZE | dict(rotary_dim=4),
    "BloomForCausalLM": SIZE,
    "GPTNeoForCausalLM": SIZE | dict(attention_types=[[["global", "local"], 1]]),
    "Olmo2ForCausalLM": LLAMA,
    "Phi3ForCausalLM": LLAMA,
    "DeiTForImageClassification": IMAGE,
    "BeitForImageClassification": IMAGE,
    "ConvNextForImageClassification": dict(hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, image_size=32),
    "MambaForCausalLM": SIZE | dict(state_size=4),
    "Mamba2ForCausalLM": SIZE | dict(state_size=4, num_heads=4, head_dim=8, n_groups=2, chunk_size=4),
    "DebertaForSequenceClassification": SIZE | dict(relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "SwinForImageClassification": dict(
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4, num_labels=3
    ),
    "GptOssForCausalLM": LLAMA
    | dict(num_local_experts=3, num_experts_per_tok=2, sliding_window=12, experts_implementation="eager"),
    "FalconForCausalLM": SIZE,
    "Qwen3MoeForCausalLM": LLAMA
    | dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=12, experts_implementation="eager"),
    "MPNetForSequenceClassification": SIZE,
    "LongformerForSequenceClassification": SIZE
    | dict(attention_window=4, sep_token_id=2, pad_token_id=1, bos_token_id=0),
    "CLIPForImageClassification": dict(
        vision_config=IMAGE, text_config=SIZE | dict(max_position_embeddings=8), projection_dim=8, num_labels=3
    ),
    "WhisperForConditionalGeneration": WHISPER,
    "Wav2Vec2ForSequenceClassification": WAVE,
}
REFUSED = {
    "FNetForSequenceClassification": (SIZE, "per_device_train_batch_size=1`"),
    "ResNetForImageClassification": (
        dict(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1]),
        "num_batches_tracked`",
    ),
}


def build(name: str, options: dict):
    config = getattr(hf, name).config_class(**options, architectures=[name])
    return freeze_unused(zoo.from_config(config, torch.float32).eval())


def freeze_unused(model):
    """Freeze what no loss reaches: norms behind CLIP's last used token, embeddings of masks."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    losses = PerSampleLoss(model)(model, synthetic_batch(model, 2, 7))
    for p, g in zip(parameters, torch.autograd.grad(losses.sum(), parameters, allow_unused=True), strict=True):
        p.requires_grad_(g is not None)
    return model


def check(model):
    return self_check(model, PerSampleLoss(model), partial(synthetic_batch, model))


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    model = build(name, EXACT[name])
    assert "exact" in check(model)
    model.double()
    in_float32 = any(kind in name for kind in ("Mamba", "GPTJ", "GPTNeo"))  # the state, or attention
    tolerance = 1e-6 if in_float32 else EXACT_IN_FLOAT64
    for size, length in ((3, zoo.LENGTH), (4, 8), (1, 5)):
        assert_exact(model, PerSampleLoss(model), zoo.make_batch(model, size, length), tolerance)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    options, match = REFUSED[name]
    with pytest.raises((UncoveredError, SelfCheckError), match=rf"^[^`]*`[^`]*{match}"):
        check(build(name, options))
