"""What the self-check finds first, what it restores, and weights with adapters that write to themselves."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_private.gradients import selfcheck
from hf_private.gradients.selfcheck import SelfCheckError, self_check
from hf_private.tasks.synthetic import synthetic_batch
from tests.support import zoo
from tests.support.self_checks import check


def test_weights_that_are_not_finite_are_found_first():
    model, _ = zoo.build("bert", torch.float32)
    with torch.no_grad():
        model.bert.pooler.dense.weight[0, 0] = float("nan")
    with pytest.raises(SelfCheckError, match=r"`bert.pooler.dense.weight`: .*not finite"):
        check(model)


def test_a_model_that_is_random_in_evaluation_mode_is_found_first():
    model, loss = zoo.build("bert", torch.float32)

    def noisy(model, batch):
        return loss(model, batch) * (1 + 0.1 * torch.rand(()))

    with pytest.raises(SelfCheckError, match="`self.training`"):
        check(model, noisy)


def test_a_loss_that_is_not_finite_is_found_first():
    model, loss = zoo.build("bert", torch.float32)
    with pytest.raises(SelfCheckError, match="loss of a synthetic record is inf"):
        check(model, lambda model, batch: loss(model, batch) / 0)


class Counting(nn.Module):
    """A buffer that a forward pass writes, or replaces by a longer one."""

    def __init__(self, replace: bool, dtype: torch.dtype):
        super().__init__()
        self.inner, _ = zoo.build("bert", dtype)
        self.config, self.replace = self.inner.config, replace
        self.register_buffer("seen", torch.zeros(2, dtype=dtype))

    def forward(self, **inputs):
        logits = self.inner(**inputs).logits
        if self.replace:
            self.seen = torch.cat([self.seen, logits.detach().mean().view(1)])
        else:
            self.seen += logits.detach().mean()
        return hf.modeling_outputs.SequenceClassifierOutput(logits=logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replace", [False, True])
def test_buffers_and_weights_are_restored_when_the_check_raises(replace, dtype):
    model = Counting(replace, dtype)
    before, seen = {name: p.detach().clone() for name, p in model.named_parameters()}, model.seen

    def loss(model, batch):
        inputs = {key: x for key, x in batch.items() if key != "labels"}
        return F.cross_entropy(model(**inputs).logits.float(), batch["labels"], reduction="none")

    with pytest.raises(SelfCheckError, match="`seen`"):
        self_check(model, loss, partial(synthetic_batch, model.inner))
    assert model.seen is seen and torch.equal(seen, torch.zeros(2, dtype=dtype))
    assert all(p.dtype == dtype and torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_model_computes_in_float32_whatever_wraps_it():
    """Accelerate puts autocast around the forward method, and keeps the original beside it."""
    model, loss = zoo.build("bert", torch.float32)
    seen = set()
    model.bert.encoder.layer[0].intermediate.dense.register_forward_hook(lambda m, x, y: seen.add(y.dtype))
    model._original_forward, original = model.forward, model.forward
    model.forward = wrapped = torch.autocast("cpu", torch.bfloat16)(original)
    check(model, loss)
    assert seen == {torch.float32} and model.forward is wrapped
    loss(model, synthetic_batch(model, 2, 5))
    assert torch.bfloat16 in seen


def test_a_coupling_that_happens_sometimes_is_seen_in_some_seed():
    """The stated probability of missing one with probability 0.3."""
    seeds = selfcheck.GRADIENT_SEEDS + selfcheck.LOSS_SEEDS
    assert 0.7**seeds < 0.03


def test_passes_are_counted():
    """Forward and backward passes of records, as (forward, backward): no more work than a check of norms only."""
    model, loss = zoo.build("bert", torch.float32)
    passes = []

    def counted(model, batch):
        losses = loss(model, batch)
        passes.append((len(losses), torch.is_grad_enabled()))
        return losses

    check(model, counted)
    backward = sum(records for records, grad in passes if grad)
    forward = sum(records for records, grad in passes if not grad)
    assert (backward, forward) == (27, 60)


def test_it_says_that_it_runs(capsys):
    model, _ = zoo.build("bert", torch.float32)
    check(model, records_meet=False)
    assert "Checking per-sample gradients" in capsys.readouterr().err  # how often it is drawn depends on the machine


class Routed(nn.Module):
    """A linear layer of which PEFT adapts the weight, not the layer."""

    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.gate(x).tanh())


def test_lora_on_the_weight_of_a_linear_layer_passes():
    torch.manual_seed(0)
    model = get_peft_model(Routed(), LoraConfig(r=2, target_modules=[], target_parameters=["gate.weight"]))

    def make(records, length, generator=None):
        return {"x": torch.randn(records, length, 6, generator=generator)}

    assert "exact" in self_check(model, lambda model, batch: model(batch["x"]).square().mean((1, 2)), make)


def test_lora_on_experts_passes():
    """PEFT writes their weights to themselves in each forward pass, which changes nothing."""
    model = get_peft_model(zoo.make("mixtral"), LoraConfig(r=2, target_modules=[], target_parameters=["down_proj"]))
    assert "exact" in check(model)


class Adapted(nn.Module):
    """PEFT's name for the layer below an adapter."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Module()
        self.base_layer.weight = nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.adapter = nn.Linear(6, 6)

    def forward(self, x):
        self.base_layer.weight.data += 1e-3 * x.mean()
        return self.adapter(x @ self.base_layer.weight)


def test_a_layer_with_an_adapter_may_not_change_its_weights():
    def make(records, length, generator=None):
        return {"x": torch.randn(records, length, 6, generator=generator)}

    with pytest.raises(SelfCheckError, match="base_layer.weight`"):
        self_check(Adapted(), lambda model, batch: model(batch["x"]).square().mean((1, 2)), make)
