"""What the self-check takes for rounding, and what for a coupling of records: directions, floors, half precision."""

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_private.gradients.selfcheck import SelfCheckError, self_check
from hf_private.tasks.losses import PerSampleLoss
from tests.support import zoo
from tests.support.self_checks import COUPLES, check, each

BERT = dict(
    vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
PADDED = {  # padding reaches the tokens beside it
    "fnet": lambda: hf.FNetForSequenceClassification(hf.FNetConfig(**BERT)),
    "yoso": lambda: hf.YosoForSequenceClassification(hf.YosoConfig(**BERT)),
    "convbert": lambda: hf.ConvBertForSequenceClassification(
        hf.ConvBertConfig(**BERT, head_ratio=1, conv_kernel_size=3, embedding_size=16)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PADDED)
def test_models_in_which_padding_moves_gradients_are_refused_in_any_precision(name, dtype):
    torch.manual_seed(0)
    model = PADDED[name]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    for p in (p for name, p in model.named_parameters() if "conv_" in name):
        p.requires_grad_(False)
    with pytest.raises(SelfCheckError, match=COUPLES):
        check(model.to(dtype))


def test_a_coupling_that_shows_at_some_lengths_only_is_seen():
    """Doge keeps the four keys of most weight; of equal ones, those that the length of the batch decides."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    model = hf.DogeForCausalLM(hf.DogeConfig(**sizes, keep_window_size=4, pad_token_id=0))
    with pytest.raises(SelfCheckError, match="`topk`"):
        check(model)


def louder_if_padded(model, batch):
    """Losses that grow by a tenth where more than half of a row is padding."""
    losses = PerSampleLoss(model)(model, batch)
    return losses * (1 + 0.1 * (2 * batch["attention_mask"].sum(1) < batch["attention_mask"].shape[1]))


def test_padding_is_checked_for_short_records_too():
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=3))
    with pytest.raises(SelfCheckError, match=COUPLES):
        check(model, louder_if_padded)


def turned(model, batch):
    """Losses whose gradients keep their norms, but turn with the length of the batch: to another logit."""
    inputs = {key: x for key, x in batch.items() if key != "labels"}
    labels = (batch["labels"] + batch["input_ids"].shape[1]) % 3
    losses = F.cross_entropy(model(**inputs).logits, labels, reduction="none")
    return losses - losses.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_of_direction_is_seen(dtype):
    """Neither losses nor norms show it: a fresh head's logits are nearly alike."""
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=3)).to(dtype)
    torch.nn.init.zeros_(model.classifier.weight)
    for name, p in model.named_parameters():
        p.requires_grad_("classifier" in name)
    with pytest.raises(SelfCheckError, match=COUPLES):
        check(model, turned)


def lora_llama():

    torch.manual_seed(0)
    model = zoo.build("llama", torch.float32)[0]
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))


def test_rounding_of_tiny_gradients_is_no_coupling():
    """In a record of two tokens, the queries' gradient is 0 but for rounding."""
    model = lora_llama()
    assert "exact" in check(model)
    with pytest.raises(SelfCheckError, match=COUPLES):  # AUTO-S with such a gamma would scale it up
        check(model, gamma=1e-12)


@pytest.mark.parametrize("scale", [1e-7, 1e-10])
def test_tiny_gradients_are_compared_down_to_the_floor(scale):
    """AUTO-S scales a gradient up by at most 1 / gamma: 1e-8 here is 1e-6 of the clip norm, and no coupling."""
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=3))
    nn.init.zeros_(model.classifier.weight)
    for name, p in model.named_parameters():
        p.requires_grad_("classifier" in name)

    def tiny(model, batch):
        return scale * turned(model, batch)

    if scale > 1e-8:
        with pytest.raises(SelfCheckError, match=COUPLES):
            check(model, tiny, gamma=0.01)
    else:
        assert "exact" in check(model, tiny, gamma=0.01)


class Heads(nn.Module):
    """Two heads on the mean of frozen embeddings."""

    main_input_name = "input_ids"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, 16).requires_grad_(False)
        self.first, self.second = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, input_ids):
        states = self.words(input_ids).mean(1)
        return self.first(states), self.second(states)


def test_a_layer_with_a_tiny_gradient_is_compared_by_itself_if_it_is_clipped_by_itself():
    """`automatic-per-layer` scales it up to the size of the others."""

    def made(size, length, generator=None):
        draw = generator or torch.Generator().manual_seed(0)
        ids = torch.randint(50, (size, length), generator=draw)
        return {"input_ids": ids, "labels": torch.randint(3, (size,), generator=draw)}

    def loss(model, batch):
        """The second head's gradient turns with the number of records."""
        first, second = model(batch["input_ids"])
        faint = 1e-6 * each(second, (batch["labels"] + len(batch["labels"])) % 3)
        return each(first, batch["labels"]) + faint - faint.detach()

    assert "exact" in self_check(Heads(), loss, made)
    with pytest.raises(SelfCheckError, match=COUPLES):
        self_check(Heads(), loss, made, group_of=lambda name: name.rpartition(".")[0])
