"""Families that nobody listed: exact or refused by name, never wrong. The self-check stands behind that."""

from functools import partial

import pytest
import torch
import transformers as hf

from hf_private.gradients.bookkeeper import BookKeeper
from hf_private.gradients.layers import UncoveredError
from hf_private.gradients.selfcheck import SelfCheckError, self_check
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch
from tests.support import oracle

BERT = dict(
    vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
LLAMA = BERT | dict(num_key_value_heads=1, head_dim=8, bos_token_id=1, eos_token_id=2)
IMAGE = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=12, patch_size=4
)

EXACT = {
    "SqueezeBertForSequenceClassification": BERT
    | dict(embedding_size=16, q_groups=2, k_groups=2, v_groups=2, post_attention_groups=1, intermediate_groups=2),
    "GPTJForCausalLM": dict(vocab_size=37, n_embd=16, n_layer=2, n_head=2, rotary_dim=4, n_positions=64),
    "BloomForCausalLM": dict(vocab_size=37, hidden_size=16, n_layer=2, n_head=2),
    "GPTNeoForCausalLM": dict(
        vocab_size=37,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
    ),  # fmt: skip
    "Olmo2ForCausalLM": LLAMA,
    "Phi3ForCausalLM": LLAMA,
    "DeiTForImageClassification": IMAGE,
    "BeitForImageClassification": IMAGE,
    "ConvNextForImageClassification": dict(hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, image_size=32),
}
REFUSED = {
    "MixtralForCausalLM": (LLAMA | dict(num_local_experts=3), "experts"),
    "XLNetForSequenceClassification": (dict(vocab_size=37, d_model=16, n_layer=2, n_head=2, d_inner=24), "rel_attn.q"),
    "FNetForSequenceClassification": (BERT, "without padding"),
    "MambaForCausalLM": (dict(vocab_size=37, hidden_size=16, num_hidden_layers=2, state_size=4), "A_log"),
    "DebertaForSequenceClassification": (BERT | dict(relative_attention=True, pos_att_type=["c2p", "p2c"]), "q_bias"),
    "SwinForImageClassification": (
        dict(image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4),
        "relative_position_bias_table",
    ),
    "ResNetForImageClassification": (dict(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1]), "running_mean"),
}


def build(name: str, options: dict):
    torch.manual_seed(0)
    kind = getattr(hf, name)
    model = kind(kind.config_class(**options)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def check(model):
    return self_check(model, PerSampleLoss(model), partial(synthetic_batch, model))


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    model = build(name, EXACT[name])
    assert "exact" in check(model)
    model.double()
    loss, batch = PerSampleLoss(model), synthetic_batch(model, 3, 7)
    batch = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
    wanted = oracle.per_sample_gradients(model, loss, batch)
    with BookKeeper(model) as book:
        book.backward(loss(model, batch))
        torch.testing.assert_close(book.norms(), oracle.norms(wanted), rtol=1e-8, atol=0)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    options, match = REFUSED[name]
    with pytest.raises((UncoveredError, SelfCheckError), match=rf"(?s){match}.*Remedy"):
        check(build(name, options))
