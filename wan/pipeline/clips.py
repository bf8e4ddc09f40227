"""Generates a speech-to-video (S2V) video clip by clip; each clip continues the previous one.

The last 73 frames of a clip are encoded and appended as extra tokens to the next clip. This number,
the three frames lost at the start and the seed of each clip are those of the official code.

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

from wan.log import logger
from wan.pipeline.conditioning import noise, pixels
from wan.pipeline.denoise import Conditions, Denoising
from wan.settings.request import Request, Size
from wan.settings.sound import MOTION_FRAMES, MOTION_LATENTS

if TYPE_CHECKING:
    from wan.pipeline.media import PoseVideo
    from wan.pipeline.pipeline import Inputs, Pipeline

_PICTURES = 6  # motion frames filled with the image, with start_from_ref


@dataclass(frozen=True)
class Clip:
    """A generated clip.

    Attributes:
        latents: [Z,f,h,w], on every rank.
        frames: [3,F,H,W] in [-1, 1], the clip without overlap frames; None except on the main rank.
        state: Start of the next clip of a chain, on every rank: the last latent frame [Z,1,h,w] or
            the last frame [3,H,W].
    """

    latents: Tensor
    frames: Tensor | None
    end: Tensor | None = None


def made(pipeline: Pipeline, request: Request, inputs: Inputs) -> Iterator[Clip]:
    """Generates the clips of an S2V video in order; all ranks call it.

    Clip k has the seed `base_seed` + k.
    """
    assert inputs.image is not None and inputs.sound is not None
    assert request.infer_frames is not None and request.num_clip is not None
    contexts = pipeline.texts(request, inputs.prompt_embeds, inputs.negative_prompt_embeds)
    rows = pipeline.sound_rows(inputs.sound, request.num_clip * request.infer_frames)
    with pipeline.stages("conditioning"):
        picture = pixels(framed(inputs.image, request.video_size)).unsqueeze(1)
        reference = pipeline.encode(picture)
        history = torch.zeros(3, MOTION_FRAMES, *picture.shape[2:])
        if request.start_from_ref:
            history[:, -_PICTURES:] = picture
            motion = pipeline.encode(history)
        else:  # not used by the first clip
            motion = reference.new_zeros(len(reference), MOTION_LATENTS, *reference.shape[2:])
    poses = None if inputs.pose is None else _poses(inputs.pose, request)
    silence = torch.zeros_like(rows[..., : request.infer_frames])
    for index in range(request.num_clip):
        if request.num_clip > 1:
            logger.info("Clip %d of %d", index + 1, request.num_clip)
        one = replace(request, base_seed=request.base_seed + index)
        dropped = index == 0 and not request.start_from_ref
        scene: dict[str, Any] = {
            "ref_latents": [reference],
            "motion_latents": [motion],
            "cond_states": None if poses is None else [_encoded_pose(pipeline, next(poses))],
            "drop_motion_frames": dropped,
        }
        first = index * request.infer_frames
        heard = rows[..., first : first + request.infer_frames].contiguous()
        given = {"cond": scene | {"audio_input": heard}, "uncond": scene | {"audio_input": silence}}
        draw = noise(one, pipeline.device.torch_device)
        conditions = Conditions(draw(), *contexts, draw=draw, given=given)
        latents = pipeline.advanced(Denoising(one, conditions))
        pipeline.done(pipeline.experts)
        frames = pipeline.decode(torch.cat((reference if dropped else motion, latents), dim=1))
        if frames is not None:
            frames = frames[:, -request.clip_frames(index) :]
        yield Clip(latents, frames)
        if index + 1 < request.num_clip:
            history = _continued(pipeline, history, frames)
            del frames  # free them before the next clip
            with pipeline.stages("conditioning"):
                motion = pipeline.encode(history)
            history = history.cpu()  # free accelerator memory


def _continued(pipeline: Pipeline, history: Tensor, frames: Tensor | None) -> Tensor:
    """Returns the last `MOTION_FRAMES` frames of the video so far, on every rank."""

    def last() -> Tensor:
        assert frames is not None, "the main rank has them"
        new = frames[:, -MOTION_FRAMES:]
        return torch.cat((history[:, new.shape[1] :].to(new.device), new), dim=1)

    return pipeline.sharing.latents(last)


def framed(image: Image.Image, size: Size) -> Image.Image:
    """Scales the shorter side of an image to the shorter one of (width, height), and crops it.

    As in the official code, the image is cropped to its center, and padded with black if needed.
    """
    image, short = image.convert("RGB"), min(size)
    resized = image.resize(_scaled(image.size, short), Image.Resampling.BILINEAR)
    whole = Image.new("RGB", (max(size[0], resized.width), max(size[1], resized.height)))
    places = [max(0, (side - own) // 2) for side, own in zip(size, resized.size, strict=True)]
    whole.paste(resized, (places[0], places[1]))
    left, top = (_start(own, side) for own, side in zip(whole.size, size, strict=True))
    return whole.crop((left, top, left + size[0], top + size[1]))


def _scaled(size: Size, short: int) -> Size:
    width, height = size
    if width <= height:
        return short, int(short * height / width)
    return int(short * width / height), short


def _start(own: int, side: int) -> int:
    return round((own - side) / 2.0)


def _poses(pose: PoseVideo, request: Request) -> Iterator[Tensor]:
    """Yields the pose frames of each clip, [3,F,H,W] in [-1, 1]; black after the video's end."""
    frames, count = pose.frames(), request.infer_frames
    width, height = request.video_size
    while True:
        read = [_framed_pose(frame, (width, height)) for frame in islice(frames, count)]
        black = [torch.full((3, height, width), -1.0)] * ((count or 0) - len(read))
        yield torch.stack((*read, *black), dim=1)


def _framed_pose(frame: np.ndarray, size: Size) -> Tensor:
    """Returns [3,H,W] in [-1, 1], scaled as by `fit_image_to_size`, but padded with gray."""
    pixels_3HW = torch.from_numpy(frame.copy()).permute(2, 0, 1).float() / 255 * 2 - 1
    columns, rows = _scaled((frame.shape[1], frame.shape[0]), min(size))
    if (rows, columns) != frame.shape[:2]:
        pixels_3HW = F.interpolate(
            pixels_3HW[None], size=(rows, columns), mode="bilinear", antialias=True
        )[0]
    missing = [max(0, side - own) for side, own in zip(size, (columns, rows), strict=True)]
    sides = [part for more in missing for part in (more // 2, (more + 1) // 2)]
    whole = F.pad(pixels_3HW, sides)
    top, left = _start(whole.shape[1], size[1]), _start(whole.shape[2], size[0])
    return whole[:, top : top + size[1], left : left + size[0]]


def _encoded_pose(pipeline: Pipeline, frames_3FHW: Tensor) -> Tensor:
    """Encodes the poses of a clip; the first frame is duplicated and its latent dropped."""
    with pipeline.stages("conditioning"):
        return pipeline.encode(torch.cat((frames_3FHW[:, :1], frames_3FHW), dim=1))[:, 1:]
