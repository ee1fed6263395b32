"""BERT that classifies the mean of its token states, as sentence encoders such as MiniLM-L6 were trained to be read.

Their pooler was never trained: a classifier on it has to learn first what the mean already says, and under noise that
is a large part of the budget. Load a saved model with `MeanPoolingBert.from_pretrained(folder)`.
"""

import torch.nn.functional as F
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput


class MeanPoolingBert(BertForSequenceClassification):
    """BertForSequenceClassification without its pooler: mean over a record's own tokens, dropout, linear head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert.pooler = None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **_: object,
    ) -> SequenceClassifierOutput:
        """input_ids and attention_mask (B, T) -> logits (B, K)."""
        states = self.bert(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).last_hidden_state
        mask = attention_mask[..., None].to(states.dtype)
        mean = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        logits = self.classifier(self.dropout(mean))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
