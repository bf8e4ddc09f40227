"""Prepares the inputs of the denoising loop for each kind of task.

Legend: Z latent channels, f h w latent frames/height/width, F H W pixel ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from wan.pipeline.denoise import Conditions
from wan.pipeline.solvers import Draw
from wan.settings.request import Request
from wan.settings.timesteps import schedule

Encode = Callable[[Tensor], Tensor]
"""Pixels [3,F,H,W] in [-1, 1] to normalized latents [Z,f,h,w]."""
Look = Callable[[Sequence[Tensor]], Tensor]
"""Images [3,H,W] in [-1, 1] to CLIP features [images,T,C]."""


def noise(request: Request, device: torch.device) -> Draw:
    """Returns a function that samples noise, float32 [Z,f,h,w], from the seed of the video.

    The first sample is the initial noise. It is sampled on the CPU by default, so that a seed gives
    the same noise on every device; the official code samples on the device, as `--noise_device
    device` does.
    """
    where = torch.device("cpu") if request.noise_device == "cpu" else device
    generator = torch.Generator(where).manual_seed(request.base_seed)
    shape = request.latent_shape

    def draw() -> Tensor:
        made = torch.randn(shape, generator=generator, device=where, dtype=torch.float32)
        return made.to(device)

    return draw


def prepare(
    request: Request,
    contexts: tuple[Tensor, Tensor],
    images: Sequence[Image.Image],
    encode: Encode,
    look: Look,
    device: torch.device,
    given_start: Tensor | None = None,
) -> Conditions:
    """Prepares the inputs of the denoising loop for the video's kind of task.

    Args:
        contexts: Text embeddings of the prompt and of the negative prompt.
        images: The first image, and the last image of flf2v.
        encode: Encodes a video with the VAE.
        encode_image: Computes CLIP features.
        device: The device of the loop.
        initial_latents: Used instead of noise from the seed, [Z,f,h,w].
    """
    draw = noise(request, device)
    start = draw()  # sampled even if unused, so that later samples match the seed
    start = start if given_start is None else given_start.to(device)
    if request.sample_solver == "rcm":  # its first sigma is not 1
        start = start * schedule(request).sigmas[0]
    conditions = Conditions(start, *contexts, draw=draw)
    if not images:
        return conditions
    if request.preset.kind == "i2v":
        first, *last = images
        last = [one if one.size == first.size else cropped(one, first.size) for one in last]
        given = [pixels(one) for one in (first, *last)]
        features = look(given).to(device) if request.preset.images else None
        y = image_channels(request, given, encode).to(device)
        return replace(conditions, y=y, clip_fea=features)
    return _hold_first_frame(
        request, conditions, encode(cover(images[0], request.video_size)).to(device)
    )


def pixels(image: Image.Image) -> Tensor:
    """Converts an image to [3,H,W] float32 in [-1, 1]."""
    array = torch.from_numpy(np.array(image.convert("RGB")))
    return array.permute(2, 0, 1).float().div_(255).sub_(0.5).div_(0.5)


def image_channels(request: Request, images_3HW: Sequence[Tensor], encode: Encode) -> Tensor:
    """Returns i2v's condition [20,f,h,w]: 4 mask channels and 16 channels of encoded video.

    As in the official code, all frames except the images are zero (mid-gray), and each mask channel
    is one of the four frames of a latent frame; the first frame fills all four channels.
    """
    given = [resized(image, request.video_size) for image in images_3HW]
    width, height = request.video_size
    rest = torch.zeros(3, request.frame_num - len(given), height, width)
    latents = encode(torch.cat((given[0], rest, *given[1:]), dim=1))
    mask = torch.zeros(4, *latents.shape[1:], device=latents.device)
    mask[:, 0] = 1
    if len(given) == 2:
        mask[3, -1] = 1
    return torch.cat((mask, latents))


def resized(image_3HW: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns an image as a video of one frame, [3,1,H,W], of size (width, height).

    As in the official code, it is not cropped, and is interpolated on the CPU, bicubically without
    antialiasing.
    """
    rows_columns = size[::-1]
    return F.interpolate(image_3HW[None], size=rows_columns, mode="bicubic").transpose(0, 1)


def chained_channels(request: Request, anchor_Z1hw: Tensor, motion_Z1hw: Tensor | None) -> Tensor:
    """Returns the condition [20,f,h,w] of an SVI 2.0 Pro clip: a mask and latents.

    The latents are those of the image, the last one of the previous clip, and zeros. Unlike in
    `make_image_condition`, these are zero latents and not encoded gray frames, and the mask covers
    only the image.
    """
    _, frames, height, width = request.latent_shape
    known = [anchor_Z1hw, *([] if motion_Z1hw is None else [motion_Z1hw.to(anchor_Z1hw.device)])]
    rest = anchor_Z1hw.new_zeros(len(anchor_Z1hw), frames - len(known), height, width)
    mask = anchor_Z1hw.new_zeros(4, frames, height, width)
    mask[:, 0] = 1
    return torch.cat((mask, torch.cat((*known, rest), dim=1)))


def cover(image: Image.Image, size: tuple[int, int]) -> Tensor:
    """Returns ti2v's first frame [3,1,H,W]: the image scaled and center-cropped."""
    return pixels(cropped(image, size)).unsqueeze(1)


def cropped(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scales an image to cover (width, height), and crops it to its center."""
    width, height = size
    scale = max(width / image.width, height / image.height)
    resized = image.convert("RGB").resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS
    )
    left, top = (resized.width - width) // 2, (resized.height - height) // 2
    return resized.crop((left, top, left + width, top + height))


def _hold_first_frame(request: Request, conditions: Conditions, first_Z1hw: Tensor) -> Conditions:
    """Fixes ti2v's first latent frame: its tokens have timestep 0 and never change."""
    frames, height, width = request.grid
    keep = torch.zeros(frames, dtype=torch.float32)
    keep[1:] = 1

    def impose(latents: Tensor) -> Tensor:
        return torch.cat((first_Z1hw, latents[:, 1:]), dim=1)

    def timesteps(t: Tensor) -> Tensor:
        return (keep * t).repeat_interleave(height * width).unsqueeze(0)

    start = impose(conditions.start)
    return replace(conditions, start=start, timesteps=timesteps, impose=impose)
