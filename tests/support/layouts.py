"""Models whose layers do not all have the records in front, and modules that use a parameter in their own way.

Each is exact or refused at every batch size and length, never wrong.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_private.tasks.losses import PerSampleLoss

BERT = dict(
    vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=64, pad_token_id=1, bos_token_id=0, eos_token_id=2,
)  # fmt: skip
SEQ2SEQ = dict(
    vocab_size=37, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
)  # fmt: skip
XLNET = dict(vocab_size=37, d_model=16, n_layer=2, n_head=2, d_inner=24)


def lora(model: nn.Module, targets: list[str]) -> nn.Module:
    """LoRA on some layers, with B away from zero."""
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, task_type=None))
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                p.normal_(std=0.3)
    return adapted


def led() -> nn.Module:
    config = hf.LEDConfig(
        **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}, attention_window=4,
        max_encoder_position_embeddings=64, max_decoder_position_embeddings=64,
    )  # fmt: skip
    return hf.LEDForConditionalGeneration(config)


def reformer() -> nn.Module:
    config = hf.ReformerConfig(
        vocab_size=37, hidden_size=16, num_attention_heads=2, attention_head_size=8, feed_forward_size=24,
        attn_layers=["local", "local"], axial_pos_embds=False, max_position_embeddings=64, is_decoder=False,
        local_attn_chunk_length=4, hidden_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0,
        num_labels=3, pad_token_id=0,
    )  # fmt: skip
    return hf.ReformerForSequenceClassification(config)


def wav2vec2_bert() -> nn.Module:
    config = hf.Wav2Vec2BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        feature_projection_input_dim=5,
        position_embeddings_type="relative_key", left_max_position_embeddings=4, right_max_position_embeddings=2,
        conv_depthwise_kernel_size=3, num_labels=3, classifier_proj_size=8, apply_spec_augment=False,
    )  # fmt: skip
    return hf.Wav2Vec2BertForSequenceClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blenderbot": lambda: hf.BlenderbotForConditionalGeneration(hf.BlenderbotConfig(**SEQ2SEQ)),
    "blenderbot-lora": lambda: lora(
        hf.BlenderbotForConditionalGeneration(hf.BlenderbotConfig(**SEQ2SEQ)), ["q_proj", "fc1"]
    ),
    "bigbird-pegasus": lambda: hf.BigBirdPegasusForConditionalGeneration(
        hf.BigBirdPegasusConfig(**SEQ2SEQ, attention_type="original_full")
    ),
    "mpnet": lambda: hf.MPNetForSequenceClassification(hf.MPNetConfig(**BERT, num_labels=3)),
    "longformer": lambda: hf.LongformerForSequenceClassification(
        hf.LongformerConfig(**BERT, attention_window=4, num_labels=3)
    ),
    "led": led,
    "xlnet-lora": lambda: lora(
        hf.XLNetForSequenceClassification(hf.XLNetConfig(**XLNET, num_labels=3)), ["layer_1", "layer_2", "summary"]
    ),
    "diffllama": lambda: hf.DiffLlamaForCausalLM(hf.DiffLlamaConfig(**BERT, num_key_value_heads=2)),
    "reformer": reformer,
    "wav2vec2-bert": wav2vec2_bert,
}


class Text(nn.Module):
    """Words, then one layer under test, then a head: (B, T) -> (B, 3)."""

    main_input_name = "input_ids"

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(37, 6), layer, nn.Linear(6, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.layer(self.words(input_ids)).tanh().mean(1))


class Positions(nn.Module):
    """A table of positions, looked up by ids (T,), (1, T), (T, T) or (T, 1)."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.table, self.shape = nn.Embedding(64, 6), shape

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1])
        if self.shape == "T, T":
            return x + self.table((ids[:, None] - ids[None]).abs()).mean(1)
        return x + self.table(ids.unsqueeze(0) if self.shape == "1, T" else ids)


class Classes(nn.Module):
    """An embedding of one id per record, (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 6)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.detach().sum((1, 2)) * 1000).long() % 32 * 2  # consecutive ids are taken for positions, and refused
        return x + self.table(ids).unsqueeze(1)


class Queries(nn.Module):
    """Learned queries (Q,) that the model multiplies with every record."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("qd,btd->bqt", self.table(torch.arange(4)), x).softmax(-1)
        return scores @ x


class TimeFirst(nn.Module):
    """Linear, norm and embedding-like layers on (T, B, d), or on (T * B, d)."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.linear, self.norm, self.flat = nn.Linear(6, 6), nn.LayerNorm(6), flat

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        y = self.norm(self.linear(y.flatten(0, 1) if self.flat else y))
        return y.view(x.shape[1], x.shape[0], -1).transpose(0, 1)


class Flattened(TimeFirst):
    """The same on (B * T, d), as in OPT."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x.flatten(0, 1))).view(x.shape)


class Own(nn.Module):
    """One parameter, used by a function of it and the input."""

    def __init__(self, shape: tuple[int, ...], use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.use = nn.Parameter(torch.randn(shape)), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.a)


class Attention(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.inner, self.batch_first = nn.MultiheadAttention(6, 2, batch_first=batch_first), batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        y = self.inner(x, x, x)[0]
        return y if self.batch_first else y.transpose(0, 1)


class Routed(nn.Module):
    """Tokens in the order of their first feature, as a mixture of experts sorts them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        order = flat[:, 0].argsort()
        return self.linear(flat[order])[order.argsort()].view(x.shape)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "positions (T,)": lambda: Positions("T"),
    "positions (1, T)": lambda: Positions("1, T"),
    "class of each record": Classes,
    "queries": Queries,
    "distances (T, T)": lambda: Positions("T, T"),
    "time first": TimeFirst,
    "time first, flat": lambda: TimeFirst(flat=True),
    "records first, flat": Flattened,
    "attention": lambda: Attention(True),
    "attention, time first": lambda: Attention(False),
    "routed": Routed,
    "scale": lambda: Own((6,), lambda x, a: x * a),
    "mean": lambda: Own((6,), lambda x, a: x * a.mean()),
    "sum of sigmoids": lambda: Own((6,), lambda x, a: x * a.sigmoid().sum()),
    "softmax": lambda: Own((6,), lambda x, a: x * a.softmax(0)),
    "divided by its length": lambda: Own((6,), lambda x, a: x * a / len(a)),
    "first row": lambda: Own((1, 3, 6), lambda x, a: x + a[0].sum(0)),
    "class token": lambda: Own((1, 1, 6), lambda x, a: torch.cat([a.expand(len(x), -1, -1), x], 1)),
    "scale, time first": lambda: Own((6,), lambda x, a: (x.transpose(0, 1) * a).transpose(0, 1)),
    "matrix": lambda: Own((6, 6), lambda x, a: x @ a),
    "linear function": lambda: Own((6, 6), F.linear),
}


def build(name: str) -> tuple[nn.Module, Callable]:
    """A model in float64 and eval mode, and its loss."""
    torch.manual_seed(0)
    if name in LAYERS:
        model = Text(LAYERS[name]())

        def loss(model: nn.Module, batch: dict) -> Tensor:
            return F.cross_entropy(model(batch["input_ids"]), batch["labels"], reduction="none")
    else:
        model = MODELS[name]()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
        loss = audio_loss if name == "wav2vec2-bert" else PerSampleLoss(model)
    return model.double().train(name == "reformer"), loss


def audio_loss(model: nn.Module, batch: dict) -> Tensor:
    return F.cross_entropy(model(batch["input_features"]).logits, batch["labels"], reduction="none")


def make_batch(name: str, model: nn.Module, batch_size: int, length: int) -> dict[str, Tensor]:
    """Records without padding."""
    generator = torch.Generator().manual_seed(batch_size * 100 + length)
    labels = torch.randint(3, (batch_size,), generator=generator)
    if name == "wav2vec2-bert":
        features = torch.randn(batch_size, length, 5, generator=generator).double()
        return {"input_features": features, "labels": labels}
    ids = torch.randint(3, 37, (batch_size, length), generator=generator)
    if name in LAYERS:
        return {"input_ids": ids, "labels": labels}
    if type(model).__name__.endswith("ConditionalGeneration") or "blenderbot" in name:
        targets = torch.randint(3, 37, (batch_size, length), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": targets} | {
            "decoder_input_ids": targets.roll(1, 1)
        }
    labels = ids if "Causal" in type(model).__name__ else labels
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
