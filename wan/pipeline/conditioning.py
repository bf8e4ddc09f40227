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

from wan.pipeline.denoise import DenoiseInputs
from wan.pipeline.scheduler import SampleNoise
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.request import VideoParams

Encode = Callable[[Tensor], Tensor]
"""Pixels [3,F,H,W] in [-1, 1] to normalized latents [Z,f,h,w]."""
EncodeImage = Callable[[Sequence[Tensor]], Tensor]
"""Images [3,H,W] in [-1, 1] to CLIP features [images,T,C]."""


def make_noise_sampler(params: VideoParams, device: torch.device) -> SampleNoise:
    """Returns a function that samples noise, float32 [Z,f,h,w], from the seed of the video.

    The first sample is the initial noise. It is sampled on the CPU by default, so that a seed gives
    the same noise on every device; the official code samples on the device, as `--noise_device
    device` does.
    """
    noise_device = torch.device("cpu") if params.noise_device == "cpu" else device
    generator = torch.Generator(noise_device).manual_seed(params.base_seed)
    shape = params.latent_shape

    def sample_noise() -> Tensor:
        sample = torch.randn(shape, generator=generator, device=noise_device, dtype=torch.float32)
        return sample.to(device)

    return sample_noise


def prepare_denoise_inputs(
    params: VideoParams,
    contexts: tuple[Tensor, Tensor],
    images: Sequence[Image.Image],
    encode: Encode,
    encode_image: EncodeImage,
    device: torch.device,
    initial_latents: Tensor | None = None,
) -> DenoiseInputs:
    """Prepares the inputs of the denoising loop for the video's kind of task.

    Args:
        contexts: Text embeddings of the prompt and of the negative prompt.
        images: The first image, and the last image of flf2v.
        encode: Encodes a video with the VAE.
        encode_image: Computes CLIP features.
        device: The device of the loop.
        initial_latents: Used instead of noise from the seed, [Z,f,h,w].
    """
    sample_noise = make_noise_sampler(params, device)
    latents = sample_noise()  # sampled even if unused, so that later samples match the seed
    latents = latents if initial_latents is None else initial_latents.to(device)
    if params.sample_solver == "rcm":  # its first sigma is not 1
        latents = latents * make_noise_schedule(params).sigmas[0]
    inputs = DenoiseInputs(latents, *contexts, sample_noise=sample_noise)
    if not images:
        return inputs
    if params.preset.kind == "i2v":
        first, *last_images = images
        last_images = [
            image if image.size == first.size else scale_and_crop_image(image, first.size)
            for image in last_images
        ]
        images_3HW = [convert_image_to_tensor(image) for image in (first, *last_images)]
        features = (
            encode_image(images_3HW).to(device) if params.preset.num_clip_vision_images else None
        )
        y = make_image_condition(params, images_3HW, encode).to(device)
        return replace(inputs, y=y, clip_fea=features)
    return _fix_first_frame(
        params, inputs, encode(make_first_frame(images[0], params.video_size)).to(device)
    )


def convert_image_to_tensor(image: Image.Image) -> Tensor:
    """Converts an image to [3,H,W] float32 in [-1, 1]."""
    array = torch.from_numpy(np.array(image.convert("RGB")))
    return array.permute(2, 0, 1).float().div_(255).sub_(0.5).div_(0.5)


def make_image_condition(
    params: VideoParams, images_3HW: Sequence[Tensor], encode: Encode
) -> Tensor:
    """Returns i2v's condition [20,f,h,w]: 4 mask channels and 16 channels of encoded video.

    As in the official code, all frames except the images are zero (mid-gray), and each mask channel
    is one of the four frames of a latent frame; the first frame fills all four channels.
    """
    videos_31HW = [resize_image_to_video(image, params.video_size) for image in images_3HW]
    width, height = params.video_size
    gray_frames = torch.zeros(3, params.frame_num - len(videos_31HW), height, width)
    latents = encode(torch.cat((videos_31HW[0], gray_frames, *videos_31HW[1:]), dim=1))
    mask = torch.zeros(4, *latents.shape[1:], device=latents.device)
    mask[:, 0] = 1
    if len(videos_31HW) == 2:
        mask[3, -1] = 1
    return torch.cat((mask, latents))


def resize_image_to_video(image_3HW: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns an image as a video of one frame, [3,1,H,W], of size (width, height).

    As in the official code, it is not cropped, and is interpolated on the CPU, bicubically without
    antialiasing.
    """
    height_width = size[::-1]
    return F.interpolate(image_3HW[None], size=height_width, mode="bicubic").transpose(0, 1)


def make_chained_condition(
    params: VideoParams, anchor_Z1hw: Tensor, motion_Z1hw: Tensor | None
) -> Tensor:
    """Returns the condition [20,f,h,w] of an SVI 2.0 Pro clip: a mask and latents.

    The latents are those of the image, the last one of the previous clip, and zeros. Unlike in
    `make_image_condition`, these are zero latents and not encoded gray frames, and the mask covers
    only the image.
    """
    _, frames, height, width = params.latent_shape
    known_latents = [anchor_Z1hw]
    if motion_Z1hw is not None:
        known_latents.append(motion_Z1hw.to(anchor_Z1hw.device))
    padding = anchor_Z1hw.new_zeros(len(anchor_Z1hw), frames - len(known_latents), height, width)
    mask = anchor_Z1hw.new_zeros(4, frames, height, width)
    mask[:, 0] = 1
    return torch.cat((mask, torch.cat((*known_latents, padding), dim=1)))


def make_first_frame(image: Image.Image, size: tuple[int, int]) -> Tensor:
    """Returns ti2v's first frame [3,1,H,W]: the image scaled and center-cropped."""
    return convert_image_to_tensor(scale_and_crop_image(image, size)).unsqueeze(1)


def scale_and_crop_image(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scales an image to cover (width, height), and crops it to its center."""
    width, height = size
    scale = max(width / image.width, height / image.height)
    resized = image.convert("RGB").resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS
    )
    x_offset, y_offset = (resized.width - width) // 2, (resized.height - height) // 2
    return resized.crop((x_offset, y_offset, x_offset + width, y_offset + height))


def _fix_first_frame(
    params: VideoParams, inputs: DenoiseInputs, first_Z1hw: Tensor
) -> DenoiseInputs:
    """Fixes ti2v's first latent frame: its tokens have timestep 0 and never change."""
    frames, height, width = params.grid
    timestep_mask = torch.zeros(frames, dtype=torch.float32)
    timestep_mask[1:] = 1

    def fix_latents(latents: Tensor) -> Tensor:
        return torch.cat((first_Z1hw, latents[:, 1:]), dim=1)

    def expand_timestep(t: Tensor) -> Tensor:
        return (timestep_mask * t).repeat_interleave(height * width).unsqueeze(0)

    initial_latents = fix_latents(inputs.initial_latents)
    return replace(
        inputs,
        initial_latents=initial_latents,
        make_model_timesteps=expand_timestep,
        restore_fixed_frames=fix_latents,
    )
