"""Reads the inputs of VACE: a source video, its mask, and reference images.

This module does not import torch, so that bad files are refused quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from wan.media import images
from wan.media.video_reader import VideoFile, read_video
from wan.pipeline.driving import FrameReader, read_frames_at
from wan.settings.errors import InputError
from wan.utils.log import logger

if TYPE_CHECKING:
    from PIL import Image

MAX_REFERENCE_IMAGES = 16  # each adds a latent frame
_TRAINED_FPS = 16
_MIN_FPS, _MAX_FPS = 1, 240  # frames per second, the range of `fps`


@dataclass(frozen=True)
class VaceInputs:
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
    num_frames: int = 0
    fps: float | None = None
    video_reader: FrameReader | None = None
    mask_reader: FrameReader | None = None
    reference_images: tuple[Image.Image, ...] = ()
    files: tuple[Path, ...] = ()


def read_vace_files(
    video: Path | None, mask: Path | None, reference_images: Sequence[str | Path | Image.Image]
) -> VaceInputs:
    """Reads images and the metadata of the videos; frames are read later.

    Args:
        video: The source video.
        mask: Its mask, of the same size and length.
        reference_images: Images, or their paths.

    Raises:
        InputError: A file is damaged, or the mask differs from the video in size or length.
    """
    if len(reference_images) > MAX_REFERENCE_IMAGES:
        why = (
            f"has {len(reference_images)} pictures, and at most {MAX_REFERENCE_IMAGES} are allowed"
        )
        raise InputError("`src_ref_images`", None, why, "choose some of them")
    if mask is not None and video is None:
        why, remedy = "is a mask without a video", "give the video with `src_video`"
        raise InputError("`src_mask`", mask, why, remedy)
    loaded_images = tuple(
        images.convert_to_image(image, "src_ref_images") for image in reference_images
    )
    files = tuple(Path(image) for image in reference_images if isinstance(image, str | Path))
    if video is None:
        return VaceInputs(reference_images=loaded_images, files=files)
    video_file = read_video(video, "`src_video`")
    _check_source_fps(video_file)
    mask_reader: FrameReader | None = None
    if mask is not None:
        mask_reader = partial(read_frames_at, _read_mask_video(mask, video_file))
        files = (mask, *files)
    video_reader = partial(read_frames_at, video_file)
    return VaceInputs(
        video_file.size,
        video_file.num_frames,
        video_file.fps,
        video_reader,
        mask_reader,
        loaded_images,
        (video, *files),
    )


def _check_source_fps(video: VideoFile) -> None:
    if not _MIN_FPS <= video.fps <= _MAX_FPS:
        why = f"has {video.fps:g} frames per second, and {_MIN_FPS} to {_MAX_FPS} are allowed"
        raise InputError("`src_video`", video.path, why, "convert it to 16")
    if abs(video.fps - _TRAINED_FPS) > 0.01 * _TRAINED_FPS:
        logger.warning(
            "%s has %g frames per second; the network was trained with %d: all frames are used.",
            *(video.path, video.fps, _TRAINED_FPS),
        )


def _read_mask_video(path: Path, video: VideoFile) -> VideoFile:
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
