"""Image to video: i2v, first and last image (flf2v), and long videos of several clips.

Each clip of a long video continues the previous one. With SVI 2.0 Pro (arXiv 2510.09212) the clip
state is the last latent frame, which is not decoded and encoded again, and every clip is
conditioned on the image as well. Without it the clip state is the last frame. Both are small.

Legend: Z latent channels, f h w latent frames/height/width, F H W pixel ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wan.media import images
from wan.settings.errors import InputError
from wan.settings.presets import Preset
from wan.settings.rules import Values
from wan.settings.video_options import Size
from wan.tasks.base import (
    DenoiseInputs,
    Encoders,
    EncodeVideo,
    Inputs,
    Task,
    VideoParams,
    make_noise_sampler,
)

if TYPE_CHECKING:
    from torch import Tensor


class ImageToVideo(Task):
    kind = "i2v"
    diffusers_classes = ("WanImageToVideoPipeline", "WanTransformer3DModel")
    joins_clips = True

    def read_inputs(self, preset: Preset, values: Values) -> Inputs:
        return Inputs(
            image=images.read_image_setting(values, "image"),
            last_image=images.read_image_setting(values, "last_image"),
        )

    def complete_params(self, preset: Preset, chosen: dict[str, Any], values: Values) -> None:
        chosen["has_last_image"] = values.get("last_image") is not None
        if chosen.get("clip_prompts"):
            chosen["prompt"], count = chosen["clip_prompts"][0], len(chosen["clip_prompts"])
            chosen["num_clip"] = chosen.get("num_clip") or count
        if preset.boundary is not None:  # i2v-A14B
            clip_transition = chosen.get("chain") or ("frame" if chosen.get("num_clip") else None)
            chosen["chain"] = clip_transition
            chosen["num_clip"] = clip_transition and (chosen.get("num_clip") or 1)
        if chosen.get("chain") is not None:
            _check_latents_settings(values)

    def compute_video_size(self, params: VideoParams) -> Size:
        if params.image_size is None:
            return params.size
        return compute_i2v_size(params.preset, params.image_size, params.area)

    def has_clips(self, params: VideoParams) -> bool:
        return params.chain is not None

    def count_clip_frames(self, params: VideoParams, clip: int) -> int:
        return params.frame_num - (count_overlap_frames(params) if clip else 0)

    def count_encoded_latents(self, params: VideoParams) -> int:
        return 1 if params.chain == "latent" else params.latent_shape[1]

    def starts_with_known_frame(self, params: VideoParams, clip: int) -> bool:
        return True

    def make_denoise_inputs(
        self, params: VideoParams, base: DenoiseInputs, inputs: Inputs, encoders: Encoders
    ) -> DenoiseInputs:
        if inputs.image is None:
            return base
        pictures = [inputs.image]
        if inputs.last_image is not None:
            same_size = inputs.last_image.size == inputs.image.size
            pictures.append(
                inputs.last_image
                if same_size
                else images.scale_and_crop_image(inputs.last_image, inputs.image.size)
            )
        images_3HW = [images.convert_image_to_tensor(picture) for picture in pictures]
        device, features = encoders.torch_device, None
        if params.preset.num_clip_vision_images:
            features = encoders.encode_image(images_3HW).to(device)
        y = make_image_condition(params, images_3HW, encoders.encode_video).to(device)
        return replace(base, y=y, clip_fea=features)

    def make_clips(self, params: VideoParams, inputs: Inputs, encoders: Encoders) -> ChainedClips:
        return ChainedClips(params, inputs, encoders)


TASK = ImageToVideo()


class ChainedClips:
    """The clips of a long video. Implements `ClipMaker`."""

    continues_after_last = True

    def __init__(self, params: VideoParams, inputs: Inputs, encoders: Encoders) -> None:
        assert inputs.image is not None
        self._params, self._inputs, self._encoders = params, inputs, encoders
        self._image_31HW = resize_image_to_video(
            images.convert_image_to_tensor(inputs.image), params.video_size
        )
        self._anchor: Tensor | None = None
        self._contexts: tuple[Tensor, Tensor] | None = None
        self.state_needs_frames = params.chain == "frame"

    def prepare_clip(self, index: int, state: Tensor | None) -> tuple[VideoParams, DenoiseInputs]:
        params, inputs, encoders = (
            self._params.make_clip_params(index),
            self._inputs,
            self._encoders,
        )
        if self._contexts is None or params.clip_prompts:
            self._contexts = encoders.encode_prompt(
                params, inputs.prompt_embeds, inputs.negative_prompt_embeds
            )
        with encoders.stage_timer("conditioning"):
            if params.chain == "frame":
                image = self._image_31HW[:, 0] if state is None else state
                y = make_image_condition(params, [image], encoders.encode_video)
            else:
                if self._anchor is None:
                    self._anchor = encoders.encode_video(self._image_31HW)
                y = make_chained_condition(params, self._anchor, state)
        sample_noise = make_noise_sampler(params, encoders.torch_device)
        return params, DenoiseInputs(
            sample_noise(),
            *self._contexts,
            y=y.to(encoders.torch_device),
            sample_noise=sample_noise,
        )

    def select_latents(self, index: int, latents_Zfhw: Tensor) -> Tensor:
        return latents_Zfhw

    def trim_frames(self, index: int, frames_3FHW: Tensor) -> Tensor:
        continues = index > 0 or self._inputs.clip_state is not None
        return frames_3FHW[:, count_overlap_frames(self._params) if continues else 0 :]

    def make_state(self, latents_Zfhw: Tensor, frames_3FHW: Tensor | None) -> Tensor:
        """Returns the last latent frame [Z,1,h,w], or the last frame [3,H,W]."""
        if not self.state_needs_frames:
            return latents_Zfhw[:, -1:].clone()

        def get_last_frame() -> Tensor:
            assert frames_3FHW is not None, "the main rank has them"
            return frames_3FHW[:, -1].contiguous()

        return self._encoders.run_on_rank0(get_last_frame).cpu()


def count_overlap_frames(params: VideoParams) -> int:
    """Returns the frames at the start of a later clip that repeat the previous clip (`chain`).

    For "latent" these are the image and the four frames of the last latent.
    """
    return {None: 0, "frame": 1, "latent": 5}[params.chain]


def _check_latents_settings(values: Values) -> None:
    """Refuses settings about latents that have no effect on a video of several clips."""
    for name in ("decode_latents", "fixed_latents"):
        if values.get(name):
            why = "applies to one clip, and this video has several or continues an earlier one"
            raise InputError(f"`{name}`", None, why, "drop it")
    if values.get("save_latents") == "steps":
        why, remedy = "applies to one clip", "give `save_latents` alone, which keeps the clips"
        raise InputError("`save_latents=steps`", None, why, remedy)


def compute_i2v_size(preset: Preset, image: Size, area: int) -> Size:
    """Computes the size of an i2v video: the image's aspect ratio at about `area` pixels.

    As in the official code, sides are floored to whole latents, then to whole tokens.
    """
    ratio = image[1] / image[0]
    stride, patch = preset.vae_stride[1], preset.patch_size[1]
    sides = (math.sqrt(area / ratio), math.sqrt(area * ratio))
    width, height = (int(side // stride // patch * patch) * stride for side in sides)
    return images.check_nonzero_size(image, (width, height))


def make_image_condition(
    params: VideoParams, images_3HW: Sequence[Tensor], encode: EncodeVideo
) -> Tensor:
    """Returns i2v's condition [20,f,h,w]: 4 mask channels and 16 channels of encoded video.

    As in the official code, all frames except the images are zero (mid-gray), and each mask channel
    is one of the four frames of a latent frame; the first frame fills all four channels.
    """
    import torch

    videos_31HW = [resize_image_to_video(image, params.video_size) for image in images_3HW]
    width, height = params.video_size
    gray_frames = torch.zeros(3, params.frame_num - len(videos_31HW), height, width)
    latents = encode(torch.cat((videos_31HW[0], gray_frames, *videos_31HW[1:]), dim=1))
    mask = torch.zeros(4, *latents.shape[1:], device=latents.device)
    mask[:, 0] = 1
    if len(videos_31HW) == 2:
        mask[3, -1] = 1
    return torch.cat((mask, latents))


def resize_image_to_video(image_3HW: Tensor, size: Size) -> Tensor:
    """Returns an image as a video of one frame, [3,1,H,W], of size (width, height).

    As in the official code, it is not cropped, and is interpolated on the CPU, bicubically without
    antialiasing.
    """
    from torch.nn.functional import interpolate

    return interpolate(image_3HW[None], size=size[::-1], mode="bicubic").transpose(0, 1)


def make_chained_condition(
    params: VideoParams, anchor_Z1hw: Tensor, motion_Z1hw: Tensor | None
) -> Tensor:
    """Returns the condition [20,f,h,w] of an SVI 2.0 Pro clip: a mask and latents.

    The latents are those of the image, the last one of the previous clip, and zeros. Unlike in
    `make_image_condition`, these are zero latents and not encoded gray frames, and the mask covers
    only the image.
    """
    import torch

    _, frames, height, width = params.latent_shape
    known_latents = [anchor_Z1hw]
    if motion_Z1hw is not None:
        known_latents.append(motion_Z1hw.to(anchor_Z1hw.device))
    padding = anchor_Z1hw.new_zeros(len(anchor_Z1hw), frames - len(known_latents), height, width)
    mask = anchor_Z1hw.new_zeros(4, frames, height, width)
    mask[:, 0] = 1
    return torch.cat((mask, torch.cat((*known_latents, padding), dim=1)))
