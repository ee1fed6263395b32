"""Read a BERT by the mean of its tokens, in a model that plain Transformers loads.

Sentence encoders such as MiniLM are trained to be read by the mean over all tokens. BertForSequenceClassification
reads the first one only, of which their training asked nothing. `read_by_mean` makes the top layer anew so that it
carries the mean there: its attention is nearly uniform, its values are what they read, and the pooler hands them on.
It stays a layer like any other and is trained like one. No record is looked at: this comes before training.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

MEAN = 4.0  # weight of the mean over all tokens beside the token's own state
POOLER = 0.5  # so that tanh does not saturate on layer-normed states


def read_by_mean(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the top layer of a BERT classifier by one that averages its input over a record's tokens."""
    if model.config.model_type != "bert":
        raise ValueError(
            f"`pooling` must be 'first' for {type(model).__name__}, got 'mean': it is known for BERT's layers only."
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
