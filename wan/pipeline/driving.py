"""Reads the preprocessed folder of Animate: reference image, pose, face and scene videos.

This module does not import torch, so that bad folders are refused quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from wan.media import images
from wan.media.video_reader import VideoFile, read_video
from wan.settings.errors import FileChangedError, InputError
from wan.settings.presets import FACE_SIZE

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

_REFERENCE_IMAGE = "src_ref.png"
_MOTION_VIDEOS = {"pose": "src_pose.mp4", "face": "src_face.mp4"}
_SCENE_VIDEOS = {"background": "src_bg.mp4", "mask": "src_mask.mp4"}
ANIMATE_FILES = (_REFERENCE_IMAGE, *_MOTION_VIDEOS.values(), *_SCENE_VIDEOS.values())
"""The files of a preprocessed folder."""
_REMEDY = "run the preprocessing of Wan2.2 Animate again"


class FrameReader(Protocol):
    """Reads the frames of a video at the given indices, uint8 [F,H,W,3]."""

    def __call__(self, indices: Sequence[int]) -> np.ndarray: ...


@dataclass(frozen=True)
class AnimateInputs:
    """The preprocessed inputs of an Animate video.

    Attributes:
        reference_image: The character.
        size: (width, height) of the pose video and of the generated video.
        num_frames: The number of frames of each video.
        fps: Frames per second of the pose video.
        readers: "pose" and "face"; with `replace_flag` also "background" and "mask".
        files: The input files.
    """

    reference_image: Image.Image
    size: tuple[int, int]
    num_frames: int
    fps: float
    readers: Mapping[str, FrameReader]
    files: tuple[Path, ...] = ()


def read_animate_folder(folder: Path, replace_character: bool) -> AnimateInputs:
    """Reads and checks the metadata of a preprocessed folder; frames are read later.

    Args:
        folder: Contains src_ref.png, src_pose.mp4 and src_face.mp4.
        replace_character: Also require src_bg.mp4 and src_mask.mp4.

    Raises:
        InputError: A file is missing or damaged, or differs from the others in size or length.
    """
    setting = "`src_root_path`"
    names = _MOTION_VIDEOS | (_SCENE_VIDEOS if replace_character else {})
    if not folder.is_dir():
        why = "is no folder" if folder.exists() else "does not exist"
        raise InputError(setting, folder, why, f"give a folder with {_list_file_names(names)}")
    missing = [name for name in (_REFERENCE_IMAGE, *names.values()) if not (folder / name).exists()]
    if missing:
        why = f"lacks {_join_with_and(missing)}"
        condition = " with `replace_flag`" if replace_character else ""
        remedy = f"{_REMEDY};{condition} the folder must contain {_list_file_names(names)}"
        raise InputError(setting, folder, why, remedy)
    paths = {kind: folder / name for kind, name in names.items()}
    videos = {kind: read_video(path, setting) for kind, path in paths.items()}
    pose = videos["pose"]
    _check_pose_size(pose)
    for kind, video in videos.items():
        size = (FACE_SIZE, FACE_SIZE) if kind == "face" else pose.size
        if video.size != size:
            why = "has frames of {}x{} pixels, not {}x{}".format(*video.size, *size)
            raise InputError(setting, video.path, why, _REMEDY)
        videos[kind] = video.synchronize(pose)
        num_frames = videos[kind].num_frames
        if num_frames != pose.num_frames:
            why = f"has {num_frames} frames, not {pose.num_frames} as {_MOTION_VIDEOS['pose']}"
            raise InputError(setting, video.path, why, _REMEDY)
    return AnimateInputs(
        images.read_image(folder / _REFERENCE_IMAGE, "src_root_path"),
        pose.size,
        pose.num_frames,
        pose.fps,
        {kind: partial(read_frames_at, video) for kind, video in videos.items()},
        (folder / _REFERENCE_IMAGE, *paths.values()),
    )


def _list_file_names(names: Mapping[str, str]) -> str:
    return _join_with_and([_REFERENCE_IMAGE, *names.values()])


def _join_with_and(names: Sequence[str]) -> str:
    *first_names, last = names
    return f"{', '.join(first_names)} and {last}" if first_names else last


def _check_pose_size(pose: VideoFile) -> None:
    width, height = pose.size
    if width % 16 or height % 16:
        why = f"has frames of {width}x{height} pixels, and needs multiples of 16"
        raise InputError("`src_root_path`", pose.path, why, _REMEDY)


def read_frames_at(video: VideoFile, indices: Sequence[int]) -> np.ndarray:
    """Reads frames by index, uint8 [F,H,W,3]; decodes from the start of the video.

    Raises:
        FileChangedError: The video has fewer frames than when its metadata was read.
    """
    import numpy as np

    unique, frames_by_index = {*indices}, dict[int, np.ndarray]()
    frames = video.iter_frames()
    for index, frame in zip(range(max(unique) + 1), frames, strict=False):
        if index in unique:
            frames_by_index[index] = frame
    frames.close()  # type: ignore[attr-defined]
    if len(frames_by_index) < len(unique):
        raise FileChangedError(f"{video.path} ends before its frame {max(unique)}; make it again.")
    return np.stack([frames_by_index[i] for i in indices])


def count_overlapping_clips(num_frames: int, clip_frames: int, num_overlap_frames: int) -> int:
    """Returns the number of clips that cover a video, with overlap frames between them."""
    return -(-(num_frames - num_overlap_frames) // (clip_frames - num_overlap_frames))


def make_ping_pong_indices(start: int, num_indices: int, num_frames: int) -> list[int]:
    """Returns frame indices that run back and forth after the end of the video."""
    period = max(1, 2 * num_frames - 2)  # a single frame is repeated
    phases = (index % period for index in range(start, start + num_indices))
    return [min(index, period - index) for index in phases]


def letterbox_image(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Scales an image [h,w,3] into (width, height) and pads it with black bars.

    Bit-exact with OpenCV's bilinear interpolation of uint8, whose weights have 11 bits.
    """
    import numpy as np

    (height, width, _), (columns, rows) = image.shape, size
    if height / width > rows / columns:
        scaled_size = int(rows / height * width), rows
    else:
        scaled_size = columns, int(columns / width * height)
    canvas = np.zeros((rows, columns, 3), np.uint8)
    x_offset, y_offset = (columns - scaled_size[0]) // 2, (rows - scaled_size[1]) // 2
    canvas[y_offset : y_offset + scaled_size[1], x_offset : x_offset + scaled_size[0]] = (
        _resize_bilinear(image, scaled_size)
    )
    return canvas


def _resize_bilinear(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    import numpy as np

    height, width, _ = image.shape
    if (width, height) == size:
        return image

    def make_taps(source_size: int, target_size: int) -> tuple[np.ndarray, np.ndarray]:
        centers = np.float32((np.arange(target_size) + 0.5) * (source_size / target_size) - 0.5)
        floor_indices = np.floor(centers).astype(np.int64)
        return floor_indices, centers - floor_indices.astype(np.float32)

    (x, across), (y, down) = make_taps(width, size[0]), make_taps(height, size[1])
    across = np.where((x < 0) | (x >= width - 1), np.float32(0), across)
    a0, a1 = (
        np.rint(2048 * fraction).astype(np.int64)[None, :, None]
        for fraction in (1 - across, across)
    )
    x = x.clip(0, width - 1)
    pixels = image.astype(np.int64)
    interpolated_rows = a0 * pixels[:, x] + a1 * pixels[:, (x + 1).clip(0, width - 1)]
    b0, b1 = (
        np.rint(2048 * fraction).astype(np.int64)[:, None, None] for fraction in (1 - down, down)
    )
    upper, lower = (
        interpolated_rows[row_indices.clip(0, height - 1)] >> 4 for row_indices in (y, y + 1)
    )
    return ((((b0 * upper) >> 16) + ((b1 * lower) >> 16) + 2) >> 2).astype(np.uint8)
