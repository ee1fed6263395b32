"""Tiny models of every architecture that the installed transformers offers with a training head.

`tiny_model("mixtral", "causal-lm")` builds one with two layers of width 32 from the type's own default config: `SIZES`
says how large an attribute may be, by its name, and `EXCEPTIONS` what single types need beside that. Dropout is 0, so
that two passes can be compared.
"""

import re
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto as auto
from transformers.models.dbrx.configuration_dbrx import DbrxAttentionConfig

# head -> transformers' own list of model types with that head
HEADS: dict[str, dict[str, Any]] = {
    "classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "masked-lm": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq-lm": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "causal-lm": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "audio": auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    "ctc": auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "image-text": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
MAPPINGS: dict[str, Any] = {
    "classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "masked-lm": auto.MODEL_FOR_MASKED_LM_MAPPING,
    "seq2seq-lm": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "causal-lm": auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    "audio": auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING,
    "ctc": auto.MODEL_FOR_CTC_MAPPING,
    "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    "image-text": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
}

VOCABULARY = 101
SPECIAL = {
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
    "image_token_id": 3, "image_token_index": 3, "video_token_id": 4, "video_token_index": 4,
    "audio_token_id": 5, "audio_token_index": 5,
    "vision_start_token_id": 6, "image_start_token_id": 6, "vision_end_token_id": 7, "image_end_token_id": 7,
    "audio_start_token_id": 8, "audio_end_token_id": 9,
}  # fmt: skip
FIRST_WORD = 10  # ids below are special

# The first pattern that matches an attribute's whole name gives the most that it may be; None leaves it to the class.
SIZES: tuple[tuple[str, int | None], ...] = (
    (r"qk_head_dim|num_feat_extract_layers|chunk_size_feed_forward|acoustic_.*|.*_hash_.*|pos_emb_.*", None),
    (r".*vocab_size.*|.*_vocab", VOCABULARY),
    (r".*(token_id|token_index|_idx)", 3),
    (r"(max|n)_?.*positions?(_embeddings)?|n_ctx|max_seq_len|model_max_length|max_position_embeddings.*", 64),
    (r".*(key_value_heads|kv_heads|linear_num_key_heads)", 2),
    (r".*(head_dim|dim_head|d_kv|d_head|kv_channels)", 8),
    (r"rotary_dim", 4),
    (r"(.*_)?(num_)?(attention_heads|n_heads?|num_heads|heads)|n_heads?|index_n_heads|linear_num_value_heads", 4),
    (r".*lora_rank|time_step_rank|mamba_dt_rank", 8),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r".*(per_tok|per_token|topk|top_k|moe_k)", 2),
    (r"n_group|topk_group|num_expert_group|n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r".*experts", 4),
    (r"(.*_)?(num_.*layers|n_layers?|.*_layers|depth|num_blocks|num_hidden_groups)", 2),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|dim_ff|dff|d_inner|mlp_dim|ffn_size)", 64),
    (
        r"(.*_)?(hidden_size|hidden_size_global|d_model|n_embd|emb_dim|embedding_size|dim|hidden_dim|embed_dim|embedding_dim|width)",
        32,
    ),
    (r".*state_size|.*d_state", 8),
    (r".*chunk_size", 4),
    (r".*(sliding_window|window_size|local_attention|block_size)", 4),
    (r"context_size", 16),
    (r"latent_query_num|upsample_groups|n_window.*|(num|n)_filters", 4),
    (r"base_channels", 32),
    (r"image_size", 32),
    (r"patch_size", 8),
)

# What single types need: attributes by dotted path, as in the default config.
# Latent attention has a key and a value for every head, whatever the default says.
LATENT_ATTENTION = (
    "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash minicpm3 mistral4 youtu"
).split()
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SWIN = {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 4}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 4},
    "esmc": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "ministral": {"head_dim": 8},
    "mobilebert": {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "dots1": {"sliding_window": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "layoutlmv3": {"input_size": 32, "coordinate_size": 6, "shape_size": 4},
    "led": {"attention_window": [4, 4]},
    "nemotron_h": {"n_groups": 1, "num_key_value_heads": 4},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    **dict.fromkeys(LATENT_ATTENTION, {"num_key_value_heads": 4}),
    "mistral4": {"num_key_value_heads": 4, "head_dim": 16},
    "mistral_large4_text": {"num_key_value_heads": 4, "head_dim": 16},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {"image_token_index": 3},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROPE),
    },
    "dbrx": {
        "attn_config": DbrxAttentionConfig(rope_theta=10000.0, kv_n_heads=2, clip_qkv=8.0),
        "ffn_config.hidden_size": 32,
    },
    "granite_speech5_encoder": {"num_key_value_heads": 4},
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), {"downsample_rate": 2}),
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    **dict.fromkeys(("donut-swin", "swin", "swinv2", "maskformer-swin"), SWIN),
    "hunyuan_vl_text": {"head_dim": 8, "num_key_value_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "mobilevitv2": {"image_size": 64},
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), {"vision_start_token_id": 6}),
    "audio-spectrogram-transformer": {"max_length": 32, "num_mel_bins": 32},
    **dict.fromkeys(("resnet", "regnet"), {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1] * 4}),
    "bit": {"embedding_size": 32, "hidden_sizes": [128] * 4, "depths": [1] * 4},
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), {"num_key_value_heads": 4}),
    **dict.fromkeys(("convnext", "convnextv2"), {"hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4}),
    "pvt_v2": {"hidden_sizes": [8, 16, 40, 64], "depths": [1] * 4},
    "hiera": {"depths": [1] * 4},
    "florence2": {
        "vision_config.embed_dim": [16, 16, 32, 32],
        "vision_config.depths": [1] * 4,
        "vision_config.num_heads": [2] * 4,
        "vision_config.num_groups": [2] * 4,
    },
    "step3p5": {"sliding_window": 4},
    "glm5_next_text": {"num_key_value_heads": 4, "index_kpool": 2},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "levit": {"image_size": 64, "patch_size": 16},
    "speecht5": {"num_mel_bins": 20},
    "perceiver": {"num_latents": 8, "d_latents": 32, "d_model": 32, "num_self_attends_per_block": 2},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "chameleon": {
        "vocabulary_map": {"<image>": 3} | {f"IMGIMG{chr(65 + n)}Z": 20 + n for n in range(8)},
        "vq_config.num_embeddings": 8,
        "vq_config.base_channels": 32,
        "vq_config.resolution": 32,
    },
    "muse_spark": {"vision_config.num_hidden_layers": 4, "audio_config.num_hidden_layers": 4},
    "nemotron_h_omni": {"vision_config.video_temporal_patch_size": 2},
    "neomme": {"head_dim": 16},
    "ernie4_5_vl_moe_vision": {"num_attention_heads": 4},
    "muse_glimmer": {"vision_config.out_hidden_size": 128},
    "musicgen": {"decoder.num_codebooks": 1},
    "musicgen_melody": {"decoder.num_codebooks": 1},
    **dict.fromkeys(
        ("zamba", "zamba2"),
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
        },
    ),
    "gemma3": {"mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4, "yes_token_index": 11, "no_token_index": 12},
    "unlimited_ocr_sam_vision_model": {"downsample_channels": [16, 32]},
    "vipllava": {"vision_feature_layers": [-2, 1]},
    "deepseek_vl_hybrid": {"high_res_vision_config.global_attn_indexes": [0]},
    "textnet": {"image_size": [64, 64]},
    "paddleocr_vl": {"text_config.rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
    "deepseek_ocr2": {"vision_config.sam_config.downsample_channels": [16, 32]},
    "efficientnet": {"hidden_dim": 1280, "width_coefficient": 1.0, "num_block_repeats": [1] * 7},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "spatial_target_layers": [0, 1, 0, 1],
        "downsample_rate": "2/4",
        "vision_config.hidden_size": 64,  # a head of the projector has 64
        "vision_config.num_attention_heads": 4,
    },
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
}


def sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """Small values for the attributes of a config that make a model large."""
    small: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            small[name] = shrink(value, EXCEPTIONS.get(value.model_type))
        elif name in SPECIAL:
            small[name] = SPECIAL[name]
        elif isinstance(value, float) and "drop" in name:
            small[name] = 0.0
        elif name == "rope_parameters" and "mrope_section" in config.ignore_keys_at_rope_validation | set(value or ()):
            share = (value or {}).get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
            small[name] = (value or {}) | {"mrope_section": [2, 1, 1] if share == 1 else [1, 1, 0]}
        elif name == "window_size" and hasattr(config, "spatial_merge_size"):  # in pixels
            small[name] = 32
        elif name == "image_grid_pinpoints":
            small[name] = [[32, 64], [64, 32]]
        elif isinstance(value, int) and not isinstance(value, bool):
            for pattern, most in SIZES:
                if re.fullmatch(pattern, name):
                    small |= {} if most is None else {name: min(value, most)}
                    break
    return small


def layers_of_each_kind(config: PreTrainedConfig) -> dict[str, Any]:
    """One layer of each kind that the default config has, where there are several."""
    attributes = ("layer_types", "layers_block_type", "mlp_layer_types")
    names = [name for name in attributes if isinstance(vars(config).get(name), (list, tuple))]
    kinds = {name: list(dict.fromkeys(getattr(config, name))) for name in names}
    depth = max((len(found) for found in kinds.values()), default=0)
    if depth < 2:
        return {}
    return {"num_hidden_layers": depth} | {name: [*found * depth][:depth] for name, found in kinds.items()}


def shrink(config: PreTrainedConfig, exceptions: dict[str, Any] | None = None) -> PreTrainedConfig:
    """A config of the same class with small sizes; what the class derives from them it derives anew."""
    here = {name: value for name, value in (exceptions or {}).items() if "." not in name}
    small = sizes(config) | layers_of_each_kind(config) | here
    for name, value in vars(config).items():
        below = {k.partition(".")[2]: v for k, v in (exceptions or {}).items() if k.startswith(f"{name}.")}
        if below and isinstance(value, PreTrainedConfig):
            small[name] = shrink(value, EXCEPTIONS.get(value.model_type, {}) | below)
    return type(config)(**small)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A small config of a model type."""
    return shrink(CONFIG_MAPPING[model_type](), EXCEPTIONS.get(model_type))


def tiny_model(model_type: str, head: str, seed: int = 0) -> nn.Module:
    """A small model of a type with one of `HEADS`, random weights, eval mode."""
    config = tiny_config(model_type)
    config._attn_implementation = "eager"
    found = MAPPINGS[head][type(config)]
    cls = found[0] if isinstance(found, tuple) else found
    text = config.get_text_config(decoder=True)
    if not isinstance(config, cls.config_class) and isinstance(text, cls.config_class):
        config = text  # the language model inside a multimodal one
    for name, value in {"num_labels": 3, "is_decoder": head == "causal-lm"}.items():
        setattr(config, name, value)
    for part in (config, config.get_text_config(decoder=True)):
        part.use_cache = False
    if head == "ctc" and getattr(config, "vocab_size", None) is None:
        config.vocab_size = VOCABULARY
    if config.is_encoder_decoder:
        config.decoder_start_token_id = SPECIAL["decoder_start_token_id"]
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = SPECIAL["pad_token_id"]
    torch.manual_seed(seed)
    model = cls(config).train(model_type == "reformer")  # which has no gradients in eval mode
    for module in model.modules():  # the other kernels for experts have no float64
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config._experts_implementation = "eager"
    return model
