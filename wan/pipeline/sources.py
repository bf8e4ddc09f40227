"""Reads the inputs of VACE: a source video, its mask, and reference images.

This module does not import torch, so that bad files are refused quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from wan.log import logger
from wan.pipeline import images
from wan.pipeline.driving import Take, taken
from wan.pipeline.video_reader import VideoFile, read_video
from wan.settings.errors import InputError

if TYPE_CHECKING:
    from PIL import Image

MOST_PICTURES = 16  # each adds a latent frame
_TRAINED_FPS = 16
_SLOWEST, _FASTEST = 1, 240  # frames per second, the range of `fps`


@dataclass(frozen=True)
class ControlSources:
    """The inputs of a VACE video.

    Attributes:
        size: (width, height) of the source video; None without one.
        num_frames: The number of frames of the source video; 0 without one.
        fps: Frames per second of the source video; None without one.
        video_reader: Reads frames of the source video.
        mask_reader: Reads frames of the mask; white pixels are generated.
        files: The input files.
    """

    size: tuple[int, int] | None = None
    frames: int = 0
    fps: float | None = None
    video: Take | None = None
    mask: Take | None = None
    pictures: tuple[Image.Image, ...] = ()
    files: tuple[Path, ...] = ()


def read(
    video: Path | None, mask: Path | None, pictures: Sequence[str | Path | Image.Image]
) -> ControlSources:
    """Reads images and the metadata of the videos; frames are read later.

    Args:
        video: The source video.
        mask: Its mask, of the same size and length.
        reference_images: Images, or their paths.

    Raises:
        InputError: A file is damaged, or the mask differs from the video in size or length.
    """
    if len(pictures) > MOST_PICTURES:
        why = f"has {len(pictures)} pictures, and at most {MOST_PICTURES} are allowed"
        raise InputError("`src_ref_images`", None, why, "choose some of them")
    if mask is not None and video is None:
        why, remedy = "is a mask without a video", "give the video with `src_video`"
        raise InputError("`src_mask`", mask, why, remedy)
    shown = tuple(images.from_value(one, "src_ref_images") for one in pictures)
    files = tuple(Path(one) for one in pictures if isinstance(one, str | Path))
    if video is None:
        return ControlSources(pictures=shown, files=files)
    found = read_video(video, "`src_video`")
    _check_pace(found)
    masking: Take | None = None
    if mask is not None:
        masking = partial(taken, _mask(mask, found))
        files = (mask, *files)
    own = partial(taken, found)
    return ControlSources(
        found.size, found.num_frames, found.fps, own, masking, shown, (video, *files)
    )


def _check_pace(video: VideoFile) -> None:
    if not _SLOWEST <= video.fps <= _FASTEST:
        why = f"has {video.fps:g} frames per second, and {_SLOWEST} to {_FASTEST} are allowed"
        raise InputError("`src_video`", video.path, why, "convert it to 16")
    if abs(video.fps - _TRAINED_FPS) > 0.01 * _TRAINED_FPS:
        logger.warning(
            "%s has %g frames per second; the network was trained with %d: all frames are used.",
            *(video.path, video.fps, _TRAINED_FPS),
        )


def _mask(path: Path, video: VideoFile) -> VideoFile:
    """Reads the metadata of a mask, which must have the size and length of its video."""
    mask = read_video(path, "`src_mask`")
    remedy = "give a mask of the same size and length as `src_video`"
    if mask.size != video.size:
        why = "has frames of {}x{} pixels, not {}x{}".format(*mask.size, *video.size)
        raise InputError("`src_mask`", path, why, remedy)
    mask = mask.synchronize(video)
    if mask.num_frames != video.num_frames:
        why = f"has {mask.num_frames} frames, not {video.num_frames}"
        raise InputError("`src_mask`", path, why, remedy)
    return mask
