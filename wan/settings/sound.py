"""Facts of S2V that settings, files and networks share: of sound, of clips, of the network."""

from __future__ import annotations

from typing import Any

SAMPLE_RATE = 16_000  # what wav2vec2 was trained on
CONVOLUTIONS = ((10, 5), *[(3, 2)] * 4, *[(2, 2)] * 2)  # of wav2vec2: kernel and stride
FEATURE_RATE = 50  # wav2vec2's states per second
ROW_RATE = 30  # frames per second that the features are brought to before rows are taken
FPS = 16  # of the video, and of the rows of sound
SOUND_LAYERS = 25  # hidden states of wav2vec2: the embedding's and those of 24 layers

MOTION_FRAMES = 73  # of the clip before that the next one looks at
MOTION_LATENTS = 19  # their latent frames
FIRST_DROPPED = 3  # frames that the first clip loses

INJECT_LAYERS = (0, 4, 8, 12, 16, 20, 24, 27, 30, 33, 36, 39)  # of the published network
STATED: dict[str, Any] = {
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
"""What the official class could be told, with the only value that a published network has."""
