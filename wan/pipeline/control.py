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

from wan.pipeline.conditioning import Encode, cropped, pixels
from wan.pipeline.denoise import Conditions
from wan.pipeline.driving import Take
from wan.pipeline.sources import ControlSources
from wan.settings.request import Request, Size

_NONE = ControlSources()


def added(
    request: Request, conditions: Conditions, sources: ControlSources | None, encode: Encode
) -> Conditions:
    """Adds the VACE context to the inputs of the denoising loop.

    Args:
        vace_inputs: None: only the prompt conditions the video.
        encode: Encodes a video with the VAE.
    """
    context = control(request, sources or _NONE, encode).to(conditions.start.device)
    scales = request.conditioning_scale or (1.0,)
    scale = scales[0] if len(scales) == 1 else scales
    given = {"vace_context": [context], "vace_context_scale": scale}
    return replace(conditions, given={"cond": given, "uncond": given})


def control(request: Request, sources: ControlSources, encode: Encode) -> Tensor:
    """Returns the VACE context, float32 [96,f,h,w]: inactive latents, reactive latents, mask.

    The latent frames of the reference images precede those of the video, the last image first, as
    in diffusers. Without a source video all frames are gray and reactive.
    """
    size, frames = request.video_size, request.frame_num
    mask_FHW = torch.ones(1).expand(frames, *size[::-1])
    if sources.video is None:
        kept = changed = encode(torch.zeros(3, frames, *size[::-1]))
    else:
        # The video stays uint8; each part is converted to float32 separately to save memory.
        video_3FHW = _frames(sources.video, frames, size).permute(3, 0, 1, 2)
        anew_FHW = mask_FHW.bool()
        if sources.mask is not None:
            mask_FHW = _frames(sources.mask, frames, size)[..., 0].contiguous()
            anew_FHW = mask_FHW > 127
        kept = encode(_floats(video_3FHW).mul_(~anew_FHW))
        changed = encode(_floats(video_3FHW).mul_(anew_FHW))
        del video_3FHW, anew_FHW
    folded = folded_mask(mask_FHW, kept.shape[1:]).to(kept.device)
    whole = torch.cat((kept, changed, folded))
    for picture in sources.pictures:
        latent = encode(on_canvas(picture, size)).to(kept.device)
        nothing = torch.zeros(len(whole) - len(latent), *latent.shape[1:], device=kept.device)
        whole = torch.cat((torch.cat((latent, nothing)), whole), dim=1)
    return whole


def folded_mask(mask_FHW: Tensor, latents_fhw: torch.Size) -> Tensor:
    """Folds each latent pixel's 8 x 8 mask pixels into channels, [64,f,h,w].

    Frames are resampled to the nearest one. mask_FHW: floats from 0 to 1, or uint8 up to 255.
    """
    (frames, height, width), (count, rows, columns) = mask_FHW.shape, latents_fhw
    mask_fHW = mask_FHW[((torch.arange(count) + 0.5) * frames / count).long()]
    if mask_fHW.dtype == torch.uint8:
        mask_fHW = (_floats(mask_fHW) + 1) / 2
    cells = mask_fHW.reshape(count, rows, height // rows, columns, width // columns)
    return cells.permute(2, 4, 0, 1, 3).flatten(0, 1)


def on_canvas(picture: Image.Image, size: Size) -> Tensor:
    """Pastes a scaled image on the center of a white canvas of (width, height): [3,1,H,W]."""
    width, height = size
    scale = min(height / picture.height, width / picture.width)
    inner = max(1, int(picture.height * scale)), max(1, int(picture.width * scale))
    canvas = torch.ones(3, height, width)
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    canvas[:, top : top + inner[0], left : left + inner[1]] = F.interpolate(
        pixels(picture)[None], size=inner, mode="bilinear", align_corners=False
    )[0]
    return canvas.unsqueeze(1)


def _frames(take: Take, count: int, size: Size) -> Tensor:
    """Reads a video's first frames, uint8 [F,H,W,3], scaled to cover (width, height)."""
    frames_FHW3 = take(range(count))
    if frames_FHW3.shape[1:3] != size[::-1]:
        pictures = (cropped(Image.fromarray(frame), size) for frame in frames_FHW3)
        frames_FHW3 = np.stack([np.asarray(picture) for picture in pictures])
    return torch.from_numpy(np.ascontiguousarray(frames_FHW3))


def _floats(pixels: Tensor) -> Tensor:
    """Converts uint8 pixels to floats in [-1, 1]."""
    return pixels.float().div_(255).sub_(0.5).div_(0.5)
