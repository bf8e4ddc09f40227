"""Encodes VACE's source video, mask and reference images into its context.

Legend: Z latent channels, f h w latent frames/height/width, F H W pixel ones.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from wan.pipeline.conditioning import Encode, convert_image_to_tensor, scale_and_crop_image
from wan.pipeline.denoise import DenoiseInputs
from wan.pipeline.driving import FrameReader
from wan.pipeline.sources import VaceInputs
from wan.settings.request import Size, VideoParams

_NO_INPUTS = VaceInputs()


def add_vace_context(
    params: VideoParams,
    denoise_inputs: DenoiseInputs,
    vace_inputs: VaceInputs | None,
    encode: Encode,
) -> DenoiseInputs:
    """Adds the VACE context to the inputs of the denoising loop.

    Args:
        vace_inputs: None: only the prompt conditions the video.
        encode: Encodes a video with the VAE.
    """
    context = make_vace_context(params, vace_inputs or _NO_INPUTS, encode).to(
        denoise_inputs.initial_latents.device
    )
    scales = params.conditioning_scale or (1.0,)
    scale = scales[0] if len(scales) == 1 else scales
    model_kwargs = {"vace_context": [context], "vace_context_scale": scale}
    return replace(denoise_inputs, model_kwargs={"cond": model_kwargs, "uncond": model_kwargs})


def make_vace_context(params: VideoParams, vace_inputs: VaceInputs, encode: Encode) -> Tensor:
    """Returns the VACE context, float32 [96,f,h,w]: inactive latents, reactive latents, mask.

    The latent frames of the reference images precede those of the video, the last image first, as
    in diffusers. Without a source video all frames are gray and reactive.
    """
    size, num_frames = params.video_size, params.frame_num
    mask_FHW = torch.ones(1).expand(num_frames, *size[::-1])
    if vace_inputs.video_reader is None:
        inactive = reactive = encode(torch.zeros(3, num_frames, *size[::-1]))
    else:
        # The video stays uint8; each part is converted to float32 separately to save memory.
        video = _read_frames_at_size(vace_inputs.video_reader, num_frames, size).permute(3, 0, 1, 2)
        is_reactive_FHW = mask_FHW.bool()
        if vace_inputs.mask_reader is not None:
            mask_FHW = _read_frames_at_size(vace_inputs.mask_reader, num_frames, size)[
                ..., 0
            ].contiguous()
            is_reactive_FHW = mask_FHW > 127
        inactive = encode(_normalize_bytes(video).mul_(~is_reactive_FHW))
        reactive = encode(_normalize_bytes(video).mul_(is_reactive_FHW))
        del video, is_reactive_FHW
    mask_channels = fold_mask_to_vace_channels(mask_FHW, inactive.shape[1:]).to(inactive.device)
    context = torch.cat((inactive, reactive, mask_channels))
    for image in vace_inputs.reference_images:
        latent = encode(paste_image_on_canvas(image, size)).to(inactive.device)
        zeros = torch.zeros(len(context) - len(latent), *latent.shape[1:], device=inactive.device)
        context = torch.cat((torch.cat((latent, zeros)), context), dim=1)
    return context


def fold_mask_to_vace_channels(mask_FHW: Tensor, latents_fhw: torch.Size) -> Tensor:
    """Folds each latent pixel's 8 x 8 mask pixels into channels, [64,f,h,w].

    Frames are resampled to the nearest one. mask_FHW: floats from 0 to 1, or uint8 up to 255.
    """
    (frames, height, width), (num_latents, rows, columns) = mask_FHW.shape, latents_fhw
    mask_fHW = mask_FHW[((torch.arange(num_latents) + 0.5) * frames / num_latents).long()]
    if mask_fHW.dtype == torch.uint8:
        mask_fHW = (_normalize_bytes(mask_fHW) + 1) / 2
    cells = mask_fHW.reshape(num_latents, rows, height // rows, columns, width // columns)
    return cells.permute(2, 4, 0, 1, 3).flatten(0, 1)


def paste_image_on_canvas(image: Image.Image, size: Size) -> Tensor:
    """Pastes a scaled image on the center of a white canvas of (width, height): [3,1,H,W]."""
    width, height = size
    scale = min(height / image.height, width / image.width)
    scaled = max(1, int(image.height * scale)), max(1, int(image.width * scale))
    canvas = torch.ones(3, height, width)
    y_offset, x_offset = (height - scaled[0]) // 2, (width - scaled[1]) // 2
    canvas[:, y_offset : y_offset + scaled[0], x_offset : x_offset + scaled[1]] = F.interpolate(
        convert_image_to_tensor(image)[None], size=scaled, mode="bilinear", align_corners=False
    )[0]
    return canvas.unsqueeze(1)


def _read_frames_at_size(reader: FrameReader, num_frames: int, size: Size) -> Tensor:
    """Reads a video's first frames, uint8 [F,H,W,3], scaled to cover (width, height)."""
    frames_FHW3 = reader(range(num_frames))
    if frames_FHW3.shape[1:3] != size[::-1]:
        images = (scale_and_crop_image(Image.fromarray(frame), size) for frame in frames_FHW3)
        frames_FHW3 = np.stack([np.asarray(image) for image in images])
    return torch.from_numpy(np.ascontiguousarray(frames_FHW3))


def _normalize_bytes(pixels: Tensor) -> Tensor:
    """Converts uint8 pixels to floats in [-1, 1]."""
    return pixels.float().div_(255).sub_(0.5).div_(0.5)
