"""The head of a model, found by the class that Transformers lists it under."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from peft import PeftModel
from torch import nn
from transformers.models.auto import modeling_auto as auto

IGNORE_INDEX = -100
REMEDY = "Pass `per_sample_loss=fn` with fn(outputs, labels) -> tensor of shape (batch_size,), one loss per record."


class Head(StrEnum):
    """What a model predicts; it determines the loss. Sequences, images and audio share `CLASSIFICATION`."""

    SEQ2SEQ_LM = "seq2seq language modeling"
    MASKED_LM = "masked language modeling"
    CAUSAL_LM = "causal language modeling"
    CLASSIFICATION = "classification"
    TOKEN_CLASSIFICATION = "token classification"
    QUESTION_ANSWERING = "question answering"
    MULTIPLE_CHOICE = "multiple choice"
    CTC = "connectionist temporal classification"


def _class_names(*mappings: Mapping[str, str | tuple[str, ...]]) -> frozenset[str]:
    values = [value for mapping in mappings for value in mapping.values()]
    return frozenset(name for value in values for name in ([value] if isinstance(value, str) else value))


# The first match wins: BART is listed both as seq2seq and as masked LM, and its loss is the seq2seq one.
HEAD_CLASSES: dict[Head, frozenset[str]] = {
    Head.SEQ2SEQ_LM: _class_names(
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    ),
    Head.MASKED_LM: _class_names(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    Head.CAUSAL_LM: _class_names(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    Head.CLASSIFICATION: _class_names(
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    ),
    Head.TOKEN_CLASSIFICATION: _class_names(auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
    Head.QUESTION_ANSWERING: _class_names(auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES),
    Head.MULTIPLE_CHOICE: _class_names(auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES),
    Head.CTC: _class_names(auto.MODEL_FOR_CTC_MAPPING_NAMES),
}

# Transformers lists these as language models, but their objective differs: labels that the model does not shift
# (decoders of seq2seq families, XLM, XLNet, CPM-Ant), n-gram losses (ProphetNet), codebooks (MusicGen).
OTHER_OBJECTIVE = frozenset(
    "BartForCausalLM BigBirdPegasusForCausalLM BlenderbotForCausalLM BlenderbotSmallForCausalLM CpmAntForCausalLM "
    "MBartForCausalLM MarianForCausalLM MusicgenForCausalLM MusicgenMelodyForCausalLM MvpForCausalLM "
    "PLBartForCausalLM PegasusForCausalLM ProphetNetForCausalLM ProphetNetForConditionalGeneration TrOCRForCausalLM "
    "WhisperForCausalLM XLMWithLMHeadModel XLNetLMHeadModel".split()
)


# Models that read images beside a text, or write a text about one: language models, of which a loss counts the text.
IMAGE_TEXT = _class_names(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def base_model(model: nn.Module) -> Any:
    """The Transformers model inside a PEFT wrapper, or the model itself.

    The type is `Any` because a custom model need not be a PreTrainedModel, and has its attributes all the same.
    """
    return model.get_base_model() if isinstance(model, PeftModel) else model


def head_of(model: nn.Module) -> Head:
    """The head of a model, by its class or the nearest parent class that Transformers lists.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> head_of(GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=1, n_layer=1, vocab_size=9))).value
        'causal language modeling'
    """
    base = base_model(model)
    for parent in type(base).__mro__:
        if parent.__name__ in OTHER_OBJECTIVE:
            break
        for head, names in HEAD_CLASSES.items():
            if parent.__name__ in names:
                if head is Head.SEQ2SEQ_LM and not base.config.is_encoder_decoder:
                    break  # Transformers also lists speech and multimodal decoders here
                return head
        if parent.__name__ in IMAGE_TEXT and base.config.is_encoder_decoder:
            return Head.SEQ2SEQ_LM
        if parent.__name__ in IMAGE_TEXT and hasattr(base, "get_image_features"):  # in the place of tokens of its text
            return Head.CAUSAL_LM
    raise ValueError(
        f"`model` must have one of the heads [{', '.join(HEAD_CLASSES)}], got {type(base).__name__}, whose loss per "
        f"record is not known. {REMEDY}"
    )
