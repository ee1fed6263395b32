"""The self-check's records come from the collator: custom models need no override of `public_batch`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hf_private.trainer.data_guards import public_batch
from tests.support import training, zoo


class Plain(nn.Module):
    """Any module of torch, without a config."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class TwoTasks(nn.Module):
    """Two heads on one body, each with labels of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.topic, self.tone = nn.Linear(3, 8), nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.topic(h), self.tone(h)


class Sound(nn.Module):
    """A convolution over waves of different lengths, averaged where the mask is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv1d(1, 4, kernel_size=1), nn.Linear(4, 2)

    def forward(self, input_values: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.convolution(input_values.unsqueeze(1)).tanh() * attention_mask.unsqueeze(1)
        return self.head(h.sum(-1) / attention_mask.sum(-1, keepdim=True))


def vectors(count: int = 12, **labels: int) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(3, generator=g), **{n: i % k for n, k in labels.items()}} for i in range(count)]


def waves(count: int = 12) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    return [{"input_values": torch.randn(5 + i % 4, generator=g).tolist(), "labels": i % 2} for i in range(count)]


def pad_waves(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(record["input_values"]) for record in records)
    values = [record["input_values"] + [0.0] * (longest - len(record["input_values"])) for record in records]
    mask = [[1] * len(r["input_values"]) + [0] * (longest - len(r["input_values"])) for r in records]
    labels = torch.tensor([record["labels"] for record in records])
    return {"input_values": torch.tensor(values), "attention_mask": torch.tensor(mask), "labels": labels}


def classes(outputs: Any, labels: Tensor) -> Tensor:
    return cross_entropy(outputs, labels, reduction="none")


def both(outputs: Any, labels: dict[str, Tensor]) -> Tensor:
    topic, tone = outputs
    return classes(topic, labels["topic"]) + classes(tone, labels["tone"])


def stack(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.stack([torch.as_tensor(record[name]) for record in records]) for name in records[0]}


@pytest.mark.parametrize(
    ("model", "records", "settings"),
    [
        (Plain, vectors(labels=2), {"per_sample_loss": classes, "data_collator": stack}),
        (
            TwoTasks,
            vectors(topic=2, tone=2),
            {"per_sample_loss": both, "data_collator": stack, "label_names": ["topic", "tone"]},
        ),
        (Sound, waves(), {"per_sample_loss": classes, "data_collator": pad_waves}),
    ],
)
def test_no_override_is_needed(tmp_path: Path, model: Any, records: Any, settings: dict[str, Any]) -> None:
    made = training.trainer(tmp_path, model(), records, remove_unused_columns=False, **settings)
    batch = made.public_batch(3, 7)
    assert {len(x) for x in batch.values()} == {3}
    assert made.train().global_step == 4


def looks_up(records: list[str]) -> dict[str, Tensor]:
    """A collator of names: nothing can be made up for it."""
    vectors = {f"file {i}": torch.tensor([i % 5, i % 3, 1.0]) for i in range(40)}
    labels = [int(name.split()[1]) % 2 for name in records]
    return {"x": torch.stack([vectors[name] for name in records]), "labels": torch.tensor(labels)}


def test_public_examples_replace_what_cannot_be_made_up(tmp_path: Path) -> None:
    private, public = [f"file {i}" for i in range(20)], [f"file {i}" for i in range(20, 40)]
    settings: dict[str, Any] = {"per_sample_loss": classes, "data_collator": looks_up, "remove_unused_columns": False}
    with pytest.raises(ValueError, match="`public_examples`.*Plain"):
        training.trainer(tmp_path / "a", Plain(), private, **settings).train()
    made = training.trainer(tmp_path / "b", Plain(), private, public_examples=public, **settings)
    one, other = (made.public_batch(3, 7, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    assert not torch.equal(one["x"], other["x"])
    assert made.train().global_step == 4


@pytest.mark.parametrize("examples", ["private", "too few"])
def test_examples_that_are_private_or_too_few_are_refused(tmp_path: Path, examples: str) -> None:
    records = training.text()
    given = records if examples == "private" else records[:3]
    made = training.trainer(tmp_path, zoo.small("bert"), records, public_examples=given)
    with pytest.raises(ValueError, match="`public_examples`"):
        made.train()


def test_the_training_set_itself_is_refused_wherever_it_is_asked_for(tmp_path: Path) -> None:
    """The comparison of contents comes first, but not in all runs."""
    records = training.text()
    made = training.trainer(tmp_path, zoo.small("bert"), records, public_examples=records)
    with pytest.raises(ValueError, match="`public_examples`"):
        public_batch(made, 2, 4, None)


def test_public_texts_of_different_lengths_are_compared(tmp_path: Path) -> None:
    """Batches of other examples have another width by themselves."""
    examples = [
        *training.text(seed=7)[:9],
        *[{**record, "input_ids": [7] * 16} for record in training.text(seed=8)[:1]],
    ]
    training.trainer(tmp_path, public_examples=examples, max_steps=1).train()
    assert training.steps(tmp_path) == 1
