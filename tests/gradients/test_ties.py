"""Choices among equal scores: refused where they matter, wherever torch would take others for a longer row."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import datasets
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from hf_private.gradients.selfcheck import SelfCheckError, self_check
from hf_private.gradients.ties import Choices
from hf_private.tasks.long_rows import longest_of
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch
from tests.support import training, zoo


class Indexed(nn.Module):
    """A classifier that adds the states of the tokens with the highest scores; `how` says what scores they get."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, _ = zoo.build("bert", torch.float32)
        self.how, self.config = how, self.inner.config

    def forward(self, attention_mask: Tensor, **inputs: Tensor) -> hf.modeling_outputs.SequenceClassifierOutput:
        states = self.inner.bert(attention_mask=attention_mask, **inputs).last_hidden_state
        scores = states[..., 0].detach()
        if self.how == "ties":
            scores = (scores - 1).relu()  # 0 for most tokens
        scores = scores.masked_fill(attention_mask == 0, -torch.inf)
        if self.how == "sort":
            chosen = (scores > 0).float().sort(dim=1).indices[:, :2]
        else:
            chosen = scores.topk(2 if self.how != "all" else scores.shape[1], dim=1).indices
        kept = torch.zeros_like(scores).scatter(1, chosen, 1.0) * attention_mask
        logits = self.inner.classifier((states * kept.unsqueeze(2)).sum(1))
        return hf.modeling_outputs.SequenceClassifierOutput(logits=logits)


def check(model: nn.Module) -> str:
    for name, p in model.named_parameters():
        p.requires_grad_("pooler" not in name)
    return self_check(model, PerSampleLoss(model, custom), partial(synthetic_batch, model.inner))


def custom(outputs: hf.modeling_outputs.SequenceClassifierOutput, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, labels, reduction="none")


@pytest.mark.parametrize("how", ["ties", "sort"])
def test_a_choice_among_equal_scores_is_refused(how: str) -> None:
    with pytest.raises(SelfCheckError, match=r"`topk`.*`per_device_train_batch_size=1`"):
        check(Indexed(how))


@pytest.mark.parametrize("how", ["different", "all"])
def test_choices_that_do_not_matter_pass(how: str) -> None:
    """Scores that differ, and masked ones that are equal; or all tokens, in whatever order."""
    assert "exact" in check(Indexed(how))


def tiny(name: str, **sizes: float) -> nn.Module:
    config = getattr(hf, f"{name}Config")(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=101,
        num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_implementation="eager", **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(hf, f"{name}ForCausalLM")(config)


def test_sparse_attention_whose_scores_are_often_zero_is_refused() -> None:
    """Measured: one more token of padding moves a record's gradient by 6 % of its norm, in float64, too."""
    latent = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    model = tiny(
        "AXK2", moe_intermediate_size=32, num_key_value_heads=4, index_n_heads=4, index_head_dim=8, index_topk=2,
        n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1, **latent,
    )  # fmt: skip
    for name, p in model.named_parameters():
        p.requires_grad_("indexer" not in name)
    with pytest.raises(SelfCheckError, match="`topk`"):
        self_check(model, PerSampleLoss(model), partial(synthetic_batch, model))


def test_attention_that_chooses_tokens_of_long_rows_only_is_refused_for_long_records(tmp_path: Path) -> None:
    """Rows of up to 20 tokens are plain attention, and the self-check's first batches are as short as that.

    Measured on records of up to 60 tokens that differ in one token: 1.08 clip norms.
    """
    for longest, refused in ((60, True), (20, False)):
        model = tiny("Doge", keep_window_size=20, num_key_value_heads=2, max_position_embeddings=64)
        records = [{"input_ids": [*range(5, 5 + longest - n)], "labels": 1} for n in range(10)]
        records = [{**record, "labels": record["input_ids"]} for record in records]
        for kind in (list, datasets.Dataset.from_list):
            folder = tmp_path / f"{longest} {kind.__name__}"
            made = training.trainer(folder, model, kind(records), per_device_train_batch_size=4, max_steps=1)
            with pytest.raises(SelfCheckError, match="`topk`") if refused else nullcontext():
                made.train()


def test_the_longest_record_counts_where_the_collator_makes_the_tokens() -> None:
    def collate(records: list[str]) -> dict[str, Tensor]:
        return {"input_ids": torch.ones(len(records), max(map(len, records)))}

    assert longest_of(["a", "abc", "ab"], lambda record: 1, collate) == 3


def test_a_router_that_samples_its_experts_passes() -> None:
    """Each token has random numbers of its own, whatever the other records are."""
    model = tiny("Phimoe", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=9.0)
    model.train()
    loss, batch = PerSampleLoss(model), synthetic_batch(model, 3, 5)
    losses = [loss(model, batch) for _ in range(2)]
    assert not torch.equal(*losses)
    assert "exact" in self_check(model, loss, partial(synthetic_batch, model))


def test_a_router_whose_experts_score_alike_passes() -> None:
    """A row of scores for experts has the same length in every batch."""
    model = tiny("Mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    for name, p in model.named_parameters():
        if "gate.weight" in name:
            nn.init.zeros_(p)
    loss, batch = PerSampleLoss(model), synthetic_batch(model, 3, 5)
    losses = []
    for prefer in ("first", "last"):
        with Choices(prefer):
            losses.append(loss(model, batch))
    assert not torch.equal(*losses)
    assert "exact" in self_check(model, loss, partial(synthetic_batch, model))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_choices_are_torchs_own_where_nothing_is_tied(largest: bool, dim: int) -> None:
    x = torch.randperm(30).view(5, 6).float()
    for prefer in ("first", "last"):
        with Choices(prefer) as choices:
            values, indices = x.topk(3, dim=dim, largest=largest)
            ordered = x.sort(dim=dim, descending=largest)
        assert choices.lengths == {x.shape[dim]}
        assert torch.equal(values, x.topk(3, dim=dim, largest=largest).values)
        assert torch.equal(indices, x.topk(3, dim=dim, largest=largest).indices)
        assert torch.equal(ordered.indices, x.sort(dim=dim, descending=largest).indices)


def test_a_stable_sort_leaves_nothing_open() -> None:
    with Choices("last") as choices:
        assert torch.zeros(4).sort(stable=True).indices.tolist() == [0, 1, 2, 3]
        assert torch.zeros(3).argsort().tolist() == [2, 1, 0]
    assert choices.lengths == {3}
