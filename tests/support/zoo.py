"""The model zoo: every tiny model that the tests share, each listed once, with its loss and its batches.

To add a family of Transformers, add a row to `FAMILIES`: the class that holds the model with its usual head, and the
config. The shared tests then compare it with the oracle (tests/gradients/), check its loss against the one of
Transformers (tests/tasks/) and put LoRA on it (tests/spending/). Another head of a listed family is a row of `HEADS`.
A model that is no Transformers model is a class in `PLAIN` that maps its input `x` to logits.

    model, loss = zoo.build("gpt2")                    # float64, random weights, loss per record
    batch = zoo.make_batch(model, batch_size=3)
    model = zoo.small("bert", num_hidden_layers=2)     # float32, for tests that train
    config = zoo.config("llama", num_labels=2)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from hf_private.tasks.heads import HEAD_CLASSES, Head, base_model
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch

VOCABULARY = 60
LENGTH = 7
SIZE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, num_labels=3,
)  # fmt: skip
LLAMA = SIZE | dict(num_key_value_heads=1, head_dim=8)
GEMMA = LLAMA | dict(sliding_window=8, query_pre_attn_scalar=8)
IMAGE = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=12, patch_size=4,
    num_labels=3,
)  # fmt: skip
_MODERNBERT = SIZE | dict(
    cls_token_id=3, sep_token_id=4, global_attn_every_n_layers=2, local_attention=4, reference_compile=False
)
_GPT2 = SIZE | dict(pad_token_id=None)  # as the published ones
_T5 = SIZE | dict(
    d_kv=8, d_ff=24, relative_attention_num_buckets=8, relative_attention_max_distance=16, decoder_start_token_id=0,
    eos_token_id=1, dropout_rate=0.0,
)  # fmt: skip
_BART = SIZE | dict(
    decoder_layers=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, decoder_start_token_id=2,
    forced_eos_token_id=None, dropout=0.0,
)  # fmt: skip
_DEBERTA = SIZE | dict(
    relative_attention=True, position_buckets=4, share_att_key=True, norm_rel_ebd="layer_norm",
    pos_att_type=["p2c", "c2p"], position_biased_input=False, type_vocab_size=0,
)  # fmt: skip
_MIXTRAL = LLAMA | dict(num_local_experts=3, experts_implementation="eager")  # the others have no float64

Row = tuple[str, dict[str, Any]]  # class in transformers, arguments of its config

FAMILIES: dict[str, Row] = {
    "bert": ("BertForSequenceClassification", SIZE),
    "bert-mlm": ("BertForMaskedLM", SIZE),
    "bert-choice": ("BertForMultipleChoice", SIZE),
    "roberta": ("RobertaForSequenceClassification", SIZE | dict(pad_token_id=1, bos_token_id=0, type_vocab_size=1)),
    "distilbert": ("DistilBertForSequenceClassification", SIZE | dict(hidden_dim=24)),
    "albert": ("AlbertForSequenceClassification", SIZE | dict(embedding_size=8)),
    "electra": ("ElectraForSequenceClassification", SIZE | dict(embedding_size=8)),
    "modernbert": ("ModernBertForSequenceClassification", _MODERNBERT),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt2-untied": ("GPT2LMHeadModel", _GPT2 | dict(tie_word_embeddings=False)),
    "opt": ("OPTForCausalLM", SIZE | dict(ffn_dim=24, word_embed_proj_dim=16, dropout=0.0)),
    "gpt-neox": ("GPTNeoXForCausalLM", SIZE),
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral": ("MistralForCausalLM", LLAMA | dict(sliding_window=8)),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", LLAMA),
    "gemma2": ("Gemma2ForCausalLM", GEMMA),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
    "phi": ("PhiForCausalLM", SIZE),
    "t5": ("T5ForConditionalGeneration", _T5),
    "bart": ("BartForConditionalGeneration", _BART),
    "vit": ("ViTForImageClassification", IMAGE),
    "deberta-v2": ("DebertaV2ForSequenceClassification", _DEBERTA),
    "mixtral": ("MixtralForCausalLM", _MIXTRAL),
}
HEADS: dict[str, Row] = {  # further heads
    "bert-regression": ("BertForSequenceClassification", SIZE | dict(num_labels=1)),
    "bert-regression-3": ("BertForSequenceClassification", SIZE | dict(problem_type="regression")),
    "bert-multi": ("BertForSequenceClassification", SIZE | dict(problem_type="multi_label_classification")),
    "bert-token": ("BertForTokenClassification", SIZE),
    "bert-qa": ("BertForQuestionAnswering", SIZE | dict(num_labels=2)),
    "bert-lm": ("BertLMHeadModel", SIZE | dict(is_decoder=True)),
    "roberta-mlm": ("RobertaForMaskedLM", FAMILIES["roberta"][1]),
    "distilbert-qa": ("DistilBertForQuestionAnswering", FAMILIES["distilbert"][1] | dict(num_labels=2)),
    "distilbert-choice": ("DistilBertForMultipleChoice", FAMILIES["distilbert"][1]),
    "modernbert-mlm": ("ModernBertForMaskedLM", _MODERNBERT),
    "gpt2-cls": ("GPT2ForSequenceClassification", SIZE),
    "llama-cls": ("LlamaForSequenceClassification", LLAMA),
    "llama-token": ("LlamaForTokenClassification", LLAMA),
    "llama-qa": ("LlamaForQuestionAnswering", LLAMA),
    "t5-cls": ("T5ForSequenceClassification", _T5 | dict(classifier_dropout=0.0)),
    "bart-cls": ("BartForSequenceClassification", _BART),
    "bart-qa": ("BartForQuestionAnswering", _BART),
    "vit-regression": ("ViTForImageClassification", IMAGE | dict(num_labels=1)),
    "resnet": (
        "ResNetForImageClassification",
        dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3),
    ),
}
MODELS = FAMILIES | HEADS  # every model that has a loss of Transformers


class GroupNormResNet(nn.Module):
    """A small residual network with strides, a grouped and a dilated convolution, and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.dilated = nn.Conv2d(8, 8, 3, padding="same", dilation=2)
        self.down = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.classifier = nn.Linear(12, 3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(x)))
        x = x + self.act(self.grouped(x))
        x = x + self.dilated(x)
        return self.classifier(self.down(x).mean((2, 3)))


class MLP(nn.Module):
    """Linear layers; square ones are used twice."""

    def __init__(self, sizes: tuple[int, ...] = (5, 6, 6, 3), bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) if index == 0 else layer(x.tanh())
            if x.shape[-1] == layer.in_features:
                x = layer(x)
        return x


PLAIN: dict[str, type[nn.Module]] = {"resnet-gn": GroupNormResNet, "mlp": MLP}
COVERED = [*FAMILIES, *PLAIN]  # the engine is exact for these, in batches of any size


# ---- models


def config(name: str, **changes: Any) -> Any:
    """Config of a listed model; `changes` replace its arguments."""
    kind, arguments = MODELS[name]
    return getattr(hf, kind).config_class(**arguments | changes, architectures=[kind])


def from_config(config: Any, dtype: torch.dtype = torch.float64) -> Any:
    """The model of a config, with weights away from their initial zeros and ones."""
    torch.manual_seed(0)
    return _move_weights(getattr(hf, config.architectures[0])(config).to(dtype))


def build(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[Any, Callable]:
    """A listed model, with weights away from their initial zeros and ones, and its loss per record."""
    if name not in PLAIN:
        model = from_config(config(name, **changes), dtype)
    else:
        torch.manual_seed(0)
        model = _move_weights(PLAIN[name](**changes).to(dtype))
    return model, loss_of(model)


def make(name: str, **changes: Any) -> Any:
    """A listed model in float64 and in eval mode, where BatchNorm keeps records apart."""
    return build(name, **changes)[0].eval()


def small(name: str, **changes: Any) -> Any:
    """A listed model to train: one layer of width 8, two classes, no dropout, weights as Transformers draws them."""
    less = dict(hidden_size=8, num_hidden_layers=1, intermediate_size=16, max_position_embeddings=16, num_labels=2)
    dropout = ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop")
    made = config(name, **less | dict.fromkeys(dropout, 0.0) | changes)
    torch.manual_seed(0)
    return getattr(hf, made.architectures[0])(made)


def _move_weights(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def with_head(*heads: Head) -> list[str]:
    """Names of the models that have one of these heads."""
    return [name for name, (kind, _) in MODELS.items() if any(kind in HEAD_CLASSES[head] for head in heads)]


# ---- losses and batches


def loss_of(model: nn.Module) -> Callable:
    """(model, batch) -> losses (N,)"""
    return PerSampleLoss(model) if isinstance(base_model(model), hf.PreTrainedModel) else cross_entropy


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Loss of models that map `x` to logits."""
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


def make_batch(model: nn.Module, batch_size: int, length: int = LENGTH, seed: int = 0) -> dict[str, Tensor]:
    """Synthetic records in the model's dtype; rows are padded where the length allows."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    if not isinstance(base_model(model), hf.PreTrainedModel):
        weights = [p for p in model.parameters() if p.dim() > 1]
        shape = (3, 8, 8) if isinstance(model, GroupNormResNet) else weights[0].shape[1:]
        x = torch.randn(batch_size, *shape, generator=generator, dtype=torch.float64).to(dtype)
        return {"x": x, "labels": torch.randint(len(weights[-1]), (batch_size,), generator=generator)}
    batch = synthetic_batch(model, batch_size, max(length, 5), generator)
    if length < 5:
        batch = {k: x[..., :length] if x.dim() > 1 and not x.is_floating_point() else x for k, x in batch.items()}
    return {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()}
