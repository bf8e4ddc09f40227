"""Encodes audio to the features of S2V's network with the wav2vec2 of transformers.

Legend: S hidden states of the encoder, C channels, T features (30 per second), R video frames (16
per second).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.checkpoint.layout import WAV2VEC2_FOLDER
from wan.media.audio import Audio
from wan.settings.errors import InputError
from wan.settings.sound import AUDIO_LAYERS, RESAMPLED_FEATURE_RATE, SPEECH_FPS
from wan.settings.values import format_value
from wan.utils.system import limit_cpu_threads


def check_audio_encoder(path: Path, channels: int) -> None:
    """Refuses a folder without the audio encoder of a DiT; reads no weights.

    Args:
        path: A folder in the layout of transformers.
        channels: Channels of the features in the DiT's config.

    Raises:
        InputError: The folder holds another encoder, or is damaged.
    """
    from transformers import AutoConfig

    remedy = f"give the folder {WAV2VEC2_FOLDER} of this checkpoint"
    try:
        config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # its type depends on the damage
        why = f"holds no usable config.json ({format_value(error, str)})"
        raise InputError(str(path), None, why, remedy) from error
    if config.model_type != "wav2vec2" or config.num_hidden_layers + 1 != AUDIO_LAYERS:
        why = f"is no wav2vec2 of {AUDIO_LAYERS - 1} layers"
        raise InputError(str(path), None, why, remedy)
    if config.hidden_size != channels:
        why = f"has {config.hidden_size} channels of features, the DiT {channels}"
        raise InputError(str(path), None, f"{why}: they belong to different checkpoints", remedy)
    if not [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]:
        why = "holds no weights (*.safetensors or pytorch_model*.bin)"
        raise InputError(str(path), None, why, "download the missing file")


@torch.no_grad()
def extract_audio_features(path: Path, audio: Audio) -> Tensor:
    """Computes the hidden states [S,C,T] of an audio on the CPU, like the official code.

    Args:
        path: A folder that `check_audio_encoder` accepts.
        audio: The complete audio; it is normalized to mean 0 and variance 1.
    """
    from transformers import Wav2Vec2Model
    from transformers.utils import logging

    verbosity, has_progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # about the unused head of the published file
    logging.disable_progress_bar()
    try:
        model: Any = Wav2Vec2Model.from_pretrained(
            path, local_files_only=True, dtype=torch.float32, attn_implementation="sdpa"
        )
    except Exception as error:  # its type depends on the damage
        why = f"holds no usable weights ({format_value(error, str)})"
        remedy = f"give the folder {WAV2VEC2_FOLDER} as it was published"
        raise InputError(str(path), None, why, remedy) from error
    finally:
        logging.set_verbosity(verbosity)
        if has_progress_bar:
            logging.enable_progress_bar()
    samples = torch.from_numpy(audio.samples)
    samples = (samples - samples.mean()) / (samples.var(correction=0) + 1e-7).sqrt()
    with limit_cpu_threads():
        output = model.eval()(samples[None], output_hidden_states=True)
    # The last hidden state of transformers 5 lacks the final norm, unlike earlier versions.
    states = [*output.hidden_states[:-1], output.last_hidden_state]
    states_SCT = torch.cat(states).transpose(1, 2)
    return F.interpolate(states_SCT, size=audio.num_features, mode="linear", align_corners=True)


def sample_features_per_frame(features_SCT: Tensor, num_frames: int) -> Tensor:
    """Samples the feature nearest in time for each video frame: [1,S,C,R], 0 after the end."""
    # round() rounds halves to even.
    indices = [round(frame * RESAMPLED_FEATURE_RATE / SPEECH_FPS) for frame in range(num_frames)]
    valid_indices = [index for index in indices if index < features_SCT.shape[2]]
    return F.pad(features_SCT[..., valid_indices], (0, num_frames - len(valid_indices)))[None]
