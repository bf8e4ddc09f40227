"""Character animation without preprocessing (Animate-2): a character follows a driving video.

The driving video is a second stream of tokens, the reference stream. Its keys and values are
computed once per clip, and each latent frame of the generated video attends to those of its own
frame. Each clip starts with the last frames of the previous clip. Sizes, frames and conditions are
those of diffusers' `WanAnimate2ModularPipeline`.

Legend: Z latent channels, f h w latent frames/height/width, F H W pixel ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from wan.media import images
from wan.media.audio import has_audio
from wan.media.video_reader import VideoFile, read_frames_at, read_video
from wan.settings.errors import InputError
from wan.settings.noise_schedule import count_noise_samples
from wan.settings.presets import SKIPPED_BLOCK, Preset
from wan.settings.rules import Values
from wan.settings.video_options import Size
from wan.tasks.animate import (
    Animate,
    AnimateClips,
    count_overlapping_clips,
    make_known_frames,
    normalize_video_frames,
)
from wan.tasks.base import (
    DenoiseInputs,
    Encoders,
    Inputs,
    VideoParams,
    check_clip_settings,
    make_noise_sampler,
)
from wan.utils.log import logger

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

REFERENCE_PROMPT = "人物动作的参考视频"
"""The text of the reference stream."""
_MASK_CHANNELS = 4
_MAX_USED_SHARE = 0.8  # of the frames of the clips, up to which fewer are suggested
_MIN_VISIBLE_SHARE = 0.6  # of the frame that a driving video fills without a warning
_NUM_FEATURES = 2 * 257 * 1280  # of CLIP for the character and the driving video


@dataclass(frozen=True, kw_only=True)
class Animate2Inputs(Inputs):
    """The character, `image`, and the video whose motion it follows.

    Attributes:
        driving_video: None for a plan without one.
        has_sound: Whether the driving video has an audio track.
    """

    driving_video: VideoFile | None = None
    has_sound: bool = False
    pads_soundtrack: ClassVar[bool] = True

    @property
    def soundtrack(self) -> tuple[Path, float] | None:
        video = self.driving_video
        return None if video is None or not self.has_sound else (video.path, 0.0)


class Animate2(Animate):
    kind = "animate2"
    network = "wan.modules.animate2:WanAnimate2Model"
    runs_in_lockstep = False
    diffusers_classes = ("WanAnimate2ModularPipeline", "WanAnimate2Transformer3DModel")
    upload_names: ClassVar = {}
    needed_uploads = scene_uploads = ()
    uploads_without_prompt: ClassVar = frozenset({"image", "src_video"})
    fixed_prompts = (REFERENCE_PROMPT,)

    def read_inputs(self, preset: Preset, values: Values) -> Animate2Inputs:
        path, image = values.get("src_video"), images.read_image_setting(values, "image")
        if path is None:
            return Animate2Inputs(image=image)
        video = read_video(path, "`src_video`", values.get("fps", preset.fps))
        return Animate2Inputs(
            image=image, driving_video=video, has_sound=has_audio(path), files=(path,)
        )

    def complete_settings(
        self, preset: Preset, values: Values, inputs: Inputs, defaults: Values
    ) -> dict[str, Any]:
        """Counts the clips, and refuses a driving video that is too short for one."""
        check_clip_settings(preset, values)
        settings = {"frame_num": preset.frame_num, "refert_num": 1, "fps": preset.fps}
        settings |= {**defaults} | {**values}
        num_overlap_frames, max_clips = settings["refert_num"], values.get("num_clip")
        if not isinstance(inputs, Animate2Inputs) or inputs.driving_video is None:
            return {"num_clip": max_clips or 2}  # a plan without a driving video
        video, fps = inputs.driving_video, settings["fps"]
        if inputs.image is not None:
            _warn_of_borders(video.size, inputs.image.size)
        num_frames = len(compute_frame_indices(video.num_frames, video.fps, fps))
        if num_frames <= num_overlap_frames:
            why = f"has {num_frames} frame(s) at {fps:g} frames per second"
            why += f", and more than `refert_num` {num_overlap_frames} are needed"
            raise InputError("`src_video`", values["src_video"], why, "give a longer video")
        if num_overlap_frames >= settings["frame_num"]:
            return {"num_clip": 1}  # refused by VideoParams
        num_clips = count_overlapping_clips(num_frames, settings["frame_num"], num_overlap_frames)
        return {
            "num_clip": min(max_clips or num_clips, num_clips),
            "num_source_frames": num_frames,
        }

    def list_notices(self, params: VideoParams) -> tuple[str, ...]:
        """Suggests clips that end with the driving video, if many frames would be left over."""
        num_frames, num_clips = params.num_source_frames, params.num_clip or 1
        overlap = params.refert_num or 0
        if num_frames is None or num_frames > overlap + num_clips * (params.frame_num - overlap):
            return ()
        shortest = -(-(num_frames - overlap) // num_clips) + overlap
        frame_num = -(-(shortest - 1) // 4) * 4 + 1
        if frame_num > _MAX_USED_SHARE * params.frame_num:
            return ()
        return (
            f"The driving video has {num_frames} frames, and {num_clips} clip(s) of "
            f"{params.frame_num} are generated and cut: `frame_num={frame_num}` is enough.",
        )

    def choose_fps(self, params: VideoParams, inputs: Inputs, defaults: Values) -> float:
        return params.fps

    def complete_params(self, preset: Preset, chosen: dict[str, Any], values: Values) -> None:
        chosen["refert_num"] = chosen.get("refert_num") or 1
        chosen["log_scale"] = chosen.get("log_scale") or 0.0
        chosen.setdefault("sample_solver", "dpm++")

    def compute_video_size(self, params: VideoParams) -> Size:
        """The part of the frames that shows the image, in even sides for the mp4."""
        width, height = fit_into(_round_image_size(params), self.compute_frame_size(params))
        return images.check_nonzero_size(
            params.image_size or (width, height), (width // 2 * 2, height // 2 * 2)
        )

    def compute_frame_size(self, params: VideoParams) -> Size:
        if params.image_size is None:
            return params.size
        width, height = _round_image_size(params)
        ratio, multiple = height / width, params.preset.size_multiple
        sides = math.sqrt(params.area / ratio), math.sqrt(params.area * ratio)
        columns, rows = (int(side) // multiple * multiple for side in sides)
        return images.check_nonzero_size(params.image_size, (columns, rows))

    def estimate_host_bytes(self, params: VideoParams) -> dict[str, int]:
        width, height = params.frame_size
        return {"frames of the clip before": 3 * (params.refert_num or 0) * height * width * 4}

    def estimate_denoise_bytes(self, params: VideoParams) -> dict[str, int]:
        _, frames, height, width = params.latent_shape
        latents = params.preset.in_dim * (frames - 1) * height * width
        return {"reference stream": 4 * (latents + _NUM_FEATURES)}

    def make_clips(self, params: VideoParams, inputs: Inputs, encoders: Encoders) -> Animate2Clips:
        assert isinstance(inputs, Animate2Inputs)
        return Animate2Clips(params, inputs, encoders)

    def make_model_kwargs(
        self, params: VideoParams, config: Mapping[str, Any], make: Callable[..., Tensor]
    ) -> dict[str, Any]:
        from wan.modules.clip import NUM_TOKENS

        _, frames, height, width = params.latent_shape
        compute_reference_kv = partial(
            _compute_reference_kv,
            make(config["in_dim"], frames - 1, height, width),
            make(config["text_len"], config["text_dim"]),
            make(1, NUM_TOKENS, config["image_dim"]),
            (frames, height, width),
        )
        return {"reference_kv": compute_reference_kv, "log_scale": params.log_scale}


TASK = Animate2()


class Animate2Clips(AnimateClips):
    """The clips of an Animate-2 video. Implements `ClipMaker`.

    The noise of all clips comes from one generator.
    """

    def __init__(self, params: VideoParams, inputs: Animate2Inputs, encoders: Encoders) -> None:
        import torch

        assert inputs.image is not None and inputs.driving_video is not None
        self._params, self._encoders = params, encoders
        self._video = resample_driving_video(inputs.driving_video, params.fps)
        self._contexts = encoders.encode_prompt(
            params, inputs.prompt_embeds, inputs.negative_prompt_embeds
        )
        unguided = replace(params, prompt=REFERENCE_PROMPT, sample_guide_scale=(1.0, 1.0))
        self._reference_context, _ = encoders.encode_prompt(unguided)
        self._sample_noise = make_noise_sampler(
            params, encoders.torch_device, inputs.num_clips_done * count_noise_samples(params)
        )
        with encoders.stage_timer("conditioning"):
            image_31HW = letterbox_frames([inputs.image], params.frame_size, "BICUBIC")
            first_31HW = self._read_driving_frames([0])
            features = encoders.encode_image([image_31HW[:, 0], first_31HW[:, 0]])
            self._features, self._video_features = features.to(encoders.torch_device).split(1)
            latents = encoders.encode_video(image_31HW)
        self._reference = torch.cat((torch.ones_like(latents[:_MASK_CHANNELS]), latents))
        self._last_frames: Tensor | None = None

    def prepare_clip(self, index: int, state: Tensor | None) -> tuple[VideoParams, DenoiseInputs]:
        import torch

        params, encoders = self._params, self._encoders
        start = index * (params.frame_num - (params.refert_num or 0))
        indices = make_zigzag_indices(start, params.frame_num, self._video.num_frames)
        with encoders.stage_timer("conditioning"):
            video = encoders.encode_video(self._read_driving_frames(indices))
            known_frames, mask = make_known_frames(params, indices, state, {})
            y = torch.cat((mask.to(video.device), encoders.encode_video(known_frames)))
            del known_frames
            encoders.release_vae()
        compute_reference_kv = partial(
            _compute_reference_kv,
            torch.cat((video, torch.ones_like(video[:_MASK_CHANNELS]), video)),
            self._reference_context,
            self._video_features,
            params.latent_shape[1:],
        )
        kwargs = {"reference_kv": compute_reference_kv, "log_scale": params.log_scale}
        return params, DenoiseInputs(
            *(self._sample_noise(), *self._contexts),
            y=torch.cat((self._reference, y), dim=1),
            clip_fea=self._features,
            sample_noise=self._sample_noise,
            model_kwargs={"cond": kwargs, "uncond": kwargs | {"skip_blocks": (SKIPPED_BLOCK,)}},
        )

    def trim_frames(self, index: int, frames_3FHW: Tensor) -> Tensor:
        """Returns the clip's own frames without the borders."""
        params = self._params
        width, height = params.video_size
        x, y = compute_content_offset(params)
        frames = super().trim_frames(index, frames_3FHW)
        return frames[..., y : y + height, x : x + width]

    def _read_driving_frames(self, indices: Sequence[int]) -> Tensor:
        """Reads frames of the resampled driving video, [3,F,H,W], and letterboxes them."""
        from PIL import Image

        frames = map(Image.fromarray, read_frames_at(self._video, indices))
        return letterbox_frames(frames, self._params.frame_size, "BILINEAR")


def _warn_of_borders(video: Size, image: Size) -> None:
    """Logs a warning if a driving video fills little of the frame, which has the image's aspect."""
    ratios = video[0] / video[1], image[0] / image[1]
    share = min(ratios) / max(ratios)
    if share < _MIN_VISIBLE_SHARE:
        logger.warning(
            "The driving video (%dx%d) fills only %.0f %% of frames of the image's aspect ratio "
            "(%dx%d); crop it to the person.",
            *(*video, 100 * share, *image),
        )


def _compute_reference_kv(
    reference: Tensor, context: Tensor, features: Tensor, size: tuple[int, int, int], network: Any
) -> Any:
    """Computes the keys and values of the reference stream of a clip with its network."""
    return network.compute_reference_kv(reference, context, features, size)


def compute_frame_indices(num_frames: int, video_fps: float, fps: float) -> list[int]:
    """Returns the frame of a video that is nearest to each time at another rate, as in diffusers.

    Args:
        num_frames: Frames of the video, at `video_fps` per second.
        fps: The other rate.
    """
    if video_fps == fps:  # rounding could drop the last frame
        return [*range(num_frames)]
    times = (index / fps for index in range(int(num_frames / video_fps * fps)))
    return [min(round(time * video_fps), num_frames - 1) for time in times]


def resample_driving_video(video: VideoFile, fps: float) -> VideoFile:
    """Resamples a driving video to the rate of the generated video."""
    indices = compute_frame_indices(video.num_frames, video.fps, fps)
    return replace(video, fps=fps, indices=[video.indices[index] for index in indices])


def make_zigzag_indices(start: int, num_indices: int, num_frames: int) -> list[int]:
    """Returns frame indices that run back and forth after the end of the video.

    The frame at which they turn is repeated, as in diffusers.
    """
    phases = (index % (2 * num_frames) for index in range(start, start + num_indices))
    return [min(index, 2 * num_frames - 1 - index) for index in phases]


def fit_into(source: Size, frame: Size) -> Size:
    """Returns the largest (width, height) of the aspect ratio of `source` within a frame."""
    if frame[0] / frame[1] < source[0] / source[1]:
        return frame[0], max(1, source[1] * frame[0] // source[0])
    return max(1, source[0] * frame[1] // source[1]), frame[1]


def letterbox_frames(frames: Iterable[Image.Image], size: Size, resampling: str) -> Tensor:
    """Scales images into (width, height) with black borders; returns [3,F,H,W] in [-1, 1].

    Args:
        resampling: Name of one of Pillow's filters.
    """
    import numpy as np
    from PIL import Image

    canvases = []
    for frame in frames:
        resized = frame.resize(fit_into(frame.size, size), Image.Resampling[resampling])
        canvases.append(Image.new("RGB", size))
        canvases[-1].paste(resized, _center(resized.size, size))
    return normalize_video_frames(np.stack([np.asarray(canvas) for canvas in canvases]))


def compute_content_offset(params: VideoParams) -> tuple[int, int]:
    """Returns the offset (x, y) of the part of the frames that shows the image."""
    return _center(fit_into(_round_image_size(params), params.frame_size), params.frame_size)


def _center(size: Size, frame: Size) -> tuple[int, int]:
    """Returns the offset (x, y) of a centered picture in a frame."""
    return (frame[0] - size[0]) // 2, (frame[1] - size[1]) // 2


def _round_image_size(params: VideoParams) -> Size:
    """Returns the size of the image in whole tokens, whose aspect ratio the video has."""
    image, multiple = params.image_size or params.size, params.preset.size_multiple
    width, height = (side // multiple * multiple for side in image)
    if not (width and height):
        why = f"is {image[0]}x{image[1]} pixels, and each side needs at least {multiple}"
        raise InputError("`image`", None, why, "give a larger image")
    return width, height
