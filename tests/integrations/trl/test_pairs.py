"""DPDPOTrainer and DPRewardTrainer: a pair is one record, with a loss of its own and one clipped gradient."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import logsigmoid

pytest.importorskip("trl", reason="needs the extra `trl`")

from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer  # noqa: E402

from hf_private.gradients.selfcheck import SelfCheckError  # noqa: E402
from hf_private.integrations.trl import DPDPOTrainer, DPRewardTrainer  # noqa: E402
from hf_private.integrations.trl.dpo import DPOLoss  # noqa: E402
from hf_private.integrations.trl.objectives import BATCH_LOSSES, OBJECTIVES  # noqa: E402
from hf_private.integrations.trl.pairs import PairCollator  # noqa: E402
from hf_private.spending.ledger import LedgerError  # noqa: E402
from hf_private.tasks.collators import check_collator  # noqa: E402
from hf_private.tasks.micro_batches import CollatorError, LogicalCollator  # noqa: E402
from tests.integrations.trl import runs  # noqa: E402
from tests.support import chats, oracle, training, zoo  # noqa: E402

LORA = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)


def reward_model() -> Any:
    return zoo.small("gpt2-cls", num_labels=1, pad_token_id=0)


def dpo(folder: Path, model: Any = None, **settings: Any) -> DPDPOTrainer:
    model = zoo.small("gpt2") if model is None else model
    if "peft_config" not in settings and not hasattr(model, "peft_config"):
        settings.setdefault("ref_model", copy.deepcopy(model))
    records = settings.pop("records", None) or chats.made("pair")
    return runs.trainer(DPDPOTrainer, folder, records, model, **settings)


def reward(folder: Path, model: Any = None, **settings: Any) -> DPRewardTrainer:
    records = settings.pop("records", None) or chats.made("pair")
    return runs.trainer(DPRewardTrainer, folder, records, model or reward_model(), **settings)


def logps(model: Any, record: dict[str, Any], side: str) -> Tensor:
    """log pi(answer | prompt) by plain torch, on this answer alone."""
    prompt, answer = record["prompt_ids"], record[f"{side}_ids"]
    return -runs.answer_nll(model, [*prompt, *answer], [-100] * len(prompt) + answer).sum()


def moved(model: Any, seed: int = 0) -> Any:
    """The model after a random change, so that it differs from its reference."""
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.add_(0.05 * torch.randn(p.shape, generator=g, dtype=p.dtype))
    return model


# ---- the update


@pytest.mark.parametrize("adapter", [False, True])
def test_the_dpo_update_is_that_of_a_for_loop(tmp_path: Path, adapter: bool) -> None:
    records = chats.made("pair")
    base = runs.model("gpt2")
    if adapter:
        made = dpo(
            tmp_path, base, peft_config=LORA, dp=runs.all_records(records) | {"disjoint_data": True}, **runs.SGD
        )
        moved(torch.nn.ParameterList([p for name, p in made.model.named_parameters() if "lora" in name]))
        reference = runs.model("gpt2")
    else:
        reference = copy.deepcopy(base)
        made = dpo(tmp_path, moved(base), ref_model=copy.deepcopy(reference), dp=runs.all_records(records), **runs.SGD)

    def objective(record: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            ref = logps(reference, record, "chosen") - logps(reference, record, "rejected")
        return -logsigmoid(0.1 * (logps(made.model, record, "chosen") - logps(made.model, record, "rejected") - ref))

    runs.assert_update_of_a_loop(made, objective)


@pytest.mark.parametrize("margin", [False, True])
def test_the_reward_update_is_that_of_a_for_loop(tmp_path: Path, margin: bool) -> None:
    records = chats.made("pair")
    if margin:
        records = records.add_column("margin", [0.1 * i for i in range(len(records))])
    settings = {"center_rewards_coefficient": 0.3} if margin else {}
    made = reward(
        tmp_path, reward_model().double(), records=records, dp=runs.all_records(records), **runs.SGD, **settings
    )

    def objective(record: dict[str, Any]) -> Tensor:
        one, other = (
            made.model(input_ids=torch.tensor([record[f"{side}_ids"]])).logits[0, 0] for side in ("chosen", "rejected")
        )
        loss = -logsigmoid(one - other - record.get("margin", 0))
        return loss + 0.3 * (one + other) ** 2 if margin else loss

    runs.assert_update_of_a_loop(made, objective)


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_the_weights_are_those_of_the_stock_trainer(tmp_path: Path, kind: str) -> None:
    """Without noise and clipping, on a full batch: TRL's loss is a mean over pairs, as ours."""
    records = chats.made("pair", 6)
    settings = {**runs.SGD, "max_steps": 3, "learning_rate": 0.5, "max_grad_norm": 0.0}
    dp = runs.all_records(records, clip_norm=float("inf"))
    ours, theirs = ((reward_model() if kind == "reward" else runs.model("gpt2")).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    start = training.weights(ours)
    common = {"train_dataset": records, "processing_class": chats.tokenizer()}
    config = DPOConfig if kind == "dpo" else RewardConfig
    args = runs.arguments(config, tmp_path / "theirs", **{**settings, "per_device_train_batch_size": 6})
    if kind == "dpo":
        dpo(tmp_path / "ours", ours, records=records, dp=dp, **settings).train()
        DPOTrainer(theirs, copy.deepcopy(theirs), args, **common).train()
    else:
        reward(tmp_path / "ours", ours, records=records, dp=dp, **settings).train()
        RewardTrainer(theirs, args, **common).train()
    change = training.weights(theirs) - start
    assert change.norm() > 1e-3
    assert (training.weights(ours) - training.weights(theirs)).norm() < 1e-5 * change.norm()  # TRL's is in float32


# ---- the loss of a pair


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_of_a_pair_is_trls(tmp_path: Path, name: str) -> None:
    """TRL's own `compute_loss` on a batch of one pair, for each pair of a batch."""
    extra = {"label_smoothing": 0.1} if name in ("exo_pair", "robust") else {}
    policy = moved(zoo.small("gpt2"))
    made = dpo(tmp_path, policy, ref_model=zoo.small("gpt2"), loss_type=name, **extra)
    records = [made.train_dataset[i] for i in range(5)]
    got = made.create_loss(made.model)(made.model, made.training_collator(records))
    wanted = [made.compute_loss(made.model, dict(made.data_collator([one]))).item() for one in records]
    torch.testing.assert_close(got.detach(), torch.tensor(wanted), rtol=1e-4, atol=1e-5)


def test_several_losses_are_weighted(tmp_path: Path) -> None:
    made = dpo(tmp_path, moved(zoo.small("gpt2")), loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.2])
    records = [made.train_dataset[i] for i in range(3)]
    got = made.create_loss(made.model)(made.model, made.training_collator(records))
    wanted = [made.compute_loss(made.model, dict(made.data_collator([one]))).item() for one in records]
    torch.testing.assert_close(got.detach(), torch.tensor(wanted), rtol=1e-4, atol=1e-5)


def test_the_reference_of_a_trained_adapter_is_that_adapter(tmp_path: Path) -> None:
    policy = get_peft_model(zoo.small("gpt2"), LORA)
    moved(torch.nn.ParameterList([p for name, p in policy.named_parameters() if "lora" in name]))
    made = dpo(tmp_path, policy, dp={"disjoint_data": True})
    batch = made.training_collator([made.train_dataset[i] for i in range(3)])
    losses = made.create_loss(made.model)(made.model, batch)
    torch.testing.assert_close(losses.detach(), torch.full((3,), 2.0).log())  # policy and reference agree
    made.train()
    assert all("ref" not in name for name, p in made.model.named_parameters() if p.requires_grad)


# ---- one record


@pytest.mark.parametrize("make", [dpo, reward])
def test_the_sides_of_a_pair_are_clipped_as_one(tmp_path: Path, make: Any) -> None:
    """The norm of a pair's gradient, not those of its rows; alone and in a batch, next to longer pairs."""
    made = make(tmp_path)
    loss, model = made.create_loss(made.model), made.model.double()
    records = [made.train_dataset[i] for i in range(5)]
    batch = made.training_collator(records)
    with oracle.BookKeeper(model, rows_per_record=loss.rows_per_record) as book:
        book.backward(loss(model, batch))
        norms = book.norms()
    alone = [oracle.gradient(model, loss(model, made.training_collator([one])).sum()) for one in records]
    torch.testing.assert_close(norms, oracle.norms(alone), rtol=1e-6, atol=0)


def test_units_of_several_pairs_are_clipped_as_one(tmp_path: Path) -> None:
    """Without noise, the update is the mean over people of their clipped mean gradients."""
    records = chats.made("pair", 6).add_column("who", ["a", "b", "a", "c", "a", "b"])
    clip = 0.05
    dp = {"noise_multiplier": 0.0, "clip_norm": clip, "expected_batch_size": 3, "unit_column": "who"}
    made = reward(tmp_path, reward_model().double(), records=records, dp={**dp, "records_per_unit": 3}, **runs.SGD)
    loss = made.create_loss(made.model)
    of = [oracle.gradient(made.model, loss(made.model, made.training_collator([r])).sum()) for r in made.train_dataset]
    people = [[0, 2, 4], [1, 5], [3]]
    means = [oracle.weighted_sum([of[i] for i in rows], torch.full((len(rows),), 1 / len(rows))) for rows in people]
    norms = oracle.norms(means)
    assert (norms > clip).any()
    total = oracle.weighted_sum(means, (clip / norms).clamp(max=1))
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    made.train()
    for name, p in made.model.named_parameters():
        torch.testing.assert_close(before[name] - p.detach(), total[name] / 3, rtol=1e-6, atol=1e-9)


def test_a_collator_that_mixes_pairs_is_found() -> None:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    class Mixing(DataCollatorForPreference):
        def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
            batch = super().torch_call(examples)
            batch["completion_mask"] = batch["completion_mask"] * batch["completion_mask"].amax(0)
            batch["input_ids"] = batch["input_ids"].roll(1, 0)
            return batch

    records = [{"prompt_ids": [7, 8 + i], "chosen_ids": [9] * (1 + i % 3), "rejected_ids": [11 + i]} for i in range(9)]
    for collator, refused in ((DataCollatorForPreference(0), False), (Mixing(0), True)):
        logical = LogicalCollator(PairCollator(collator), max_rows=4, rows_of=("input_ids",))
        if refused:
            with pytest.raises(CollatorError, match="`input_ids`"):
                check_collator(logical.collate, records, zoo.small("gpt2"))
        else:
            check_collator(logical.collate, records, zoo.small("gpt2"))


def test_a_micro_batch_counts_the_tokens_of_both_sides() -> None:
    record = {"prompt_ids": [1] * 3, "chosen_ids": [2] * 2, "rejected_ids": [3] * 5}
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    logical = LogicalCollator(PairCollator(DataCollatorForPreference(0)), max_rows=9, max_tokens=32)
    sizes = [batch["input_ids"].numel() for batch in logical([record] * 5).micro_batches]
    assert sizes == [32, 32, 16]


def test_a_loss_over_the_batch_is_found_by_the_self_check(tmp_path: Path) -> None:
    class Mean(DPDPOTrainer):
        def create_loss(self, model: Any) -> Any:
            class Coupled(DPOLoss):
                def losses(self, *arguments: Any) -> Tensor:
                    losses = super().losses(*arguments)
                    return losses * losses.mean()

            return Coupled(model, self.args, self._reference)

    model = moved(zoo.small("gpt2"))
    made = runs.trainer(Mean, tmp_path, chats.made("pair"), model, ref_model=zoo.small("gpt2"))
    with pytest.raises((SelfCheckError, RuntimeError), match="`per_device_train_batch_size"):
        made.train()
    assert not (tmp_path / "_dp" / "ledger.jsonl").exists(), "nothing is charged"


# ---- logs, cards, refusals


@pytest.mark.usefixtures("quick_cards")
@pytest.mark.parametrize("make", [dpo, reward])
def test_metrics_of_training_pairs_reach_no_log(tmp_path: Path, make: Any) -> None:
    made = make(tmp_path, eval_dataset=chats.made("pair", 4, seed=5), eval_strategy="steps", eval_steps=1)
    made.train()
    evaluations = [entry for entry in made.state.log_history if "eval_runtime" in entry]
    names = {name for entry in made.state.log_history if entry not in evaluations for name in entry}
    assert not {name for name in names if name.startswith(("reward", "logps", "logits", "entropy", "mean_", "acc"))}
    assert not names & {"loss", "margin", "num_tokens", "min_reward", "train_loss"}
    assert evaluations and not made._metrics["train"]


@pytest.mark.parametrize("make", [dpo, reward])
def test_evaluation_on_training_pairs_is_refused(tmp_path: Path, make: Any) -> None:
    with pytest.raises(ValueError, match="`eval_dataset`"):
        make(tmp_path).evaluate(chats.made("pair"))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(("loss_type", {"loss_type": name}) for name in BATCH_LOSSES),
        ("precompute_ref_log_probs", {"precompute_ref_log_probs": True}),
        ("use_weighting", {"use_weighting": True}),
        ("ld_alpha", {"ld_alpha": 0.5}),
        ("f_divergence_type", {"f_divergence_type": "js_divergence"}),
        ("padding_free", {"padding_free": True}),
    ],
)
def test_what_is_not_a_loss_of_one_pair_is_refused(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"`{name}` = "):
        dpo(tmp_path, **settings)


@pytest.mark.parametrize("make", [dpo, reward])
def test_a_loss_of_ones_own_is_refused(tmp_path: Path, make: Any) -> None:
    with pytest.raises(ValueError, match="`per_sample_loss`"):
        make(tmp_path, per_sample_loss=lambda outputs, labels: outputs)


@pytest.mark.usefixtures("quick_cards")
def test_a_reference_with_a_private_past_of_its_own_is_refused(tmp_path: Path) -> None:
    other = dpo(tmp_path / "other")
    other.train()
    made = dpo(tmp_path / "own", ref_model=copy.deepcopy(other.model))
    with pytest.raises(LedgerError, match="`ref_model`"):
        made.train()
    policy = copy.deepcopy(other.model)
    del policy.forward  # TRL's, which a copy shares with the original
    continued = dpo(tmp_path / "next", policy, ref_model=copy.deepcopy(other.model))
    continued.train()  # the past of both is charged, once
    assert training.steps(tmp_path / "next") == 4
