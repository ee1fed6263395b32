"""Families and methods as rows: a newcomer adds one row and every shared test runs on it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch

VOCABULARY = 37

_BERT = dict(
    vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=40, pad_token_id=0,
)  # fmt: skip
_LLAMA = _BERT | dict(num_key_value_heads=1, head_dim=8, bos_token_id=1, eos_token_id=2)
_GPT2 = dict(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=40, bos_token_id=1, eos_token_id=2)
_T5 = dict(
    vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, relative_attention_num_buckets=8,
    relative_attention_max_distance=16, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    dropout_rate=0.0,
)  # fmt: skip
_BART = dict(
    vocab_size=VOCABULARY, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=40, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    dropout=0.0,
)  # fmt: skip
_GEMMA = _LLAMA | dict(sliding_window=8)
_VIT = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=12, patch_size=4
)


def _opt() -> nn.Module:
    config = hf.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, ffn_dim=24, num_attention_heads=2,
        max_position_embeddings=40, word_embed_proj_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        dropout=0.0,
    )  # fmt: skip
    return hf.OPTForCausalLM(config)


def _distilbert() -> nn.Module:
    return hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(
            vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=40
        )
    )


def _modernbert() -> nn.Module:
    config = hf.ModernBertConfig(
        **_BERT, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=2,
        local_attention=8, reference_compile=False,
    )  # fmt: skip
    return hf.ModernBertForSequenceClassification(config)


def _deberta(**kwargs) -> nn.Module:
    config = hf.DebertaV2Config(
        **_BERT, relative_attention=True, position_buckets=4, share_att_key=True, norm_rel_ebd="layer_norm",
        pos_att_type=["p2c", "c2p"], position_biased_input=False, type_vocab_size=0, **kwargs,
    )  # fmt: skip
    return hf.DebertaV2ForSequenceClassification(config)


class GroupNormResNet(nn.Module):
    """A small residual network with strides, a grouped and a dilated convolution, and in-place activations."""

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.dilated = nn.Conv2d(8, 8, 3, padding="same", dilation=2)
        self.down = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.classifier = nn.Linear(12, 3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm(self.stem(pixel_values)))
        x = x + self.act(self.grouped(x))
        x = x + self.dilated(x)
        return self.classifier(self.down(x).mean((2, 3)))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**_BERT, num_labels=3)),
    "bert-mlm": lambda: hf.BertForMaskedLM(hf.BertConfig(**_BERT)),
    "bert-choice": lambda: hf.BertForMultipleChoice(hf.BertConfig(**_BERT)),
    "roberta": lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**_BERT | dict(pad_token_id=1))),
    "distilbert": _distilbert,
    "albert": lambda: hf.AlbertForSequenceClassification(hf.AlbertConfig(**_BERT, embedding_size=8)),
    "electra": lambda: hf.ElectraForSequenceClassification(hf.ElectraConfig(**_BERT, embedding_size=8)),
    "modernbert": _modernbert,
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT2)),
    "gpt2-untied": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT2, tie_word_embeddings=False)),
    "opt": _opt,
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_BERT, bos_token_id=1, eos_token_id=2)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_LLAMA, sliding_window=8)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_LLAMA)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_LLAMA)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**_GEMMA, query_pre_attn_scalar=8)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_GEMMA, query_pre_attn_scalar=8)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**_BERT, bos_token_id=1, eos_token_id=2)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5)),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_BART)),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**_VIT, num_labels=3)),
    "resnet-gn": GroupNormResNet,
}
# Exact with micro-batches of one record only: their position tables have no batch axis (refused by name otherwise).
ONE_RECORD_FAMILIES: dict[str, Callable[[], nn.Module]] = {"deberta-v2": _deberta}


def build(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Callable]:
    """A tiny random model of the family, with weights away from their initial zeros and ones, and its loss."""
    torch.manual_seed(0)
    model = (FAMILIES | ONE_RECORD_FAMILIES)[name]().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model, loss_of(model)


def loss_of(model: nn.Module) -> Callable:
    if isinstance(model, GroupNormResNet):
        return lambda model, batch: F.cross_entropy(model(batch["pixel_values"]), batch["labels"], reduction="none")
    return PerSampleLoss(model)


def make_batch(model: nn.Module, batch_size: int, length: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    """Synthetic records in the model's dtype; rows are padded where the length allows."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, GroupNormResNet):
        images = torch.randn(batch_size, 3, 8, 8, generator=generator)
        batch = {"pixel_values": images, "labels": torch.randint(3, (batch_size,), generator=generator)}
    else:
        batch = synthetic_batch(model, batch_size, max(length, 5), generator)
        if length < 5:
            batch = {k: x[..., :length] if x.dim() > 1 and not x.is_floating_point() else x for k, x in batch.items()}
    dtype = next(model.parameters()).dtype
    return {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()}
