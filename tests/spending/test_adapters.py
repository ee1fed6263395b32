"""Promise 1 for adapters: exact in batches."""

import pytest
import torch
from peft import (
    FourierFTConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    RandLoraConfig,
    VBLoRAConfig,
    VeraConfig,
    get_peft_model,
)
from torch import nn

from hf_private.gradients.bookkeeper import BookKeeper, trainable
from tests.support import zoo
from tests.support.oracle import assert_exact

LORA = [name for name in zoo.FAMILIES if name not in ("bert-mlm", "bert-choice")]


@pytest.mark.parametrize("name", LORA)
def test_lora_is_exact(name):
    model, loss = zoo.build(name)
    heads = [head for head in ("classifier", "score") if hasattr(model, head) and name != "distilbert"]
    config = LoraConfig(
        r=2, target_modules="all-linear", lora_dropout=0.0, modules_to_save=heads or None, use_rslora=name == "bert"
    )
    model = get_peft_model(model, config)
    for p in trainable(model).values():
        p.data.add_(0.1 * torch.randn_like(p))
    model.double().eval()
    assert_exact(model, zoo.loss_of(model), zoo.make_batch(model, batch_size=3))


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]),
        PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
        LoraConfig(r=2, target_modules=["word_embeddings", "query"]),
    ],
    ids=["ia3", "prefix", "embedding-lora"],
)
def test_other_adapters_are_exact(config):
    model, _ = zoo.build("bert")
    model = get_peft_model(model, config).double().eval()
    for p in trainable(model).values():
        p.data.add_(0.1 * torch.randn_like(p))
    assert_exact(model, zoo.loss_of(model), zoo.make_batch(model, batch_size=3))


PROMPT = dict(num_virtual_tokens=3, encoder_hidden_size=8)
NAMES = {"bert": ["query", "value"], "llama": ["q_proj", "down_proj"]}


@pytest.mark.parametrize("kind", ["dora", "vera", "lokr", "prompt", "p-tuning", "p-tuning with an LSTM"])
@pytest.mark.parametrize("name", NAMES)
def test_adapters_that_compute_their_weights_are_exact_in_batches(name, kind):
    task, names = ("SEQ_CLS" if name == "bert" else "CAUSAL_LM"), NAMES[name]
    config = {
        "dora": LoraConfig(r=2, target_modules=names, use_dora=True),
        "vera": VeraConfig(r=2, target_modules=names),
        "lokr": LoKrConfig(r=2, target_modules=names),
        "prompt": PromptTuningConfig(task_type=task, num_virtual_tokens=3),
        "p-tuning": PromptEncoderConfig(task_type=task, **PROMPT),
        "p-tuning with an LSTM": PromptEncoderConfig(task_type=task, encoder_reparameterization_type="LSTM", **PROMPT),
    }[kind]
    model = get_peft_model(zoo.make(name), config).double().eval()
    for p in trainable(model).values():
        p.data.add_(0.1 * torch.randn_like(p))
    loss = zoo.loss_of(model)
    for size, length in ((1, 7), (4, 8), (3, 7)):
        assert_exact(model, loss, zoo.make_batch(model, size, length))


OWN_FUNCTIONS = {
    "oft": lambda names: OFTConfig(r=0, oft_block_size=4, target_modules=names),
    "oft by a solver": lambda n: OFTConfig(r=0, oft_block_size=4, target_modules=n, use_cayley_neumann=False),
    "loha": lambda names: LoHaConfig(r=2, target_modules=names),
    "fourier": lambda names: FourierFTConfig(n_frequency=10, target_modules=names),
    "vb-lora": lambda names: VBLoRAConfig(r=2, num_vectors=8, vector_length=8, topk=2, target_modules=names),
    "randlora": lambda names: RandLoraConfig(r=2, target_modules=names),
}


@pytest.mark.parametrize("kind", OWN_FUNCTIONS)
def test_adapters_with_functions_of_their_own_are_exact_in_batches(kind):
    """OFT writes its weights into an empty matrix, LoHa has a gradient of its own, VB-LoRA one bank of vectors."""
    model = get_peft_model(zoo.make("llama"), OWN_FUNCTIONS[kind](NAMES["llama"])).double().eval()
    for p in trainable(model).values():
        p.data.add_(0.1 * torch.randn_like(p))
    loss = zoo.loss_of(model)
    for size, length in ((1, 7), (5, 7), (4, 8), (3, 7)):
        assert_exact(model, loss, zoo.make_batch(model, size, length), tolerance=1e-7)


class Written(nn.Module):
    """Writes a weight into a matrix that it has just made. `alias` reads that past the tensor that was written to."""

    def __init__(self, alias: bool) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4)
        self.alias = alias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(4, 4, dtype=x.dtype)
        before = made.view(16)
        made[:3] = self.weight
        made.add_(1.0)
        return self.scale(x) @ (before.view(4, 4) if self.alias else made)


def test_a_weight_that_is_written_into_a_matrix_is_exact():
    model = Written(alias=False).double()
    for records in (5, 4, 1):
        x = torch.randn(records, 4, 4, dtype=torch.float64)
        assert_exact(model, lambda m, batch: m(batch["x"]).square().sum((1, 2)), {"x": x})


def test_what_reads_a_written_matrix_past_its_copies_is_seen():
    """Its gradient would be lost; instead nothing that it gives is finite, so the self-check stops."""
    model, x = Written(alias=True).double(), torch.randn(5, 4, 4, dtype=torch.float64)
    with BookKeeper(model) as book:
        book.backward(model(x).square().sum((1, 2)))
        assert not book.norms().isfinite().any()


def test_the_loss_behind_a_prompt_is_that_of_peft():
    model = get_peft_model(zoo.make("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    batch = zoo.make_batch(model.double(), batch_size=1)
    torch.testing.assert_close(zoo.loss_of(model)(model, batch)[0].float(), model(**batch).loss.float())
