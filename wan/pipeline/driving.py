"""Reads the preprocessed folder of Animate: reference image, pose, face and scene videos.

This module does not import torch, so that bad folders are refused quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from wan.pipeline import images
from wan.pipeline.video_reader import VideoFile, read_video
from wan.settings.errors import InputError, WriteError
from wan.settings.presets import FACE_SIDE

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

_PICTURE = "src_ref.png"
_VIDEOS = {"pose": "src_pose.mp4", "face": "src_face.mp4"}
_SCENE = {"background": "src_bg.mp4", "mask": "src_mask.mp4"}
FILES = (_PICTURE, *_VIDEOS.values(), *_SCENE.values())
"""The files of a preprocessed folder."""
_REMEDY = "run the preprocessing of Wan2.2 Animate again"


class Take(Protocol):
    """Reads the frames of a video at the given indices, uint8 [F,H,W,3]."""

    def __call__(self, places: Sequence[int]) -> np.ndarray: ...


@dataclass(frozen=True)
class DrivingVideos:
    """The preprocessed inputs of an Animate video.

    Attributes:
        reference_image: The character.
        size: (width, height) of the pose video and of the generated video.
        num_frames: The number of frames of each video.
        fps: Frames per second of the pose video.
        readers: "pose" and "face"; with `replace_flag` also "background" and "mask".
        files: The input files.
    """

    picture: Image.Image
    size: tuple[int, int]
    frames: int
    fps: float
    videos: Mapping[str, Take]
    files: tuple[Path, ...] = ()


def read(folder: Path, replaces: bool) -> DrivingVideos:
    """Reads and checks the metadata of a preprocessed folder; frames are read later.

    Args:
        folder: Contains src_ref.png, src_pose.mp4 and src_face.mp4.
        replace_character: Also require src_bg.mp4 and src_mask.mp4.

    Raises:
        InputError: A file is missing or damaged, or differs from the others in size or length.
    """
    setting, names = "`src_root_path`", _VIDEOS | (_SCENE if replaces else {})
    if not folder.is_dir():
        why = "is no folder" if folder.exists() else "does not exist"
        raise InputError(setting, folder, why, f"give a folder with {_listed(names)}")
    missing = [name for name in (_PICTURE, *names.values()) if not (folder / name).exists()]
    if missing:
        why = f"lacks {_joined(missing)}"
        wanted = f"{' with `replace_flag`' if replaces else ''} it holds {_listed(names)}"
        raise InputError(setting, folder, why, f"{_REMEDY};{wanted}")
    paths = {part: folder / name for part, name in names.items()}
    videos = {part: read_video(path, setting) for part, path in paths.items()}
    pose = videos["pose"]
    _check_sides(pose)
    for part, video in videos.items():
        size = (FACE_SIDE, FACE_SIDE) if part == "face" else pose.size
        if video.size != size:
            told = "has frames of {}x{} pixels, not {}x{}".format(*video.size, *size)
            raise InputError(setting, video.path, told, _REMEDY)
        videos[part] = video.synchronize(pose)
        frames = videos[part].num_frames
        if frames != pose.num_frames:
            told = f"has {frames} frames, not {pose.num_frames} as {_VIDEOS['pose']}"
            raise InputError(setting, video.path, told, _REMEDY)
    return DrivingVideos(
        images.read(folder / _PICTURE, "src_root_path"),
        pose.size,
        pose.num_frames,
        pose.fps,
        {part: partial(taken, video) for part, video in videos.items()},
        (folder / _PICTURE, *paths.values()),
    )


def _listed(names: Mapping[str, str]) -> str:
    return _joined([_PICTURE, *names.values()])


def _joined(names: Sequence[str]) -> str:
    *some, last = names
    return f"{', '.join(some)} and {last}" if some else last


def _check_sides(pose: VideoFile) -> None:
    width, height = pose.size
    if width % 16 or height % 16:
        why = f"has frames of {width}x{height} pixels, and needs multiples of 16"
        raise InputError("`src_root_path`", pose.path, why, _REMEDY)


def count(path: Path) -> int:
    """Counts the frames of a video."""
    return read_video(path, "`src_root_path`").num_frames


def taken(video: VideoFile, places: Sequence[int]) -> np.ndarray:
    """Reads frames by index, uint8 [F,H,W,3]; decodes from the start of the video."""
    import numpy as np

    wanted, found = {*places}, dict[int, np.ndarray]()
    frames = video.every()
    for index, frame in zip(range(max(wanted) + 1), frames, strict=False):
        if index in wanted:
            found[index] = frame
    frames.close()  # type: ignore[attr-defined]
    if len(found) < len(wanted):
        raise WriteError(f"{video.path} ends before its frame {max(wanted)}; make it again.")
    return np.stack([found[place] for place in places])


def clips(frames: int, clip: int, again: int) -> int:
    """Returns the number of clips that cover a video, with overlap frames between them."""
    return -(-(frames - again) // (clip - again))


def places(start: int, count: int, frames: int) -> list[int]:
    """Returns frame indices that run back and forth after the end of the video."""
    period = 2 * frames - 2
    turns = (place % period for place in range(start, start + count))
    return [min(place, period - place) for place in turns]


def padded(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Scales an image [h,w,3] into (width, height) and pads it with black bars.

    Bit-exact with OpenCV's bilinear interpolation of uint8, whose weights have 11 bits.
    """
    import numpy as np

    (height, width, _), (columns, rows) = picture.shape, size
    if height / width > rows / columns:
        inner = int(rows / height * width), rows
    else:
        inner = columns, int(columns / width * height)
    whole = np.zeros((rows, columns, 3), np.uint8)
    left, top = (columns - inner[0]) // 2, (rows - inner[1]) // 2
    whole[top : top + inner[1], left : left + inner[0]] = _resized(picture, inner)
    return whole


def _resized(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    import numpy as np

    height, width, _ = picture.shape
    if (width, height) == size:
        return picture

    def between(own: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        centres = np.float32((np.arange(side) + 0.5) * (own / side) - 0.5)
        first = np.floor(centres).astype(np.int64)
        return first, centres - first.astype(np.float32)

    (x, across), (y, down) = between(width, size[0]), between(height, size[1])
    across = np.where((x < 0) | (x >= width - 1), np.float32(0), across)
    a0, a1 = (np.rint(2048 * one).astype(np.int64)[None, :, None] for one in (1 - across, across))
    x = x.clip(0, width - 1)
    pixels = picture.astype(np.int64)
    rows = a0 * pixels[:, x] + a1 * pixels[:, (x + 1).clip(0, width - 1)]
    b0, b1 = (np.rint(2048 * one).astype(np.int64)[:, None, None] for one in (1 - down, down))
    upper, lower = (rows[place.clip(0, height - 1)] >> 4 for place in (y, y + 1))
    return ((((b0 * upper) >> 16) + ((b1 * lower) >> 16) + 2) >> 2).astype(np.uint8)
