"""Looks into what a video of VACE is made from: a video, its mask, and pictures.

Torch is not imported with this file, because bad files are refused before it is.
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

MOST_PICTURES = 16  # each is one more latent frame that every token attends to
_TRAINED_FPS = 16
_SLOWEST, _FASTEST = 1, 240  # frames a second, as `fps` takes them


@dataclass(frozen=True)
class ControlSources:
    """What a video of VACE is made from.

    Attributes:
        size: (width, height) of the video; None without one.
        frames: How many frames the video has; 0 without one.
        fps: Frames a second of the video; None without one.
        video: Returns frames of the video.
        mask: Returns frames of the mask, which is white where something new is made.
        pictures: What is to be seen.
        files: The files that were read.
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
    """Looks into the files; frames of the videos are read later.

    Args:
        video: The video that is changed or followed.
        mask: Its mask, as large and as long.
        pictures: Pictures, or their files.

    Raises:
        InputError: A file is damaged, or does not fit the video.
    """
    if len(pictures) > MOST_PICTURES:
        why = f"names {len(pictures)} pictures, and at most {MOST_PICTURES} are taken"
        raise InputError("`src_ref_images`", None, why, "choose some of them")
    if mask is not None and video is None:
        why, remedy = "says what of a video is made anew", "give the video with `src_video`"
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
        why = f"has {video.fps:g} frames a second, and {_SLOWEST} to {_FASTEST} are taken"
        raise InputError("`src_video`", video.path, why, "convert it to 16")
    if abs(video.fps - _TRAINED_FPS) > 0.01 * _TRAINED_FPS:
        logger.warning(
            "%s has %g frames a second, and the network was trained with %d: all frames are taken.",
            *(video.path, video.fps, _TRAINED_FPS),
        )


def _mask(path: Path, video: VideoFile) -> VideoFile:
    """Reads the time stamps of a mask, which must be as large and as long as its video."""
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
