"""Reads the audio and the pose video of S2V with ffmpeg, and adds the audio to a finished mp4.

This module does not import torch, so that bad files are refused before torch is loaded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wan.media.ffmpeg import (
    build_clock_args,
    build_input_args,
    build_output_args,
    describe_failure,
    run_ffmpeg,
)
from wan.settings.errors import InputError
from wan.settings.sound import (
    FEATURE_RATE,
    RESAMPLED_FEATURE_RATE,
    SAMPLE_RATE,
    WAV2VEC_CONVOLUTIONS,
)
from wan.utils.files import check_input_file
from wan.utils.log import logger

if TYPE_CHECKING:
    import numpy as np

MAX_SECONDS = 600  # of audio; the attention of the audio encoder covers all of it at once
_SILENT_PEAK = 1e-4  # highest sample of an audio that counts as silent (-80 dB)
_AU_HEADER = struct.Struct(
    ">4sIIIII"
)  # magic, offset of the samples, bytes of the samples, encoding, rate, channels

_PAD_FROM_TIME_0 = "aresample=async=1:first_pts=0"
"""Filter that pads the time before the first sample, and gaps, with silence."""


@dataclass(frozen=True, eq=False)
class Audio:
    """Audio in the format of the encoder.

    Attributes:
        samples: float32 [length], mono, `SAMPLE_RATE` per second.
    """

    path: Path
    samples: np.ndarray

    @property
    def num_states(self) -> int:
        """Number of hidden states of the encoder, 50 per second."""
        length = len(self.samples)
        for kernel, stride in WAV2VEC_CONVOLUTIONS:
            length = (length - kernel) // stride + 1
        return length

    @property
    def num_features(self) -> int:
        """Number of audio features, 30 per second."""
        return int(self.num_states / FEATURE_RATE * RESAMPLED_FEATURE_RATE)


def read_audio(path: Path) -> Audio:
    """Reads the first audio stream of a file in the format of the encoder.

    Channels are averaged, and other sample rates are resampled with soxr "HQ", as in the official
    code.

    Args:
        path: An audio or video file, in any format that ffmpeg reads.

    Raises:
        InputError: The file has no audio, or audio that is silent, too short or too long.
    """
    import numpy as np

    check_input_file("`audio`", path, "give a sound, such as a wav")
    args = [*build_input_args(path), "-t", str(MAX_SECONDS + 1), "-map", "0:a:0"]
    args += ["-af", _PAD_FROM_TIME_0, "-f", "au", "-c:a", "pcm_f32be", "-"]
    result = run_ffmpeg([*args, *build_clock_args(path, "0:v?")])
    if result.returncode or len(result.stdout) < _AU_HEADER.size:
        stderr = result.stderr.decode(errors="replace")
        if "matches no streams" in stderr:
            why, remedy = "has no sound in it", "give a file with one, such as a wav"
        else:
            why = f"cannot be read as a sound ({describe_failure(stderr)})"
            remedy = "give a wav, or another file that ffmpeg reads"
        raise InputError("`audio`", path, why, remedy)
    _, start, _, _, rate, channels = _AU_HEADER.unpack_from(result.stdout)
    samples = np.frombuffer(result.stdout[start:], ">f4").astype(np.float32).reshape(-1, channels)
    seconds = len(samples) / rate
    if seconds > MAX_SECONDS:
        why = f"is longer than {MAX_SECONDS // 60} minutes, and is encoded as a whole"
        raise InputError("`audio`", path, why, "cut it into pieces")
    if not len(samples) or not np.isfinite(samples).all():
        why = "holds no samples, or some that are not finite"
        raise InputError("`audio`", path, why, "give a wav with a voice in it")
    mono = samples.mean(axis=1)
    if np.abs(mono - mono.mean()).max() < _SILENT_PEAK:
        raise InputError("`audio`", path, "is silent", "give a sound with a voice in it")
    if rate != SAMPLE_RATE:
        import soxr

        mono = soxr.resample(mono, rate, SAMPLE_RATE, "HQ").astype(np.float32)
    audio = Audio(path, mono)
    if audio.num_features < 1:
        why = f"has {seconds:.3g} seconds, too few for a frame"
        raise InputError("`audio`", path, why, "give a longer one")
    if rate < SAMPLE_RATE:
        logger.warning(
            "%s has %d samples a second, and nothing above %d Hz: lips follow 16000 better.",
            *(path, rate, rate // 2),
        )
    return audio


def add_audio(
    video: Path, audio: Path, out: Path, skip_seconds: float = 0.0, min_seconds: float = 0.0
) -> None:
    """Writes an mp4 with the frames of one file and the audio of another one.

    The result is as long as the shorter of both.

    Args:
        video: An mp4 without audio; its frames are not encoded again.
        audio: The file whose first audio stream is encoded as AAC, 192 kbit/s.
        skip_seconds: Left out at the beginning of the audio.
        min_seconds: Silence follows an audio that is shorter, so that all frames of a video of
            this length stay.

    Raises:
        OSError: ffmpeg failed.
    """
    filters = _PAD_FROM_TIME_0 + (
        f",atrim=start={skip_seconds:.6f},asetpts=PTS-STARTPTS" if skip_seconds else ""
    )
    # A second more than the video, at whose end `-shortest` cuts; without an end of the silence,
    # ffmpeg 7.0 would write it without end.
    filters += f",apad=whole_dur={min_seconds + 1:.6f}" if min_seconds else ""
    args = [*build_input_args(video), *build_input_args(audio), "-map", "0:v:0", "-map", "1:a:0"]
    args += ["-c:v", "copy", "-af", filters, "-c:a", "aac", "-b:a", "192k", "-shortest"]
    result = run_ffmpeg([*args, *build_output_args(out), *build_clock_args(audio, "1:v?")])
    if result.returncode:
        raise OSError(f"ffmpeg failed: {describe_failure(result.stderr.decode(errors='replace'))}")


def has_audio(path: Path) -> bool:
    """Returns whether a file has an audio stream that can be decoded."""
    args = [*build_input_args(path), "-map", "0:a:0", "-frames:a", "1", "-f", "null", "-"]
    return run_ffmpeg(args).returncode == 0
