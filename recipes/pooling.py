"""Mean pooling for BERT classifiers, in a model that plain Transformers can load.

Sentence encoders such as MiniLM are trained for the mean over all tokens. BertForSequenceClassification reads the
first token only. `read_by_mean` re-initialises the top layer so that it moves the mean to the first token: its
attention is nearly uniform, and values, output and pooler are close to the identity. The layer is trained like any
other. No record is used.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

MEAN = 4.0  # weight of the mean over all tokens relative to the token's own state
POOLER = 0.5  # keeps tanh from saturating on layer-normed states


def read_by_mean(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the top layer of a BERT classifier by one that averages its input over a record's tokens."""
    if model.config.model_type != "bert":
        raise ValueError(
            f"`pooling` must be 'first' for {type(model).__name__}, got 'mean', which is available for BERT only."
        )
    layer, pooler = model.base_model.encoder.layer[-1], model.base_model.pooler
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
