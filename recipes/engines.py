"""Models, batches and engines of the benchmark. An engine prepares a model and returns one step.

A step is a forward and a backward pass; private engines also clip and sum, without noise and optimizer. The engines of
other libraries are in peers.py.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_private.gradients import onednn
from hf_private.gradients.bookkeeper import BookKeeper, trainable
from hf_private.gradients.method import Method
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.units import UnitBatch
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.methods.gep.config import AnchorConfig
from hf_private.methods.gep.public_data import AnchorBooks
from hf_private.methods.registry import resolve_method
from hf_private.tasks.losses import PerSampleLoss

NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
Step = Callable[[], None]


# ---- models and batches


def bert(**changes: Any) -> hf.PreTrainedModel:
    return hf.BertForSequenceClassification(hf.BertConfig(**NO_DROPOUT, **changes))


def minilm() -> hf.PreTrainedModel:
    return bert(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)


def roberta() -> hf.PreTrainedModel:
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(**NO_DROPOUT, max_position_embeddings=514))


def gpt2(tied: bool) -> hf.PreTrainedModel:
    config = hf.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, tie_word_embeddings=tied)
    return hf.GPT2LMHeadModel(config)


def llama() -> hf.PreTrainedModel:
    config = hf.LlamaConfig(
        vocab_size=32000, hidden_size=640, intermediate_size=1728, num_hidden_layers=12, num_attention_heads=10,
        num_key_value_heads=5,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def vit() -> hf.PreTrainedModel:
    return hf.ViTForImageClassification(hf.ViTConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def deberta() -> hf.PreTrainedModel:
    """DeBERTa-v3-small, with fewer words."""
    config = hf.DebertaV2Config(
        **NO_DROPOUT, vocab_size=32000, hidden_size=768, num_hidden_layers=6, num_attention_heads=12,
        type_vocab_size=0, intermediate_size=3072, relative_attention=True, position_buckets=256,
        norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False,
        max_relative_positions=-1,
    )  # fmt: skip
    return hf.DebertaV2ForSequenceClassification(config)


def moe() -> hf.PreTrainedModel:
    """A mixture of 8 experts, of which each token goes to two."""
    config = hf.MixtralConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, num_local_experts=8, use_cache=False,
    )  # fmt: skip
    return hf.MixtralForCausalLM(config)


def whisper() -> hf.PreTrainedModel:
    """Whisper-base on six seconds of sound."""
    config = hf.WhisperConfig(
        d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8,
        encoder_ffn_dim=2048, decoder_ffn_dim=2048, max_source_positions=300, use_cache=False,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


def wav2vec2() -> hf.PreTrainedModel:
    """wav2vec2 of half the depth; the weight of its convolution over positions is computed."""
    config = hf.Wav2Vec2Config(
        num_hidden_layers=6, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
        final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False, do_stable_layer_norm=True,
        feat_extract_norm="layer",
    )  # fmt: skip
    model = hf.Wav2Vec2ForSequenceClassification(config)
    model.wav2vec2.masked_spec_embed.requires_grad_(False)
    return model


def funnel() -> hf.PreTrainedModel:
    """Funnel of half the depth with factorized attention: no rule knows how it uses the weights of its distances."""
    config = hf.FunnelConfig(
        vocab_size=32000, block_sizes=[2, 2, 2], attention_type="factorized", hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    return hf.FunnelForTokenClassification(config)


MODELS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "bert": bert,
    "roberta": roberta,
    "minilm": minilm,
    "gpt2": lambda: gpt2(tied=True),
    "gpt2untied": lambda: gpt2(tied=False),
    "llama": llama,
    "vit": vit,
    "deberta": deberta,
    "moe": moe,
    "whisper": whisper,
    "wav2vec2": wav2vec2,
    "funnel": funnel,
}


def in_half_precision(model: nn.Module) -> None:
    """Run the model's forward pass in bfloat16 autocast, as Accelerate does for `bf16=True`."""
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)


def make_batch(model: hf.PreTrainedModel, name: str, batch_size: int, length: int) -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(batch_size, 3, 224, 224), "labels": torch.randint(2, (batch_size,))}
    ids = torch.randint(1000, 20000, (batch_size, length))
    if name == "whisper":
        features = torch.randn(batch_size, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        return {"input_features": features, "labels": ids}
    if name == "wav2vec2":  # `length` frames of 20 ms
        return {"input_values": torch.randn(batch_size, 320 * length + 80), "labels": torch.randint(2, (batch_size,))}
    if name == "funnel":
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(2, ids.shape)}
    labels = ids if model.config.model_type in ("gpt2", "llama", "mixtral") else torch.randint(2, (batch_size,))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


# ---- engines


def plain(model: nn.Module, batch: dict) -> Step:
    """Ordinary training, with the model's own loss."""
    parameters = list(trainable(model).values())

    def step() -> None:
        model(**batch).loss.backward()
        for p in parameters:
            p.grad = None

    return step


def loop(model: nn.Module, batch: dict) -> Step:
    """What book-keeping replaces: the records one after the other, each clipped to 1."""
    parameters = list(trainable(model).values())
    records = [{key: x[n : n + 1] for key, x in batch.items()} for n in range(len(batch["labels"]))]

    def step() -> None:
        sums = [torch.zeros_like(p) for p in parameters]
        for record in records:
            grads = torch.autograd.grad(model(**record).loss, parameters, materialize_grads=True)
            norm = torch.stack([g.norm() for g in grads]).norm()
            torch._foreach_add_(sums, grads, alpha=float((1 / norm).clamp(max=1)))

    return step


def private(model: nn.Module, batch: dict, carriers: CarrierConfig | None = None) -> Step:
    return with_method(model, batch, resolve_method(carriers, model, seed=0))


def units(model: nn.Module, batch: dict) -> Step:
    """Book-keeping of units: four rows each, if there are so many, whose mean gradient is clipped."""
    return with_method(model, batch, resolve_method(None, model, seed=0), math.gcd(4, len(batch["labels"])))


def own_products(model: nn.Module, batch: dict) -> Step:
    """Book-keeping with the products of `torch.mm` alone, as plain training: see gradients/onednn.py."""
    run = private(model, batch)

    def step() -> None:
        with patch.object(onednn, "is_faster", lambda: False):
            run()

    return step


def with_method(model: nn.Module, batch: dict, method: Method, rows: int = 1) -> Step:
    """One micro-batch. Carriers, anchor subspaces and the open book belong to the logical step, which has many
    micro-batches, so they are made once. `rows` of them are one unit."""
    method.attach(trainable(model))
    loss = PerSampleLoss(model)
    clipping = Clipping("flat", 1.0)
    method.begin_step(0)
    book = BookKeeper(model, method).__enter__()  # stays open: nothing else uses this model
    # The self-check before a run has found on small batches where each layer has its records.
    for rows_of_one in sorted({1, rows}):
        book.rows_per_record = rows_of_one
        few = UnitBatch({key: value[: 2 * rows_of_one] for key, value in batch.items()}, rows_of_one, rows_of_one)
        book.backward(few.losses(loss(model, few.batch), book.num_rows))
        book.pop_entries()
    part = UnitBatch(batch, rows, rows)

    def step() -> None:
        book.backward(part.losses(loss(model, batch), len(batch["labels"])))
        method.add_clipped_sums(book.pop_entries(), clipping, {})

    return step


def lora(model: hf.PreTrainedModel) -> nn.Module:
    head = [name for name in ("classifier", "score") if hasattr(model, name)]
    in_first = model.config.model_type == "gpt2"  # its Conv1D has its weights the other way round
    config = LoraConfig(r=8, target_modules="all-linear", modules_to_save=head or None, fan_in_fan_out=in_first)
    adapted = get_peft_model(model, config)
    for name, p in adapted.named_parameters():
        if "lora_B" in name:  # 0 before the first step only, where the gradient of A is 0 too
            nn.init.normal_(p, std=0.02)
    return adapted


def anchors(model: nn.Module, public: Callable[[int], Iterator[dict]], num_anchors: int = 64, k: int = 64) -> Method:
    """GEP on what is trainable, one basis for each block of the model."""
    config = AnchorConfig(k=k, num_anchors=num_anchors, groups="stage")
    method = config.build(model)
    method.books = AnchorBooks(model, PerSampleLoss(model), public)
    return method


def gep(model: hf.PreTrainedModel, batch: dict) -> Step:
    """GEP on LoRA's weights: a basis of whole models would be k times as large as they are."""
    adapted = lora(model)
    return with_method(adapted, batch, anchors(adapted, lambda step: iter([batch])))


def frozen(model: hf.PreTrainedModel, batch: dict) -> Step:
    """The yardstick for carriers: input gradients down to the first layer, and no weight gradient."""
    model.requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(lambda _m, _i, y: y.requires_grad_())
    return lambda: model(**batch).loss.backward()


OURS: dict[str, Callable[[hf.PreTrainedModel, dict], Step]] = {
    "plain": plain,
    "bk": private,
    "bk-mm": own_products,
    "bk-units": units,
    "rgp": lambda model, batch: private(model, batch, CarrierConfig(r=8)),
    "lsg": lambda model, batch: private(model, batch, CarrierConfig(r=8, sparsity=0.3)),
    "frozen": frozen,
    "lora": lambda model, batch: plain(lora(model), batch),
    "lora-bk": lambda model, batch: private(lora(model), batch),
    "lora-gep": gep,
}
