"""What comes between the checks and a step: inputs, gradients and forward passes that somebody changes later."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification, TrainerCallback
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_private.config import DPConfig
from hf_private.gradients.layers import UncoveredError
from hf_private.gradients.selfcheck import SelfCheckError
from hf_private.tasks.micro_batches import CollatorError
from hf_private.trainer.trainer import DPTrainer
from tests.support import training, zoo


def made(kind: type[DPTrainer], folder: Path, model: Any = None, **settings: Any) -> DPTrainer:
    """A trainer of a class of its own, on the usual records."""
    return kind(
        model or zoo.small("bert"),
        training.arguments(folder, max_steps=2),
        dp_config=DPConfig(noise_multiplier=1.0, accountant="rdp"),
        train_dataset=training.text(),
        data_collator=training.Padding(),
        **settings,
    )


class MixesInputs(DPTrainer):
    """Trainers for images mix their batches here, on the device."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)
        ids = prepared["input_ids"]
        return {**prepared, "input_ids": torch.where(ids > 30, ids.roll(1, 0), ids)}


class MovesInputs(DPTrainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return {name: x + 0 for name, x in super()._prepare_inputs(inputs).items()}


class AddsAfterTheNoise(DPTrainer):
    """A regulariser, or whatever else: it sees no noise."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        for p in self.model.parameters():
            p.grad.add_(0.1 * p.detach())
        return loss


class ReplacesGradients(DPTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.model.classifier.bias.grad = torch.ones(2)
        return loss


class AddsToTheData(DPTrainer):
    """What is written to `.data` leaves the counter of writes."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.model.classifier.bias.grad.data[0] += 1e-3
        return loss


class AddsWhereTrainerClips(DPTrainer):
    def _clip_grad_norm(self, model: Any) -> None:
        model.classifier.bias.grad.data[0] += 1e-3


class MixesFirstTokens(DPTrainer):
    """The largest of a batch: the record that has it does not change."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)
        ids = prepared["input_ids"].clone()
        ids[:, 0] = ids[:, 0].max()
        return {**prepared, "input_ids": ids}


def test_inputs_that_a_subclass_mixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CollatorError, match="`input_ids`"):
        made(MixesInputs, tmp_path / "mixes").train()
    with pytest.raises(CollatorError, match="`input_ids` of a record changes"):
        made(MixesFirstTokens, tmp_path / "largest").train()
    made(MovesInputs, tmp_path / "moves").train()


@pytest.mark.parametrize("kind", [AddsAfterTheNoise, ReplacesGradients, AddsToTheData, AddsWhereTrainerClips])
def test_gradients_are_left_as_the_mechanism_wrote_them(tmp_path: Path, kind: type[DPTrainer]) -> None:
    with pytest.raises(RuntimeError, match="`training_step`"):
        made(kind, tmp_path).train()


class Shrinks(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for p in model.parameters():
            p.grad.mul_(0.5)


def test_a_callback_may_process_private_gradients(tmp_path: Path) -> None:
    made(DPTrainer, tmp_path, callbacks=[Shrinks()]).train()


class Hooks(TrainerCallback):
    """Registers a forward hook that lets records meet, where no gradient shows it."""

    def __init__(self, event: str) -> None:
        self.handle: Any = None
        setattr(self, event, self.register)

    def register(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.handle is None:
            self.handle = model.bert.register_forward_hook(self.mix)

    def mix(self, module: Any, inputs: Any, output: Any) -> Any:
        output.pooler_output = output.pooler_output - output.pooler_output.detach().mean(0)
        return output


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin", "on_step_end"])
def test_a_hook_that_comes_after_the_self_check_is_refused(tmp_path: Path, event: str) -> None:
    with pytest.raises(RuntimeError, match="`bert`"):
        made(DPTrainer, tmp_path, callbacks=[Hooks(event)]).train()


def test_a_forward_method_that_comes_after_the_self_check_is_refused(tmp_path: Path) -> None:
    class Replaces(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            plain = model.classifier.forward
            model.classifier.forward = lambda x: plain(x - x.detach().mean(0))

    with pytest.raises(RuntimeError, match="`classifier`"):
        made(DPTrainer, tmp_path, callbacks=[Replaces()]).train()


class Mixes(torch.nn.Module):
    """No parameters, and no gradient that shows what it does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.detach().mean(0)


def mix_backward(module: Any, inputs: tuple, outputs: tuple) -> tuple:
    return tuple(None if g is None else g - g.mean(0, keepdim=True) for g in inputs)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "backward hook": lambda model: model.classifier.register_full_backward_hook(mix_backward),
    "module": lambda model: setattr(model, "dropout", Mixes()),
    "module of torch": lambda model: setattr(model, "dropout", torch.nn.BatchNorm1d(8, affine=False)),
    "class": lambda model: setattr(model.dropout, "__class__", type("Mixing", (Mixes, torch.nn.Dropout), {})),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_couples_records_after_the_self_check_is_refused(tmp_path: Path, name: str) -> None:
    class Changes(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            CHANGES[name](model)

    with pytest.raises(RuntimeError, match=r"`[\w.]*(classifier|dropout)` must"):
        made(DPTrainer, tmp_path, callbacks=[Changes()]).train()
    assert not (tmp_path / "_dp" / "ledger.jsonl").exists() or training.steps(tmp_path) == 0


def test_a_method_of_a_class_that_is_replaced_after_the_self_check_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Patches(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            monkeypatch.setattr(torch.nn.Dropout, "forward", Mixes.forward)

    with pytest.raises(RuntimeError, match=r"`[\w.]*(classifier|dropout)` must"):
        made(DPTrainer, tmp_path, callbacks=[Patches()]).train()


def test_a_hook_that_was_there_is_checked_with_the_model(tmp_path: Path) -> None:
    seen: list[int] = []
    model = zoo.small("bert")
    model.bert.register_forward_hook(lambda *_: seen.append(1))
    made(DPTrainer, tmp_path / "looks", model).train()
    assert seen
    model = zoo.small("bert")
    model.bert.register_forward_hook(Hooks("on_nothing").mix)
    with pytest.raises((SelfCheckError, UncoveredError)):
        made(DPTrainer, tmp_path / "mixes", model).train()


class Weighted(BertForSequenceClassification):
    """Takes weights of records, and adds their mean to each."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None, weights: Any = None, **_: Any) -> Any:
        states = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        if weights is not None:
            states = states * (weights / weights.sum()).unsqueeze(1) + states.detach().mean(0)
        return SequenceClassifierOutput(logits=self.classifier(states))


class WeightedPadding(training.Padding):
    def __call__(self, records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return super().__call__(records) | {"weights": torch.tensor([record["weights"] for record in records])}


def test_an_input_that_only_training_batches_have_is_checked(tmp_path: Path) -> None:
    """The made-up batch for a head does not have it, so it is made up from the dataset's schema."""
    model = Weighted(zoo.small("bert").config)
    model.bert.pooler.requires_grad_(False)
    training.trainer(tmp_path / "without", model, max_steps=1).train()
    records = [{**record, "weights": 1.0 + n % 3} for n, record in enumerate(training.text())]
    with pytest.raises(SelfCheckError, match="`per_device_train_batch_size=1`"):
        training.trainer(tmp_path / "with", model, records, data_collator=WeightedPadding()).train()
