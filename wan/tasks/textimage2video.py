"""Text, and a first image or a source video, to video (ti2v).

Legend: Z latent channels, h w latent height/width, H W pixel ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wan.media import images
from wan.settings.presets import Preset
from wan.settings.rules import Values
from wan.settings.video_options import Size
from wan.tasks.base import DenoiseInputs, Encoders, Inputs, VideoParams
from wan.tasks.video2video import VideoToVideo, compute_ti2v_size

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor


class TextImageToVideo(VideoToVideo):
    kind = "ti2v"

    def read_inputs(self, preset: Preset, values: Values) -> Inputs:
        inputs = super().read_inputs(preset, values)
        return replace(inputs, image=images.read_image_setting(values, "image"))

    def compute_video_size(self, params: VideoParams) -> Size:
        if params.image_size is None:
            return params.size
        return compute_ti2v_size(params.preset, params.image_size, params.area)

    def count_encoded_latents(self, params: VideoParams) -> int:
        return super().count_encoded_latents(params) or int(params.image_size is not None)

    def starts_with_known_frame(self, params: VideoParams, clip: int) -> bool:
        return params.image_size is not None

    def make_denoise_inputs(
        self, params: VideoParams, base: DenoiseInputs, inputs: Inputs, encoders: Encoders
    ) -> DenoiseInputs:
        base = super().make_denoise_inputs(params, base, inputs, encoders)
        if inputs.image is None:
            return base
        first_frame = make_first_frame(inputs.image, params.video_size)
        return _fix_first_frame(
            params, base, encoders.encode_video(first_frame).to(encoders.torch_device)
        )

    def make_model_kwargs(
        self, params: VideoParams, config: Mapping[str, Any], make: Callable[..., Tensor]
    ) -> dict[str, Any]:
        if params.image_size is None:
            return {}
        import torch

        # The image's tokens have timestep 0.
        _, rows, columns = params.grid
        is_later = torch.arange(math.prod(params.grid)) >= rows * columns
        return {"t": 500.0 * is_later.unsqueeze(0)}


TASK = TextImageToVideo()


def make_first_frame(image: Image.Image, size: Size) -> Tensor:
    """Returns ti2v's first frame [3,1,H,W]: the image scaled and center-cropped."""
    return images.convert_image_to_tensor(images.scale_and_crop_image(image, size)).unsqueeze(1)


def _fix_first_frame(
    params: VideoParams, inputs: DenoiseInputs, first_Z1hw: Tensor
) -> DenoiseInputs:
    """Fixes ti2v's first latent frame: its tokens have timestep 0 and never change."""
    import torch

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
        num_fixed_frames=1,
    )
