"""Video to video: denoising starts from a noisy video (SDEdit, arXiv:2108.01073).

The source is encoded, or is a file of latents, and is mixed with noise at the first sigma of the
shortened noise schedule; `wan.settings.noise_schedule` decides which steps remain.

Legend: Z latent channels, f h w latent frames/height/width, F H W pixel ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan.media import images
from wan.media.video_reader import FrameReader, VideoFile, read_frames_at, read_video
from wan.media.video_writer import load_latents, read_latents_shape
from wan.settings.errors import InputError
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.presets import Preset
from wan.settings.rules import Values
from wan.settings.video_options import Size
from wan.tasks.base import (
    DenoiseInputs,
    Encoders,
    Inputs,
    Task,
    VideoParams,
)
from wan.utils.log import logger

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_STRENGTH = 0.8  # as in diffusers
_MIN_FPS, _MAX_FPS = 1, 240  # frames per second, the range of `fps`


@dataclass(frozen=True, kw_only=True)
class SourceInputs(Inputs):
    """The source of a video.

    Attributes:
        size: (width, height) of the source; None without one.
        num_frames: The number of frames of the source; 0 without one.
        fps: Frames per second of the source; None if unknown.
        video_reader: Reads frames of the source video; None for a file of latents.
        latents_path: The file of latents; None for a video.
    """

    size: Size | None = None
    num_frames: int = 0
    fps: float | None = None
    video_reader: FrameReader | None = None
    latents_path: Path | None = None


class VideoToVideo(Task):
    """The part of a task that may start from a video. Without `src_video` it changes nothing."""

    def read_inputs(self, preset: Preset, values: Values) -> Inputs:
        if "src_video" not in values:
            return Inputs()
        path = values["src_video"]
        if _is_safetensors(path):
            return _read_source_latents(path, preset)
        video = read_video(path, "`src_video`")
        check_source_fps(video, preset.fps)
        return SourceInputs(
            size=video.size,
            num_frames=video.num_frames,
            fps=video.fps,
            video_reader=partial(read_frames_at, video),
            files=(path,),
        )

    def complete_settings(
        self, preset: Preset, values: Values, inputs: Inputs, defaults: Values
    ) -> dict[str, Any]:
        """Completes the frames, the size and the strength from the source."""
        if not isinstance(inputs, SourceInputs) or inputs.size is None:
            return {}
        settings = limit_frames(preset, values, inputs, defaults)
        is_video = inputs.latents_path is None
        if "size" not in values and inputs.source_size is None:
            width, height = defaults.get("size", preset.size)
            area = width * height if is_video else inputs.size[0] * inputs.size[1]
            settings["size"] = compute_source_size(preset, inputs.size, area)
        if not values.get("refine"):
            settings["strength"] = values.get("strength", DEFAULT_STRENGTH)
        num_used = ({"frame_num": preset.frame_num} | {**defaults, **values, **settings})[
            "frame_num"
        ]
        if num_used < inputs.num_frames:
            message = "%s has %d frames; the first %d are used."
            logger.info(message, values["src_video"], inputs.num_frames, num_used)
        return settings | {"has_source_video": is_video}

    def choose_fps(self, params: VideoParams, inputs: Inputs, defaults: Values) -> float:
        return choose_source_fps(params, inputs)

    def count_encoded_latents(self, params: VideoParams) -> int:
        return params.latent_shape[1] if params.has_source_video else 0

    def list_notices(self, params: VideoParams) -> tuple[str, ...]:
        if not params.starts_from_source:
            return ()
        schedule = make_noise_schedule(params)
        experts = " and ".join(dict.fromkeys(schedule.experts))
        return (
            f"Video to video: {len(schedule.experts)} of {params.num_forwards} steps ({experts}), "
            f"from a noise share (sigma) of {schedule.sigmas[0]:.4g}.",
        )

    def make_denoise_inputs(
        self, params: VideoParams, base: DenoiseInputs, inputs: Inputs, encoders: Encoders
    ) -> DenoiseInputs:
        if not isinstance(inputs, SourceInputs) or inputs.size is None:
            return base
        if inputs.latents_path is not None:
            latents = fit_latents(load_latents(inputs.latents_path), params.latent_shape)
        else:
            assert inputs.video_reader is not None
            latents = encoders.encode_video(_read_source_frames(inputs.video_reader, params))
        sigma = make_noise_schedule(params).sigmas[0]
        latents = latents.to(encoders.torch_device)
        return replace(base, initial_latents=base.initial_latents + (1 - sigma) * latents)


def choose_source_fps(params: VideoParams, inputs: Inputs) -> float:
    """Returns the source's frames per second, or the task's without a source video."""
    return inputs.fps or params.fps if isinstance(inputs, SourceInputs) else params.fps


def limit_frames(
    preset: Preset, values: Values, inputs: SourceInputs, defaults: Values
) -> dict[str, Any]:
    """Limits the frames of the video to those of its source; refuses more than it has."""
    settings = {"frame_num": preset.frame_num} | {**defaults} | {**values}
    if inputs.num_frames >= settings["frame_num"]:
        return {}
    if "frame_num" in values:
        why = f"has {inputs.num_frames} frames, and `frame_num` is {values['frame_num']}"
        remedy = "give a longer one, or a smaller `frame_num`"
        raise InputError("`src_video`", values["src_video"], why, remedy)
    return {"frame_num": (inputs.num_frames - 1) // 4 * 4 + 1}


def check_source_fps(video: VideoFile, trained_fps: int) -> None:
    """Refuses a video of an unusable frame rate; logs a warning for an untrained one."""
    if not _MIN_FPS <= video.fps <= _MAX_FPS:
        why = f"has {video.fps:g} frames per second, and {_MIN_FPS} to {_MAX_FPS} are allowed"
        raise InputError("`src_video`", video.path, why, f"convert it to {trained_fps}")
    if abs(video.fps - trained_fps) > 0.01 * trained_fps:
        logger.warning(
            "%s has %g frames per second; the network was trained with %d: all frames are used.",
            *(video.path, video.fps, trained_fps),
        )


def compute_source_size(preset: Preset, source: Size, area: int) -> Size:
    """Computes the size of a video: the source's, in whole tokens, within `area`."""
    if source[0] * source[1] > area:
        return compute_ti2v_size(preset, source, area)
    multiple = preset.size_multiple
    return images.check_nonzero_size(
        source, (source[0] // multiple * multiple, source[1] // multiple * multiple)
    )


def compute_ti2v_size(preset: Preset, image: Size, area: int) -> Size:
    """Computes the size of a ti2v video, which the image is scaled to cover and cropped to."""
    multiple = preset.size_multiple
    return images.check_nonzero_size(image, best_output_size(*image, multiple, multiple, area))


def best_output_size(w: int, h: int, dw: int, dh: int, expected_area: int) -> Size:
    """Computes the (width, height) of multiples of dw and dh for an image of w * h pixels.

    As in the official function of this name, there are two candidates within `expected_area`, one
    with the height rounded first and one with the width; the one closer to the image's aspect ratio
    is taken, on a tie the first. (0, 0): the area is too small.
    """
    ratio = w / h
    ideal_width = math.sqrt(expected_area * ratio)
    ideal_height = expected_area / ideal_width

    def round_down(side: float, multiple: int) -> int:
        return int(side // multiple * multiple)

    width, height = round_down(ideal_width, dw), round_down(ideal_height, dh)
    candidates = [(round_down(expected_area / height, dw), height) if height else (0, 0)]
    candidates.append((width, round_down(expected_area / width, dh)) if width else (0, 0))

    def measure_distortion(candidate: Size) -> float:
        if not all(candidate):
            return math.inf
        candidate_ratio = candidate[0] / candidate[1]
        return max(ratio / candidate_ratio, candidate_ratio / ratio)

    return min(candidates, key=measure_distortion)


def read_frames_at_size(reader: FrameReader, num_frames: int, size: Size) -> Tensor:
    """Reads a video's first frames, uint8 [F,H,W,3], scaled to cover (width, height)."""
    import numpy as np
    import torch
    from PIL import Image

    frames_FHW3 = reader(range(num_frames))
    if frames_FHW3.shape[1:3] != size[::-1]:
        scaled = (
            images.scale_and_crop_image(Image.fromarray(frame), size) for frame in frames_FHW3
        )
        frames_FHW3 = np.stack([np.asarray(image) for image in scaled])
    return torch.from_numpy(np.ascontiguousarray(frames_FHW3))


def normalize_bytes(pixels: Tensor) -> Tensor:
    """Converts uint8 pixels to floats in [-1, 1]."""
    return pixels.float().div_(255).sub_(0.5).div_(0.5)


def fit_latents(latents_Zfhw: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Returns the first latent frames, scaled to cover (height, width) of `shape` and cropped.

    Scaled bilinearly in each frame.
    """
    from torch.nn.functional import interpolate

    _, frames, height, width = shape
    latents = latents_Zfhw[:, :frames]
    rows, columns = latents.shape[2:]
    if (rows, columns) == (height, width):
        return latents
    scale = max(height / rows, width / columns)
    scaled_size = round(rows * scale), round(columns * scale)
    scaled = interpolate(latents, size=scaled_size, mode="bilinear", align_corners=False)
    y_offset, x_offset = (scaled_size[0] - height) // 2, (scaled_size[1] - width) // 2
    return scaled[..., y_offset : y_offset + height, x_offset : x_offset + width].contiguous()


def _read_source_frames(reader: FrameReader, params: VideoParams) -> Tensor:
    frames_FHW3 = read_frames_at_size(reader, params.frame_num, params.video_size)
    return normalize_bytes(frames_FHW3.permute(3, 0, 1, 2))


def _is_safetensors(path: Path) -> bool:
    """Returns whether a file starts like a safetensors file; its name does not matter."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(10)[8:] == b'{"'


def _read_source_latents(path: Path, preset: Preset) -> SourceInputs:
    """Reads the shape of a file of latents; the latents are read later."""
    channels, frames, height, width = read_latents_shape(path)
    if channels != preset.latent_channels:
        why = f"holds latents of {channels} channels, and {preset.task} has "
        why += f"{preset.latent_channels}"
        raise InputError("`src_video`", path, why, "give its mp4")
    t, h, w = preset.vae_stride
    return SourceInputs(
        size=(width * w, height * h),
        num_frames=(frames - 1) * t + 1,
        latents_path=path,
        files=(path,),
    )
