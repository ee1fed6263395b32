"""DPSFTTrainer: the update of a for-loop, that of the stock trainer, what it logs, and what it refuses."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

pytest.importorskip("trl", reason="needs the extra `trl`")

from trl import SFTConfig, SFTTrainer  # noqa: E402

from hf_private.integrations.trl import DPSFTTrainer  # noqa: E402
from hf_private.integrations.trl.preparation import unquoted  # noqa: E402
from hf_private.publishing.verify import verify  # noqa: E402
from tests.integrations.trl import runs  # noqa: E402
from tests.support import chats, training, zoo  # noqa: E402


def sft(folder: Path, kind: str = "chat", **settings: Any) -> DPSFTTrainer:
    records = settings.pop("records", None) or chats.made(kind)
    return runs.trainer(DPSFTTrainer, folder, records, settings.pop("model", None) or zoo.small("llama"), **settings)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("text", {}),
        ("prompt", {}),
        ("prompt", {"completion_only_loss": False}),
        ("prompt-chat", {}),
        ("chat", {"assistant_only_loss": True}),
        ("chat", {"assistant_only_loss": True, "gradient_checkpointing": False}),
        ("chat", {"loss_type": "dft"}),
        ("prompt", {"peft_config": LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)}),
    ],
)
def test_the_update_is_that_of_a_for_loop(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    records = chats.made(kind)
    dp = runs.all_records(records) | {"disjoint_data": True}  # below, the adapter does not begin with zeros
    # Llama computes its norms in float32, which the frozen ones around an adapter show
    model = runs.model("gpt2" if "peft_config" in settings else "llama")
    made = sft(tmp_path, kind, records=records, model=model, dp=dp, **runs.SGD, **settings)
    if "peft_config" in settings:
        for name, p in made.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1)

    def objective(record: dict[str, Any]) -> Tensor:
        nll = runs.answer_nll(made.model, record["input_ids"], record["labels"])
        return ((-nll).exp().detach() * nll if settings.get("loss_type") == "dft" else nll).mean()

    runs.assert_update_of_a_loop(made, objective)


def test_only_the_wanted_tokens_are_targets(tmp_path: Path) -> None:
    """What TRL prepares is what the loss counts: the assistant's words, or the completion."""
    for kind, settings in (("chat", {"assistant_only_loss": True}), ("prompt-chat", {})):
        made = sft(tmp_path, kind, **settings)
        for record in made.train_dataset:
            said = [m["content"] for m in record.get("messages") or record["completion"] if m["role"] == "assistant"]
            targets = [token for token in record["labels"] if token != -100]
            kept = [word for word in made.processing_class.decode(targets).split() if word not in chats.SPECIAL]
            assert " ".join(kept) == " ".join(said)


def test_the_weights_are_those_of_the_stock_trainer(tmp_path: Path) -> None:
    """Without noise and clipping, on a full batch of records with as many target tokens each."""
    records = chats.made("text", 6).map(lambda _, i: {"text": f"w{i} w{i + 7} w3 w{2 * i} w9"}, with_indices=True)
    settings = {**runs.SGD, "max_steps": 3, "learning_rate": 0.5, "max_grad_norm": 0.0}
    ours, theirs = runs.model(), runs.model()
    theirs.load_state_dict(ours.state_dict())
    dp = runs.all_records(records, clip_norm=float("inf"))
    sft(tmp_path / "ours", records=records, model=ours, dp=dp, **settings).train()
    args = runs.arguments(SFTConfig, tmp_path / "theirs", **{**settings, "per_device_train_batch_size": 6})
    SFTTrainer(theirs, args, train_dataset=records, processing_class=chats.tokenizer()).train()
    start = training.weights(runs.model())
    moved = training.weights(theirs) - start
    assert moved.norm() > 0.01
    assert (training.weights(ours) - training.weights(theirs)).norm() < 1e-6 * moved.norm()


@pytest.mark.usefixtures("quick_cards")
def test_metrics_of_training_tokens_reach_no_log(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Reporter(training.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append(dict(logs))

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            assert not made._metrics["train"], "TRL has computed none"
            made._metrics["train"]["entropy"].append(1.0)  # as if it had

    evaluated = chats.made("chat", 4, seed=5)
    made = sft(tmp_path, eval_dataset=evaluated, eval_strategy="steps", eval_steps=1, callbacks=[Reporter()])
    made.train()
    training_entries = [entry for entry in (*seen, *made.state.log_history) if "eval_runtime" not in entry]
    names = {name for entry in training_entries for name in entry}
    assert names <= {
        "learning_rate", "epoch", "step", "epsilon", "train_runtime", "train_samples_per_second",
        "train_steps_per_second", "total_flos",
    }  # fmt: skip
    assert any("eval_mean_token_accuracy" in entry for entry in seen), "of other records it is logged"


def test_evaluation_on_training_records_is_refused(tmp_path: Path) -> None:
    made = sft(tmp_path)
    with pytest.raises(ValueError, match="`eval_dataset`"):
        made.evaluate(chats.made("chat"))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("packing", {"packing": True}),
        ("packing", {"packing": True, "packing_strategy": "wrapped"}),
        ("padding_free", {"padding_free": True}),
        ("activation_offloading", {"activation_offloading": True}),
        ("router_aux_loss_coef", {"router_aux_loss_coef": 0.1}),
    ],
)
def test_what_couples_records_is_refused_before_the_dataset_is_read(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    class Unread:
        def __iter__(self) -> Any:
            raise AssertionError("the dataset was read")

    with pytest.raises(ValueError, match=f"`{name}` = "):
        sft(tmp_path, records=Unread(), **settings)


def test_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`train_dataset`"):
        sft(tmp_path, records=chats.made("text").add_column("image", [0] * 12))


def test_the_load_balancing_loss_is_refused(tmp_path: Path) -> None:
    size = {**zoo.LLAMA, "num_local_experts": 2, "router_aux_loss_coef": 0.01, "num_hidden_layers": 1}
    with pytest.raises(ValueError, match="`router_aux_loss_coef`"):
        sft(tmp_path, model=MixtralForCausalLM(MixtralConfig(**size)))


def test_the_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`args`.*SFTConfig"):
        DPSFTTrainer(
            zoo.small("llama"),
            training.arguments(tmp_path),
            train_dataset=chats.made("chat"),
            processing_class=chats.tokenizer(),
            dp_config=runs.DPConfig(noise_multiplier=1.0),
        )


def test_no_record_is_quoted_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL warns with the decoded end of a prompt where the template renders a prompt alone differently."""
    tokenizer = chats.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("{% if add_generation_prompt %}", "{% if true %}")
    tokenizer.chat_template = tokenizer.chat_template.replace("<assistant> {% endif %}", "w53 {% endif %}")
    logger = logging.getLogger("trl.trainer.sft_trainer")
    monkeypatch.setattr(logger, "disabled", False)  # other tests' libraries may have switched it off
    caplog.set_level(logging.WARNING, logger=logger.name)
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    logger.addHandler(caplog.handler)
    try:
        with unquoted():
            logger.warning("out of the sequence: 'w53'. Change the template.")
        args = runs.arguments(SFTConfig, tmp_path)
        DPSFTTrainer(
            zoo.small("llama"),
            args,
            train_dataset=chats.made("prompt-chat"),
            processing_class=tokenizer,
            dp_config=runs.DPConfig(noise_multiplier=1.0),
        )
    finally:
        logger.removeHandler(caplog.handler)
    assert "not shown" in caplog.text and "w53" not in caplog.text


def test_the_card_says_what_the_objective_is(tmp_path: Path) -> None:
    made = sft(tmp_path, dp={"accountant": "prv"})
    made.train()
    made.save_model()
    text = (tmp_path / "README.md").read_text()
    assert "| Objective | supervised fine-tuning, mean over each record's target tokens |" in text
    assert "per record" in text
    assert verify(tmp_path).status == "holds"
    statement = json.loads((tmp_path / "privacy.json").read_text())
    statement["mechanism"]["objective"] = "something else"
    (tmp_path / "privacy.json").write_text(json.dumps(statement))
    assert verify(tmp_path).status == "wrong"


def test_a_rehearsal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="`rehearse`"):
        sft(tmp_path).rehearse()
