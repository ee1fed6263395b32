"""A tiny model for every head that losses.py knows, and batches for it."""

import torch
import transformers as hf
from torch import Tensor, nn

from hf_private.tasks.heads import IGNORE_INDEX, Head, head_of
from hf_private.tasks.synthetic import TOKEN_HEADS, synthetic_batch

V, H, B, T = 60, 16, 4, 7
SIZE = {"hidden_size": H, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": V}
CLOSE = {"rtol": 1e-6, "atol": 1e-6, "check_dtype": False}  # some of Transformers' losses round float64 to float32
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(**kw):
    return hf.BertConfig(**SIZE, **DRY, max_position_embeddings=32, num_labels=kw.pop("num_labels", 3), **kw)


def roberta(**kw):
    return hf.RobertaConfig(**SIZE, **DRY, max_position_embeddings=12, type_vocab_size=1, num_labels=3, **kw)


def distilbert(**kw):
    return hf.DistilBertConfig(dim=H, n_heads=2, n_layers=2, hidden_dim=24, vocab_size=V, dropout=0.0, **kw)


def gpt2(**kw):
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
    size = {"n_embd": H, "n_head": 2, "n_layer": 2, "n_positions": 32, "vocab_size": V, "num_labels": 3}
    return hf.GPT2Config(**size, **off, bos_token_id=1, eos_token_id=1, **kw)


def llama(**kw):
    return hf.LlamaConfig(**SIZE, num_key_value_heads=1, pad_token_id=0, num_labels=3, **kw)


def t5():
    size = {"d_model": H, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": V, "num_labels": 3}
    return hf.T5Config(**size, dropout_rate=0.0, classifier_dropout=0.0, decoder_start_token_id=0)


def bart():
    size = {"d_model": H, "vocab_size": V, "max_position_embeddings": 32, "num_labels": 3, "dropout": 0.0}
    sides = {f"{s}_{k}": v for s in ("encoder", "decoder") for k, v in (("layers", 2), ("ffn_dim", 24))}
    return hf.BartConfig(**size, **sides, encoder_attention_heads=2, decoder_attention_heads=2)


def modernbert(**kw):
    special = {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    return hf.ModernBertConfig(**SIZE, **special, num_labels=3, attention_dropout=0.0, local_attention=4, **kw)


def vit(**kw):
    size = {k: v for k, v in SIZE.items() if k != "vocab_size"}
    return hf.ViTConfig(**size, **DRY, image_size=8, patch_size=4, num_labels=kw.pop("num_labels", 3), **kw)


def resnet():
    return hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=3)


def mixtral(**kw):
    kw["experts_implementation"] = "eager"  # the others have no float64
    return hf.MixtralConfig(**SIZE, num_key_value_heads=1, num_local_experts=2, pad_token_id=0, **kw)


CASES = {
    "bert-cls": (hf.BertForSequenceClassification, bert),
    "bert-regression": (hf.BertForSequenceClassification, lambda: bert(num_labels=1)),
    "bert-regression-3": (hf.BertForSequenceClassification, lambda: bert(problem_type="regression")),
    "bert-multi": (hf.BertForSequenceClassification, lambda: bert(problem_type="multi_label_classification")),
    "bert-token": (hf.BertForTokenClassification, bert),
    "bert-qa": (hf.BertForQuestionAnswering, lambda: bert(num_labels=2)),
    "bert-mlm": (hf.BertForMaskedLM, bert),
    "bert-choice": (hf.BertForMultipleChoice, bert),
    "bert-lm": (hf.BertLMHeadModel, lambda: bert(is_decoder=True)),
    "roberta-cls": (hf.RobertaForSequenceClassification, roberta),
    "roberta-mlm": (hf.RobertaForMaskedLM, roberta),
    "distilbert-cls": (hf.DistilBertForSequenceClassification, lambda: distilbert(num_labels=3)),
    "distilbert-qa": (hf.DistilBertForQuestionAnswering, distilbert),
    "distilbert-choice": (hf.DistilBertForMultipleChoice, distilbert),
    "modernbert-mlm": (hf.ModernBertForMaskedLM, modernbert),
    "modernbert-cls": (hf.ModernBertForSequenceClassification, modernbert),
    "gpt2-lm": (hf.GPT2LMHeadModel, gpt2),
    "gpt2-cls": (hf.GPT2ForSequenceClassification, lambda: gpt2(pad_token_id=0)),
    "llama-lm": (hf.LlamaForCausalLM, llama),
    "llama-cls": (hf.LlamaForSequenceClassification, llama),
    "llama-token": (hf.LlamaForTokenClassification, llama),
    "llama-qa": (hf.LlamaForQuestionAnswering, llama),
    "mixtral-lm": (hf.MixtralForCausalLM, mixtral),
    "t5-seq2seq": (hf.T5ForConditionalGeneration, t5),
    "t5-cls": (hf.T5ForSequenceClassification, t5),
    "bart-seq2seq": (hf.BartForConditionalGeneration, bart),
    "bart-cls": (hf.BartForSequenceClassification, bart),
    "bart-qa": (hf.BartForQuestionAnswering, bart),
    "vit-image": (hf.ViTForImageClassification, vit),
    "vit-regression": (hf.ViTForImageClassification, lambda: vit(num_labels=1)),
    "resnet-image": (hf.ResNetForImageClassification, resnet),
}
QA = [name for name in CASES if name.endswith("-qa")]
TEXT = [name for name in CASES if "image" not in name and not name.startswith("vit")]
TOKENS = [name for name in CASES if name.split("-")[1] in ("token", "mlm", "lm", "seq2seq")]


def make(name: str) -> nn.Module:
    """A tiny float64 model, in eval mode so that BatchNorm keeps records apart."""
    cls, config = CASES[name]
    torch.manual_seed(0)
    return cls(config()).double().eval()


def draw(model: nn.Module, seed: int = 0, batch_size: int = B) -> dict[str, Tensor]:
    return synthetic_batch(model, batch_size, T, torch.Generator().manual_seed(seed))


def double(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, grads, strict=True)]
    )


def weights(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """How much of the batch each record is in Transformers' mean: its labelled tokens, or 1."""
    labels = batch.get("labels")
    if head_of(model) not in TOKEN_HEADS:
        return torch.ones(B)
    return (labels[:, 1:] if head_of(model) is Head.CAUSAL_LM else labels).ne(IGNORE_INDEX).sum(-1).double()


def unpadded(batch: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """The record alone, without padding."""
    one = {name: value[row : row + 1] for name, value in batch.items()}
    size = int(one["attention_mask"].sum(-1).max())
    return {k: v[..., :size] if k in ("input_ids", "attention_mask", "token_type_ids") else v for k, v in one.items()}
