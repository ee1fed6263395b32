"""Audio heads: CTC, audio classification and Whisper, their losses, made-up batches and runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch
from tests.support import oracle, training

QUIET = (
    "hidden_dropout",
    "attention_dropout",
    "feat_proj_dropout",
    "activation_dropout",
    "final_dropout",
    "layerdrop",
)
WAVE: dict[str, Any] = dict.fromkeys(QUIET, 0.0) | dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8),
    conv_kernel=(4, 3), conv_stride=(2, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2, vocab_size=12, num_labels=3, classifier_proj_size=8, apply_spec_augment=False,
    feat_extract_norm="layer", do_stable_layer_norm=True, pad_token_id=0,
)  # fmt: skip
WHISPER = dict(
    vocab_size=60, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_source_positions=10,
    max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
)  # fmt: skip
SPEECH = WHISPER | dict(max_source_positions=600, input_feat_per_channel=8, conv_channels=16)
del SPEECH["num_mel_bins"]
MOONSHINE = dict(
    vocab_size=60, hidden_size=16, intermediate_size=24, encoder_num_hidden_layers=1, decoder_num_hidden_layers=1,
    encoder_num_attention_heads=2, decoder_num_attention_heads=2, encoder_num_key_value_heads=2,
    decoder_num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
)  # fmt: skip
SPECTROGRAM = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, patch_size=4, frequency_stride=4,
    time_stride=4, max_length=16, num_mel_bins=8, num_labels=3, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)  # fmt: skip


def make(name: str) -> Any:
    torch.manual_seed(0)
    if name == "ctc":
        return hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**WAVE))
    if name == "ctc-mean":
        return hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**WAVE, ctc_loss_reduction="mean"))
    if name == "wave-class":
        return hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(**WAVE))
    if name == "spectrogram-class":
        return hf.ASTForAudioClassification(hf.ASTConfig(**SPECTROGRAM))
    if name == "speech-to-text":
        return hf.Speech2TextForConditionalGeneration(hf.Speech2TextConfig(**SPEECH))
    if name == "moonshine":
        return hf.MoonshineForConditionalGeneration(hf.MoonshineConfig(**MOONSHINE))
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**WHISPER))


NAMES = ("ctc", "ctc-mean", "wave-class", "spectrogram-class", "whisper", "speech-to-text")


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_transformers_own_and_the_gradients_are_exact(name: str) -> None:
    model = make(name).double().eval()
    batch = synthetic_batch(model, 3, 7)
    loss = PerSampleLoss(model)
    losses = loss(model, batch)
    for n in range(3):
        alone = oracle.record(batch, n)
        if "attention_mask" in alone:
            kept = int(alone["attention_mask"].sum())
            alone = {key: x[:, :kept] if key != "labels" else x for key, x in alone.items()}
        torch.testing.assert_close(losses[n], model(**alone).loss.to(losses), rtol=1e-5, atol=0)
    oracle.assert_exact(model, loss, batch, tolerance=1e-6)


@pytest.mark.parametrize("name", ["ctc", "whisper"])
def test_it_trains(tmp_path: Path, name: str) -> None:
    """Spectrograms are of one size; waves are padded and masked."""
    model = make(name)
    if name == "ctc":
        model.wav2vec2.masked_spec_embed.requires_grad_(False)  # without SpecAugment it has no part in the loss
    made = synthetic_batch(model, 12, 7, torch.Generator().manual_seed(3))
    records = [{key: x[n] for key, x in made.items()} for n in range(12)]
    run = training.trainer(tmp_path, model, records, data_collator=hf.default_data_collator)
    assert run.train().global_step == 4
    assert training.steps(tmp_path) == 4


def test_waves_whose_padding_counts_are_refused(tmp_path: Path) -> None:
    """Group normalisation over time sees the padding of a wave, and so its neighbours."""
    torch.manual_seed(0)
    model = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**WAVE | dict(feat_extract_norm="group", do_stable_layer_norm=False)))
    model.wav2vec2.masked_spec_embed.requires_grad_(False)
    made = synthetic_batch(model, 12, 7, torch.Generator().manual_seed(3))
    records = [{key: x[n] for key, x in made.items()} for n in range(12)]
    run = training.trainer(tmp_path, model, records, data_collator=hf.default_data_collator)
    with pytest.raises(RuntimeError, match="`per_device_train_batch_size=1`"):
        run.train()


@pytest.mark.parametrize("name", ["speech-to-text", "moonshine"])
def test_sound_of_one_length_trains_where_padding_counts(tmp_path: Path, name: str) -> None:
    """Convolutions that no mask reaches see the padding behind a record, so made-up records of mixed lengths fail."""
    model = make(name)
    shape = (24, 64, 8) if name == "speech-to-text" else (24, 3000)
    sound, words = torch.randn(shape), torch.randint(4, 60, (24, 5))
    examples = [
        {model.main_input_name: sound[n], "attention_mask": torch.ones(shape[1]).long(), "labels": words[n]}
        for n in range(24)
    ]
    settings: dict[str, Any] = dict(data_collator=hf.default_data_collator)
    with pytest.raises(RuntimeError, match="`per_device_train_batch_size=1`"):
        training.trainer(tmp_path / "mixed", model, examples[:12], **settings).train()
    run = training.trainer(tmp_path, model, examples[:12], public_examples=examples[12:], **settings)
    assert run.train().global_step == 4
