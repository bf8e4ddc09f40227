"""What differs between text-, image- and text-image-to-video before the loop starts.

Legend: Z latent channels, f h w latent frames/height/width, F H W pixel ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from wan.pipeline.denoise import Conditions
from wan.settings.request import Request

Encode = Callable[[Tensor], Tensor]
"""Pixels [3,F,H,W] in [-1, 1] to normalised latents [Z,f,h,w]."""


def noise(request: Request, device: torch.device) -> Tensor:
    """Initial noise, float32 [Z,f,h,w], the first draw from the request's seed.

    Drawn on the CPU by default, so that a seed means the same video on every device; the official
    code draws on the device (--noise_device device).
    """
    where = torch.device("cpu") if request.noise_device == "cpu" else device
    generator = torch.Generator(where).manual_seed(request.base_seed)
    shape = request.latent_shape
    return torch.randn(shape, generator=generator, device=where, dtype=torch.float32).to(device)


def prepare(
    request: Request,
    contexts: tuple[Tensor, Tensor],
    image: Image.Image | None,
    encode: Encode,
    device: torch.device,
) -> Conditions:
    """The start of the loop and what it is held to, for the request's kind of task.

    Args:
        request: The video.
        contexts: Text embeddings of the prompt and of the negative one.
        image: The image to start from.
        encode: The VAE.
        device: Where the loop runs.
    """
    conditions = Conditions(noise(request, device), *contexts)
    if image is None:
        return conditions
    if request.preset.kind == "i2v":
        y = image_channels(request, pixels(image), encode).to(device)
        return replace(conditions, y=y)
    return _hold_first_frame(
        request, conditions, encode(cover(image, request.video_size)).to(device)
    )


def pixels(image: Image.Image) -> Tensor:
    """[3,H,W] float32 in [-1, 1]."""
    array = torch.from_numpy(np.array(image.convert("RGB")))
    return array.permute(2, 0, 1).float().div_(255).sub_(0.5).div_(0.5)


def image_channels(request: Request, image_3HW: Tensor, encode: Encode) -> Tensor:
    """i2v: [20,f,h,w], a mask of the given frame (4 channels) and the encoded video (16).

    The image is resized, not cropped, by bicubic interpolation without antialiasing on the CPU;
    the frames after it are zeros (mid-grey). Both as officially.
    """
    width, height = request.video_size
    first = F.interpolate(image_3HW[None], size=(height, width), mode="bicubic")
    rest = torch.zeros(3, request.frame_num - 1, height, width)
    latents = encode(torch.cat((first.transpose(0, 1), rest), dim=1))
    mask = torch.zeros(4, *latents.shape[1:], device=latents.device)
    mask[:, 0] = 1
    return torch.cat((mask, latents))


def cover(image: Image.Image, size: tuple[int, int]) -> Tensor:
    """ti2v: [3,1,H,W], the image scaled to cover (width, height) and cropped to its centre."""
    width, height = size
    scale = max(width / image.width, height / image.height)
    resized = image.convert("RGB").resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS
    )
    left, top = (resized.width - width) // 2, (resized.height - height) // 2
    return pixels(resized.crop((left, top, left + width, top + height))).unsqueeze(1)


def _hold_first_frame(request: Request, conditions: Conditions, first_Z1hw: Tensor) -> Conditions:
    """ti2v: the first latent frame is given; its tokens are at timestep 0 and never change."""
    frames, height, width = request.grid
    keep = torch.zeros(frames, dtype=torch.float32)
    keep[1:] = 1

    def impose(latents: Tensor) -> Tensor:
        return torch.cat((first_Z1hw, latents[:, 1:]), dim=1)

    def timesteps(t: Tensor) -> Tensor:
        return (keep * t).repeat_interleave(height * width).unsqueeze(0)

    start = impose(conditions.start)
    return replace(conditions, start=start, timesteps=timesteps, impose=impose)
