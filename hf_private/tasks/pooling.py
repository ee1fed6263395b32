"""Mean pooling for BERT classifiers, in a model that plain Transformers can load.

Sentence encoders such as MiniLM are trained for the mean over all tokens. BertForSequenceClassification reads the
first token only, so that a new head has little to learn from.
"""

import json
from pathlib import Path
from typing import TypeGuard

import torch
from torch import nn
from transformers import BertForSequenceClassification, PreTrainedModel
from transformers.models.bert.modeling_bert import BertLayer
from transformers.utils import cached_file

MEAN = 4.0  # weight of the mean over all tokens relative to the token's own state
POOLER = 0.5  # keeps tanh from saturating on layer-normed states
SETTINGS = "1_Pooling/config.json"  # of Sentence Transformers


def read_by_mean(model: PreTrainedModel) -> PreTrainedModel:
    """Let the new head of a BERT classifier read the mean of a record's tokens instead of the first one. Use it for
    sentence encoders, with every method.

    Re-initialises the top layer so that it moves the mean to the first token: its attention is nearly uniform, and
    values, output and pooler are close to the identity. The layer is trained or frozen like any other, and saved and
    loaded with the model. No record is used.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
    >>> type(read_by_mean(BertForSequenceClassification(config))).__name__
    'BertForSequenceClassification'
    """
    if not can_read_by_mean(model):
        raise ValueError(
            f"`model` must be a BertForSequenceClassification of at least two layers, got {type(model).__name__}."
            " Other models are trained as they are, without `read_by_mean`."
        )
    layer, pooler = model.bert.encoder.layer[-1], model.bert.pooler
    assert isinstance(layer, BertLayer) and pooler is not None, "a classifier has both"
    for module in layer.modules():
        if isinstance(module, nn.Linear):  # small queries and keys: nearly uniform attention
            nn.init.normal_(module.weight, std=model.config.initializer_range)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    with torch.no_grad():
        for linear, scale in (
            (layer.attention.self.value, 1.0),
            (layer.attention.output.dense, MEAN),
            (pooler.dense, POOLER),
        ):
            linear.weight.copy_(scale * torch.eye(len(linear.weight)))
            linear.bias.zero_()
    return model


def can_read_by_mean(model: nn.Module) -> TypeGuard[BertForSequenceClassification]:
    """Whether `read_by_mean` knows how this model reads its tokens."""
    return isinstance(model, BertForSequenceClassification) and len(model.bert.encoder.layer) > 1


def trained_for_mean(name: str) -> bool:
    """Whether a folder, its config or a repository is of Sentence Transformers and outputs the mean of the tokens."""
    found = cached_file(
        str(Path(name).parent) if Path(name).is_file() else name,
        SETTINGS,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    try:
        return found is not None and bool(json.loads(Path(found).read_text()).get("pooling_mode_mean_tokens"))
    except (OSError, ValueError, AttributeError):  # not what Sentence Transformers writes
        return False
