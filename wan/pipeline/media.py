"""Reads the sound and the pose video of S2V with ffmpeg, and puts the sound into a finished mp4.

Torch is not imported with this file, because bad files are refused before it is.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan.log import logger
from wan.settings.errors import InputError
from wan.settings.sound import CONVOLUTIONS, FEATURE_RATE, FPS, ROW_RATE, SAMPLE_RATE
from wan.settings.values import shown

if TYPE_CHECKING:
    import numpy as np

LONGEST = 600  # seconds; the encoder attends from each state to all others
_SILENCE = 1e-4  # the loudest sample of a sound that is none (-80 dB)
_AU = struct.Struct(
    ">4sIIIII"
)  # magic, start of the samples, their bytes, encoding, rate, channels

_FORMATS = (
    *("aac", "ac3", "aiff", "amr", "asf", "au", "avi", "caf", "eac3", "flac", "flv", "gif"),
    *("m4v", "matroska", "mov", "mp3", "mp4", "mpeg", "mpegts", "mxf", "nut", "ogg", "rm"),
    *("w64", "wav", "webm", "wv", "yuv4mpegpipe"),
)
_READING = ("-protocol_whitelist", "file,pipe", "-format_whitelist", ",".join(_FORMATS))
"""A file cannot have ffmpeg open another one or an address, as playlists and scripts do."""


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


@dataclass(frozen=True)
class VideoFile:
    """A video that was looked into.

    Attributes:
        path: The file.
        size: (width, height) of a frame as it is shown.
        fps: Frames a second.
    """

    path: Path
    size: tuple[int, int]
    fps: float

    def every(self, step: int = 1) -> Iterator[np.ndarray]:
        """Yields every `step`th frame, uint8 [H,W,3], as it is decoded."""
        import imageio_ffmpeg
        import numpy as np

        width, height = self.size
        frames = imageio_ffmpeg.read_frames(_named(self.path), input_params=list(_READING))
        next(frames)  # what is known of the video
        try:
            for index, frame in enumerate(frames):
                if index % step == 0:
                    yield np.frombuffer(frame, np.uint8).reshape(height, width, 3)
        finally:
            frames.close()


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
    import imageio_ffmpeg
    import numpy as np

    _check_file("`audio`", path, "give a sound, such as a wav")
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-nostdin", *_READING]
    command += ["-i", _named(path)]
    command += ["-t", str(LONGEST + 1), "-map", "0:a:0", "-f", "au", "-c:a", "pcm_f32be", "-"]
    done = subprocess.run(command, capture_output=True)
    if done.returncode or len(done.stdout) < _AU.size:
        said = done.stderr.decode(errors="replace")
        if "matches no streams" in said:
            why, remedy = "has no sound in it", "give a file with one, such as a wav"
        else:
            why = f"cannot be read as a sound ({_last(said)})"
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
    """Looks into a pose video; its frames are read later.

    Raises:
        InputError: The file is no video.
    """
    found = read_video(path, "`pose_video`")
    pose = PoseVideo(found.path, found.size, found.fps)
    if abs(pose.fps / pose.step - FPS) > 0.01 * FPS:
        taken = "all are" if pose.step == 1 else f"one in {pose.step} is"
        logger.warning(
            "%s has %g frames a second, and %s taken: the poses move at %.3g times their speed.",
            *(path, pose.fps, taken, FPS * pose.step / pose.fps),
        )
    return pose


def read_video(path: Path, setting: str) -> VideoFile:
    """Looks into a video; its frames are read later.

    Args:
        path: Any video that ffmpeg reads.
        setting: What names the path, for messages.

    Raises:
        InputError: The file is no video.
    """
    import imageio_ffmpeg

    _check_file(setting, path, "give a video, such as an mp4")
    try:
        frames = imageio_ffmpeg.read_frames(_named(path), input_params=list(_READING))
        told: dict[str, Any] = next(frames)
        found = next(frames, None)
        frames.close()
    except (OSError, RuntimeError, StopIteration, KeyError, ValueError) as error:
        why = f"cannot be read as a video ({_last(str(error))})"
        raise InputError(setting, path, why, "give an mp4, or another video") from error
    width, height = told["size"]
    fps = float(told.get("fps") or 0)
    if found is None or not fps or len(found) != width * height * 3:
        raise InputError(setting, path, "has no frames that can be read", "give an mp4")
    return VideoFile(path, (width, height), fps)


def add_sound(video: Path, sound: Path, out: Path, cut: float = 0.0) -> None:
    """Writes an mp4 with the frames of one and the sound of another file, as long as the shorter.

    Args:
        video: An mp4 without a sound; its frames are copied as they are.
        sound: Its first sound is coded as AAC, 192 kbit/s.
        out: The new file.
        cut: Seconds that are left out at the beginning of the sound.

    Raises:
        OSError: ffmpeg failed.
    """
    import imageio_ffmpeg

    command = [
        imageio_ffmpeg.get_ffmpeg_exe(),
        "-v",
        "error",
        "-nostdin",
        "-y",
        "-i",
        _named(video),
    ]
    command += ["-ss", f"{cut:.6f}"] if cut else []
    command += [*_READING, "-i", _named(sound), "-map", "0:v:0", "-map", "1:a:0", "-c:v", "copy"]
    command += ["-c:a", "aac", "-b:a", "192k", "-shortest", "-f", "mp4", _named(out)]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise OSError(f"ffmpeg failed: {_last(done.stderr.decode(errors='replace'))}")


def _named(path: Path) -> str:
    """A path as ffmpeg takes it, which reads one with a colon as an address."""
    return f"file:{path.absolute()}"


def _check_file(flag: str, path: Path, remedy: str) -> None:
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(path), re.IGNORECASE):
        raise InputError(flag, path, "is an address, not a file", "download it first")
    try:
        if not path.exists():
            raise InputError(flag, path, "does not exist", remedy)
        if not path.is_file():
            raise InputError(flag, path, "is not a file", remedy)
        if not path.stat().st_size:
            raise InputError(flag, path, "is empty (0 bytes)", remedy)
        with path.open("rb"):
            pass
    except OSError as error:
        why = f"cannot be used ({error.strerror or error})"
        raise InputError(flag, path, why, remedy) from error


def _last(said: str) -> str:
    """The last line of what ffmpeg says, without the addresses of its parts."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return shown(
        re.sub(r"\[[^\]]* @ 0x[0-9a-f]+\]\s*", "", lines[-1]) if lines else "no reason", str
    )
