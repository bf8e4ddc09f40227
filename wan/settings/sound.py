"""Constants of speech to video: audio features, clips and network configuration."""

from __future__ import annotations

from typing import Any

SAMPLE_RATE = 16_000  # what wav2vec2 was trained on
WAV2VEC_CONVOLUTIONS = ((10, 5), *[(3, 2)] * 4, *[(2, 2)] * 2)  # of wav2vec2: kernel and stride
FEATURE_RATE = 50  # hidden states of wav2vec2 per second
RESAMPLED_FEATURE_RATE = 30  # features per second after resampling
SPEECH_FPS = 16  # frames, and audio features, per second of the video
FEATURES_PER_FRAME = RESAMPLED_FEATURE_RATE / SPEECH_FPS
AUDIO_LAYERS = 25  # hidden states of wav2vec2: of the embedding and of 24 layers

MOTION_FRAMES = 73  # last frames of the previous clip that condition the next one
MOTION_LATENTS = 19  # latent frames of MOTION_FRAMES
NUM_DROPPED_FRAMES = 3  # frames that are dropped from the start of the first clip

INJECT_LAYERS = (0, 4, 8, 12, 16, 20, 24, 27, 30, 33, 36, 39)  # of the published network
FIXED_CONFIG: dict[str, Any] = {
    "cond_dim": 16,
    "enable_adain": True,
    "adain_mode": "attn_norm",
    "zero_timestep": True,
    "enable_motioner": False,
    "add_last_motion": True,
    "enable_tsm": False,
    "trainable_token_pos_emb": False,
    "enable_framepack": True,
    "framepack_drop_mode": "padd",
}
"""Options of the official network class, with their values in the published network."""
