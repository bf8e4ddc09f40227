"""Generates a speech-to-video (S2V) video clip by clip; each clip continues the previous one.

The last 73 frames of a clip are encoded and appended as extra tokens to the next clip. This number,
the three frames that are dropped from the first clip and the seed of each clip are those of the
official code.

Legend: Z latent channels, f h w latent frames/height/width, F H W pixel ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from wan.pipeline.conditioning import convert_image_to_tensor, make_noise_sampler
from wan.pipeline.denoise import DenoiseInputs, DenoisingLoop
from wan.settings.request import Size, VideoParams
from wan.settings.sound import MOTION_FRAMES, MOTION_LATENTS
from wan.utils.log import logger

if TYPE_CHECKING:
    from wan.media.audio import PoseVideo
    from wan.pipeline.pipeline import Inputs, Pipeline

_NUM_IMAGE_FRAMES = 6  # motion frames filled with the image, with start_from_ref


@dataclass(frozen=True)
class Clip:
    """A generated clip.

    Attributes:
        latents: [Z,f,h,w], on every rank.
        frames: [3,F,H,W] in [-1, 1], the clip without overlap frames; None except on the main rank.
        state: With `chain`, what the next clip continues from, on every rank: the last latent frame
            [Z,1,h,w] or the last frame [3,H,W].
    """

    latents: Tensor
    frames: Tensor | None
    state: Tensor | None = None


def generate_s2v_clips(pipeline: Pipeline, params: VideoParams, inputs: Inputs) -> Iterator[Clip]:
    """Generates the clips of an S2V video in order; all ranks call it.

    Clip k has the seed `base_seed` + k.
    """
    assert inputs.image is not None and inputs.audio is not None
    assert params.infer_frames is not None and params.num_clip is not None
    contexts = pipeline.encode_prompt(params, inputs.prompt_embeds, inputs.negative_prompt_embeds)
    features = pipeline.sample_audio_features(inputs.audio, params.num_clip * params.infer_frames)
    with pipeline.stage_timer("conditioning"):
        image_pixels = convert_image_to_tensor(
            fit_image_to_size(inputs.image, params.video_size)
        ).unsqueeze(1)
        reference_latents = pipeline.encode_video(image_pixels)
        motion_frames = torch.zeros(3, MOTION_FRAMES, *image_pixels.shape[2:])
        if params.start_from_ref:
            motion_frames[:, -_NUM_IMAGE_FRAMES:] = image_pixels
            motion_latents = pipeline.encode_video(motion_frames)
        else:  # not used by the first clip
            motion_latents = reference_latents.new_zeros(
                len(reference_latents), MOTION_LATENTS, *reference_latents.shape[2:]
            )
    poses = None if inputs.pose is None else _read_pose_clips(inputs.pose, params)
    silence = torch.zeros_like(features[..., : params.infer_frames])
    for index in range(params.num_clip):
        if params.num_clip > 1:
            logger.info("Clip %d of %d", index + 1, params.num_clip)
        clip_params = replace(params, base_seed=params.base_seed + index)
        drop_motion_frames = index == 0 and not params.start_from_ref
        shared_kwargs: dict[str, Any] = {
            "ref_latents": [reference_latents],
            "motion_latents": [motion_latents],
            "cond_states": None if poses is None else [_encode_pose_clip(pipeline, next(poses))],
            "drop_motion_frames": drop_motion_frames,
        }
        start_frame = index * params.infer_frames
        clip_features = features[..., start_frame : start_frame + params.infer_frames].contiguous()
        model_kwargs = {
            "cond": shared_kwargs | {"audio_input": clip_features},
            "uncond": shared_kwargs | {"audio_input": silence},
        }
        sample_noise = make_noise_sampler(clip_params, pipeline.device.torch_device)
        denoise_inputs = DenoiseInputs(
            sample_noise(), *contexts, sample_noise=sample_noise, model_kwargs=model_kwargs
        )
        latents = pipeline.denoise(DenoisingLoop(clip_params, denoise_inputs))
        pipeline.release(pipeline.experts)
        frames = pipeline.decode(
            torch.cat((reference_latents if drop_motion_frames else motion_latents, latents), dim=1)
        )
        if frames is not None:
            frames = frames[:, -params.count_clip_frames(index) :]
        yield Clip(latents, frames)
        if index + 1 < params.num_clip:
            motion_frames = _update_motion_frames(pipeline, motion_frames, frames)
            del frames  # free them before the next clip
            with pipeline.stage_timer("conditioning"):
                motion_latents = pipeline.encode_video(motion_frames)
            motion_frames = motion_frames.cpu()  # free accelerator memory


def _update_motion_frames(
    pipeline: Pipeline, motion_frames: Tensor, frames: Tensor | None
) -> Tensor:
    """Returns the last `MOTION_FRAMES` frames of the video so far, on every rank."""

    def get_last_frames() -> Tensor:
        assert frames is not None, "the main rank has them"
        new = frames[:, -MOTION_FRAMES:]
        return torch.cat((motion_frames[:, new.shape[1] :].to(new.device), new), dim=1)

    return pipeline.work_sharing.run_on_rank0(get_last_frames)


def fit_image_to_size(image: Image.Image, size: Size) -> Image.Image:
    """Resizes an image so that its shorter side is min(size), and crops it to `size`.

    As in the official code, it is cropped to its center. A side that is too short is padded with
    black first.
    """
    image, short_side = image.convert("RGB"), min(size)
    resized = image.resize(_scale_short_side(image.size, short_side), Image.Resampling.BILINEAR)
    canvas = Image.new("RGB", (max(size[0], resized.width), max(size[1], resized.height)))
    offsets = [
        max(0, (side - source) // 2) for side, source in zip(size, resized.size, strict=True)
    ]
    canvas.paste(resized, (offsets[0], offsets[1]))
    x_offset, y_offset = (
        _get_crop_offset(source, side) for source, side in zip(canvas.size, size, strict=True)
    )
    return canvas.crop((x_offset, y_offset, x_offset + size[0], y_offset + size[1]))


def _scale_short_side(size: Size, short_side: int) -> Size:
    width, height = size
    if width <= height:
        return short_side, int(short_side * height / width)
    return int(short_side * width / height), short_side


def _get_crop_offset(source_side: int, target_side: int) -> int:
    return round((source_side - target_side) / 2.0)


def _read_pose_clips(pose: PoseVideo, params: VideoParams) -> Iterator[Tensor]:
    """Yields the pose frames of clips, [3,F,H,W] in [-1, 1], endlessly.

    Frames after the end of the pose video are black.
    """
    frames, count = pose.iter_poses(), params.infer_frames
    width, height = params.video_size
    while True:
        pose_frames = [_fit_pose_to_size(frame, (width, height)) for frame in islice(frames, count)]
        black = [torch.full((3, height, width), -1.0)] * ((count or 0) - len(pose_frames))
        yield torch.stack((*pose_frames, *black), dim=1)


def _fit_pose_to_size(frame: np.ndarray, size: Size) -> Tensor:
    """Returns [3,H,W] in [-1, 1], scaled as by `fit_image_to_size`, but padded with gray."""
    pixels_3HW = torch.from_numpy(frame.copy()).permute(2, 0, 1).float() / 255 * 2 - 1
    columns, rows = _scale_short_side((frame.shape[1], frame.shape[0]), min(size))
    if (rows, columns) != frame.shape[:2]:
        pixels_3HW = F.interpolate(
            pixels_3HW[None], size=(rows, columns), mode="bilinear", antialias=True
        )[0]
    missing = [max(0, side - source) for side, source in zip(size, (columns, rows), strict=True)]
    paddings = [padding for gap in missing for padding in (gap // 2, (gap + 1) // 2)]
    padded_frame = F.pad(pixels_3HW, paddings)
    y_offset = _get_crop_offset(padded_frame.shape[1], size[1])
    x_offset = _get_crop_offset(padded_frame.shape[2], size[0])
    return padded_frame[:, y_offset : y_offset + size[1], x_offset : x_offset + size[0]]


def _encode_pose_clip(pipeline: Pipeline, frames_3FHW: Tensor) -> Tensor:
    """Encodes the poses of a clip; the first frame is duplicated and its latent dropped."""
    with pipeline.stage_timer("conditioning"):
        return pipeline.encode_video(torch.cat((frames_3FHW[:, :1], frames_3FHW), dim=1))[:, 1:]
