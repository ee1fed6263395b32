"""A head on the mean of the tokens, in a plain BERT."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification, PreTrainedModel

from hf_private import read_by_mean
from hf_private.tasks.pooling import SETTINGS, trained_for_mean
from tests.support import zoo


def bert() -> PreTrainedModel:
    return zoo.small("bert", num_hidden_layers=3, hidden_size=16).eval()


def test_the_head_reads_the_mean_of_the_tokens() -> None:
    model = read_by_mean(bert())
    ids, mask = torch.randint(5, zoo.VOCABULARY, (6, 9)), torch.ones(6, 9, dtype=torch.long)
    mask[:3, 5:] = 0
    with torch.no_grad():
        output = model.base_model(ids, mask, output_hidden_states=True)
    below = output.hidden_states[-2]  # what the top layer reads
    mean = (below * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)

    def likeness(to: torch.Tensor) -> float:
        return torch.cosine_similarity(output.pooler_output, to - to.mean(1, keepdim=True)).min().item()

    assert likeness(mean) > 0.9
    assert likeness(mean) > likeness(below[:, 0])  # the first token alone, which a BERT's head usually reads


def test_a_model_read_by_its_mean_is_a_plain_bert(tmp_path: Path) -> None:
    model = read_by_mean(bert())
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    ids = torch.randint(5, zoo.VOCABULARY, (2, 7))
    assert type(again) is BertForSequenceClassification
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_other_models_are_not_read_by_their_mean() -> None:
    with pytest.raises(ValueError, match="`model`"):
        read_by_mean(zoo.small("gpt2"))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (json.dumps({"pooling_mode_mean_tokens": True}), True),
        (json.dumps({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}), False),
        (json.dumps(["pooling_mode_mean_tokens"]), False),
        ("not JSON", False),
        (None, False),
    ],
)
def test_a_folder_says_what_its_encoder_was_trained_for(tmp_path: Path, written: str | None, expected: bool) -> None:
    if written is not None:
        (tmp_path / SETTINGS).parent.mkdir()
        (tmp_path / SETTINGS).write_text(written)
    (tmp_path / "config.json").write_text("{}")
    assert trained_for_mean(str(tmp_path)) is expected
    assert trained_for_mean(str(tmp_path / "config.json")) is expected


def test_a_repository_that_cannot_be_reached_says_nothing() -> None:
    assert trained_for_mean("hf-private-tests/no-such-repository") is False
