"""Turns a sound into the features that S2V's network is given, with transformers' wav2vec2.

Legend: S hidden states of the encoder, C channels, T features, 30 a second, R rows, 16 a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.host import on_own_cores
from wan.pipeline.media import Sound
from wan.settings.errors import InputError
from wan.settings.sound import FPS, ROW_RATE, SOUND_LAYERS
from wan.settings.values import shown


def check(path: Path, channels: int) -> None:
    """Refuses a folder that does not hold the encoder of a network; no weight is read.

    Args:
        path: A folder of transformers.
        channels: Of the features that the network takes.

    Raises:
        InputError: It is another encoder, or damaged.
    """
    from transformers import AutoConfig

    remedy = "download it again"
    try:
        config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # whatever is damaged
        why = f"holds no usable config.json ({shown(error, str)})"
        raise InputError(str(path), None, why, remedy) from error
    if config.model_type != "wav2vec2" or config.num_hidden_layers + 1 != SOUND_LAYERS:
        why = f"is no wav2vec2 of {SOUND_LAYERS - 1} layers"
        raise InputError(str(path), None, why, remedy)
    if config.hidden_size != channels:
        why = f"has {config.hidden_size} channels of features, the DiT {channels}"
        raise InputError(str(path), None, f"{why}: they belong to different checkpoints", remedy)
    if not [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]:
        raise InputError(str(path), None, "holds no weights", remedy)


@torch.no_grad()
def features(path: Path, sound: Sound) -> Tensor:
    """Returns the hidden states [S,C,T] of a sound, as the official code makes them, on the CPU.

    Args:
        path: A folder that `check` accepts.
        sound: The whole sound, which is brought to mean 0 and variance 1.
    """
    from transformers import Wav2Vec2Model
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # the head of the published file is not used
    logging.disable_progress_bar()
    try:
        model: Any = Wav2Vec2Model.from_pretrained(
            path, local_files_only=True, dtype=torch.float32, attn_implementation="sdpa"
        )
    except Exception as error:  # whatever is damaged
        why = f"holds no usable weights ({shown(error, str)})"
        raise InputError(str(path), None, why, "download it again") from error
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
    samples = torch.from_numpy(sound.samples)
    samples = (samples - samples.mean()) / (samples.var(correction=0) + 1e-7).sqrt()
    with on_own_cores():
        found = model.eval()(samples[None], output_hidden_states=True)
    # transformers 5 returns the last one without the final norm, which it had before.
    states = [*found.hidden_states[:-1], found.last_hidden_state]
    states_SCT = torch.cat(states).transpose(1, 2)
    return F.interpolate(states_SCT, size=sound.frames, mode="linear", align_corners=True)


def rows(features_SCT: Tensor, count: int) -> Tensor:
    """Returns [1,S,C,R]: for each of `count` video frames the feature nearest in time, else 0."""
    places = [round(row * ROW_RATE / FPS) for row in range(count)]  # halves go to even numbers
    taken = [place for place in places if place < features_SCT.shape[2]]
    return F.pad(features_SCT[..., taken], (0, count - len(taken)))[None]
