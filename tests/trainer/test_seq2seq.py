"""DPSeq2SeqTrainer: the update of a for-loop of its own objective, generation, the best model, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainingArguments

from hf_private.config import DPConfig
from hf_private.trainer.seq2seq import DPSeq2SeqTrainer
from tests.support import oracle, training, zoo
from tests.tasks.test_collators import tokenizer

CLIP = 0.1


def records(count: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    """Sources and targets of different lengths."""
    sources, targets = training.text("itself", count, seed), training.text("itself", count, seed + 100)
    return [{"input_ids": s["input_ids"], "labels": t["labels"]} for s, t in zip(sources, targets, strict=True)]


def trainer(
    folder: Path, name: str = "t5", dp: dict[str, Any] | None = None, cls: type = DPSeq2SeqTrainer, **settings: Any
) -> DPSeq2SeqTrainer:
    model = settings.pop("model", None) or zoo.small(name)
    given = {key: settings.pop(key) for key in ("eval_dataset", "compute_metrics") if key in settings}
    base = training.arguments(folder)
    kept = ("max_steps", "per_device_train_batch_size", "report_to", "disable_tqdm", "use_cpu", "save_strategy")
    shared = {key: getattr(base, key) for key in (*kept, "dataloader_pin_memory")}
    return cls(
        model,
        Seq2SeqTrainingArguments(str(folder), **{**shared, **settings}),
        data_collator=DataCollatorForSeq2Seq(tokenizer()),
        train_dataset=records(),
        dp_config=DPConfig(**{"noise_multiplier": 1.0, "accountant": "rdp", **(dp or {})}),
        **given,
    )


def own_objective(model: Any, record: dict[str, Any], smoothing: float) -> torch.Tensor:
    """The loss that Seq2SeqTrainer computes on a batch of this record alone: torch's own, nothing of hf_private."""
    labels = torch.tensor([record["labels"]])
    logits = model(input_ids=torch.tensor([record["input_ids"]]), labels=labels).logits
    return torch.nn.functional.cross_entropy(logits[0], labels[0], label_smoothing=smoothing)


@pytest.mark.parametrize(("name", "smoothing"), [("t5", 0.0), ("t5", 0.2), ("bart", 0.2)])
def test_the_update_is_that_of_a_for_loop(tmp_path: Path, name: str, smoothing: float) -> None:
    """Full batch, no noise, one step of SGD: W - lr / B * (sum of clipped gradients)."""
    model = zoo.small(name, dropout_rate=0.0, dropout=0.0).double()
    size = len(records())
    gradients = [oracle.gradient(model, own_objective(model, one, smoothing)) for one in records()]
    norms = oracle.norms(gradients)
    assert (norms > CLIP).any(), "some records must be clipped"
    total = oracle.weighted_sum(gradients, (CLIP / norms).clamp(max=1))
    wanted = {key: p.detach() - total[key] / size for key, p in model.named_parameters()}
    made = trainer(
        tmp_path,
        model=model,
        dp={"noise_multiplier": 0.0, "clip_norm": CLIP, "expected_batch_size": size},
        label_smoothing_factor=smoothing,
        per_device_train_batch_size=5,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
    )
    made.train()
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), wanted[key], rtol=0, atol=1e-6 * float(total[key].norm() / size + 1e-6))


@pytest.mark.usefixtures("quick_cards")
def test_it_generates_and_keeps_the_best_model(tmp_path: Path) -> None:
    seen = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {"score": [0.1, 0.9, 0.2][min(len(seen), 3) - 1]}

    made = trainer(
        tmp_path,
        model=zoo.small("t5", num_decoder_layers=1),  # as many as `num_layers`, which the cache of generation counts
        predict_with_generate=True,
        generation_max_length=7,
        eval_dataset=records(6, seed=7),
        compute_metrics=metrics,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="score",
    )
    made.train()
    assert seen[0].ndim == 2 and seen[0].dtype.kind == "i", "token ids, not logits"
    assert made.state.best_model_checkpoint.endswith("checkpoint-2")
    assert training.steps(tmp_path) == 3, "all steps are charged, whichever model is kept"
    names = {name for entry in made.state.log_history for name in entry}
    assert "eval_score" in names and not names & {"loss", "grad_norm", "train_loss"}


def test_plain_training_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`args`.*got TrainingArguments"):
        DPSeq2SeqTrainer(zoo.small("t5"), training.arguments(tmp_path), dp_config=DPConfig(noise_multiplier=1.0))


def test_a_loss_of_the_batch_is_refused(tmp_path: Path) -> None:
    class Mine(DPSeq2SeqTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    with pytest.raises(ValueError, match="`compute_loss`"):
        trainer(tmp_path, cls=Mine)
