"""Reads the sound and the pose video of S2V with ffmpeg, and puts the sound into a finished mp4.

Torch is not imported with this file, because bad files are refused before it is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wan.log import logger
from wan.pipeline.ffmpeg import (
    build_clock_args,
    build_input_args,
    build_output_args,
    check_media_file,
    describe_failure,
    run_ffmpeg,
)
from wan.pipeline.video_reader import VideoFile, read_video
from wan.settings.errors import InputError
from wan.settings.sound import CONVOLUTIONS, FEATURE_RATE, FPS, ROW_RATE, SAMPLE_RATE

if TYPE_CHECKING:
    import numpy as np

LONGEST = 600  # seconds; the encoder attends from each state to all others
_SILENCE = 1e-4  # the loudest sample of a sound that is none (-80 dB)
_AU = struct.Struct(
    ">4sIIIII"
)  # magic, start of the samples, their bytes, encoding, rate, channels

_FROM_TIME_0 = "aresample=async=1:first_pts=0"
"""Fills the time before a sound begins, and gaps in it, with silence."""


@dataclass(frozen=True, eq=False)
class Sound:
    """A sound as the encoder takes it.

    Attributes:
        path: The file that it was read from.
        samples: float32 [length], mono, `SAMPLE_RATE` a second.
    """

    path: Path
    samples: np.ndarray

    @property
    def states(self) -> int:
        """How many states of the encoder it has, 50 a second."""
        length = len(self.samples)
        for kernel, stride in CONVOLUTIONS:
            length = (length - kernel) // stride + 1
        return length

    @property
    def frames(self) -> int:
        """How many features it has, 30 a second."""
        return int(self.states / FEATURE_RATE * ROW_RATE)

    def clips(self, infer_frames: int) -> int:
        """How many clips of so many frames it takes, by the official rule."""
        return int(self.frames / (infer_frames * (ROW_RATE / FPS))) + 1


class PoseVideo(VideoFile):
    """A video whose poses are taken over."""

    @property
    def step(self) -> int:
        """Every how many frames one is taken, so that there are about 16 a second."""
        return max(1, round(self.fps / FPS))

    def frames(self) -> Iterator[np.ndarray]:
        """Yields the frames that are taken, uint8 [H,W,3], as they are decoded."""
        return self.every(self.step)


def read_sound(path: Path) -> Sound:
    """Reads the first sound of a file as the encoder takes it.

    Channels are averaged, and another rate is resampled with soxr's high quality, as officially.

    Args:
        path: A sound, or a video with one, in any format that ffmpeg reads.

    Raises:
        InputError: The file has no sound, or one that is silent, too short or too long.
    """
    import numpy as np

    check_media_file("`audio`", path, "give a sound, such as a wav")
    args = [*build_input_args(path), "-t", str(LONGEST + 1), "-map", "0:a:0"]
    args += ["-af", _FROM_TIME_0, "-f", "au", "-c:a", "pcm_f32be", "-"]
    done = run_ffmpeg([*args, *build_clock_args(path, "0:v?")])
    if done.returncode or len(done.stdout) < _AU.size:
        said = done.stderr.decode(errors="replace")
        if "matches no streams" in said:
            why, remedy = "has no sound in it", "give a file with one, such as a wav"
        else:
            why = f"cannot be read as a sound ({describe_failure(said)})"
            remedy = "give a wav, or another file that ffmpeg reads"
        raise InputError("`audio`", path, why, remedy)
    _, start, _, _, rate, channels = _AU.unpack_from(done.stdout)
    samples = np.frombuffer(done.stdout[start:], ">f4").astype(np.float32).reshape(-1, channels)
    seconds = len(samples) / rate
    if seconds > LONGEST:
        why = f"is longer than {LONGEST // 60} minutes, and is encoded as a whole"
        raise InputError("`audio`", path, why, "cut it into pieces")
    if not len(samples) or not np.isfinite(samples).all():
        why = "holds no samples, or some that are not finite"
        raise InputError("`audio`", path, why, "give a wav with a voice in it")
    mono = samples.mean(axis=1)
    if np.abs(mono - mono.mean()).max() < _SILENCE:
        raise InputError("`audio`", path, "is silent", "give a sound with a voice in it")
    if rate != SAMPLE_RATE:
        import soxr

        mono = soxr.resample(mono, rate, SAMPLE_RATE, "HQ").astype(np.float32)
    sound = Sound(path, mono)
    if sound.frames < 1:
        why = f"has {seconds:.3g} seconds, too few for a frame"
        raise InputError("`audio`", path, why, "give a longer one")
    if rate < SAMPLE_RATE:
        logger.warning(
            "%s has %d samples a second, and nothing above %d Hz: lips follow 16000 better.",
            *(path, rate, rate // 2),
        )
    return sound


def read_pose(path: Path) -> PoseVideo:
    """Reads the time stamps of a pose video; its frames are read later.

    Raises:
        InputError: The file is no video.
    """
    pose = PoseVideo(**vars(read_video(path, "`pose_video`", FPS)))
    if abs(pose.fps / pose.step - FPS) > 0.01 * FPS:
        taken = "all are" if pose.step == 1 else f"one in {pose.step} is"
        logger.warning(
            "%s has %g frames a second, and %s taken: the poses move at %.3g times their speed.",
            *(path, pose.fps, taken, FPS * pose.step / pose.fps),
        )
    return pose


def add_sound(video: Path, sound: Path, out: Path, cut: float = 0.0) -> None:
    """Writes an mp4 with the frames of one and the sound of another file, as long as the shorter.

    Args:
        video: An mp4 without a sound; its frames are copied as they are.
        sound: Its first sound is coded as AAC, 192 kbit/s. It begins at the time 0 of its file.
        out: The new file.
        cut: Seconds that are left out at the beginning of the sound.

    Raises:
        OSError: ffmpeg failed.
    """
    filters = _FROM_TIME_0 + (f",atrim=start={cut:.6f},asetpts=PTS-STARTPTS" if cut else "")
    args = [*build_input_args(video), *build_input_args(sound), "-map", "0:v:0", "-map", "1:a:0"]
    args += ["-c:v", "copy", "-af", filters, "-c:a", "aac", "-b:a", "192k", "-shortest"]
    done = run_ffmpeg([*args, *build_output_args(out), *build_clock_args(sound, "1:v?")])
    if done.returncode:
        raise OSError(f"ffmpeg failed: {describe_failure(done.stderr.decode(errors='replace'))}")
