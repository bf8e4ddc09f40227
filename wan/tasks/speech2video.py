"""Speech to video (S2V): a video of several clips from an image and audio.

The last 73 frames of a clip are encoded and appended as extra tokens to the next clip. This number,
the three frames that are dropped from the first clip and the seed of each clip are those of the
official code.

Legend: Z latent channels, f h w latent frames/height/width, F H W pixel ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from wan.media import images
from wan.media.audio import Audio, read_audio
from wan.media.video_reader import VideoFile, read_video
from wan.settings.errors import InputError
from wan.settings.presets import Preset
from wan.settings.rules import Values
from wan.settings.sound import (
    AUDIO_LAYERS,
    FEATURES_PER_FRAME,
    MOTION_FRAMES,
    MOTION_LATENTS,
    NUM_DROPPED_FRAMES,
    SPEECH_FPS,
)
from wan.settings.video_options import Size
from wan.tasks.base import (
    DenoiseInputs,
    Encoders,
    Inputs,
    Task,
    VideoParams,
    check_clip_settings,
    make_noise_sampler,
)
from wan.utils.log import logger

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor

_NUM_IMAGE_FRAMES = 6  # motion frames filled with the image, with start_from_ref


class PoseVideo(VideoFile):
    """The pose video of S2V."""

    @property
    def step(self) -> int:
        """Every `step`th frame is used, so that there are about 16 frames per second."""
        return max(1, round(self.fps / SPEECH_FPS))

    def iter_poses(self) -> Iterator[np.ndarray]:
        """Decodes and yields the used frames, uint8 [H,W,3]."""
        return self.iter_frames(self.step)


def read_pose_video(path: Path) -> PoseVideo:
    """Reads the time stamps of a pose video; its frames are decoded later.

    Raises:
        InputError: The file is no video.
    """
    pose = PoseVideo(**vars(read_video(path, "`pose_video`", SPEECH_FPS)))
    if abs(pose.fps / pose.step - SPEECH_FPS) > 0.01 * SPEECH_FPS:
        selection = "all are" if pose.step == 1 else f"one in {pose.step} is"
        logger.warning(
            "%s has %g frames a second, and %s taken: the poses move at %.3g times their speed.",
            *(path, pose.fps, selection, SPEECH_FPS * pose.step / pose.fps),
        )
    return pose


@dataclass(frozen=True, kw_only=True)
class SpeechInputs(Inputs):
    """Image, audio and poses."""

    audio: Audio | None = None
    pose: PoseVideo | None = None
    audio_sync: bool = False

    @property
    def soundtrack(self) -> tuple[Path, float] | None:
        start = NUM_DROPPED_FRAMES / SPEECH_FPS if self.audio_sync else 0.0
        return None if self.audio is None else (self.audio.path, start)

    @property
    def components(self) -> tuple[str, ...]:
        return ("audio_encoder",)


class SpeechToVideo(Task):
    kind = "s2v"
    network = "wan.modules.s2v:WanModel_S2V"
    diffusers_classes = None
    uploads_without_prompt: ClassVar = frozenset({"image", "audio"})
    has_fixed_fps = True

    def read_inputs(self, preset: Preset, values: Values) -> SpeechInputs:
        pose = values.get("pose_video")
        return SpeechInputs(
            image=images.read_image_setting(values, "image"),
            audio=read_audio(values["audio"]) if "audio" in values else None,
            audio_sync=bool(values.get("audio_sync")),
            pose=None if pose is None else read_pose_video(pose),
            files=tuple(values[name] for name in ("audio", "pose_video") if name in values),
        )

    def complete_settings(
        self, preset: Preset, values: Values, inputs: Inputs, defaults: Values
    ) -> dict[str, Any]:
        """Counts the clips, and refuses settings without effect on them."""
        if values.get("frame_num"):
            why = f"has no effect on {preset.task}, whose clips have `infer_frames`"
            raise InputError("`frame_num`", None, why, "drop it")
        check_clip_settings(preset, values)
        fps = {"fps": preset.fps, **defaults, **values}["fps"]
        if fps != preset.fps:
            why = f"would break the sync with the audio: {preset.task} has {preset.fps:g} fps"
            remedy = "drop it" if "fps" in values else "remove it from generation_config.json"
            raise InputError("`fps`", f"{fps:g}", why, remedy)
        if values.get("audio_sync") and values.get("start_from_ref"):
            why = "has no effect with `start_from_ref`, where frames and audio start together"
            raise InputError("`audio_sync`", None, why, "drop one of them")
        assert isinstance(inputs, SpeechInputs)
        max_clips = values.get("num_clip")
        if inputs.audio is None:
            return {"num_clip": max_clips or 2}  # a plan without audio
        settings = {"infer_frames": preset.infer_frames} | {**defaults} | {**values}
        num_clips = count_clips(inputs.audio, settings["infer_frames"])
        return {"num_clip": min(max_clips or num_clips, num_clips)}

    def complete_params(self, preset: Preset, chosen: dict[str, Any], values: Values) -> None:
        # The latent frames of a clip are a quarter of its frames.
        chosen["frame_num"] = chosen["infer_frames"] - NUM_DROPPED_FRAMES
        chosen["start_from_ref"] = bool(chosen.get("start_from_ref"))

    def compute_video_size(self, params: VideoParams) -> Size:
        return compute_s2v_size(params.image_size or params.size, params.area)

    def has_clips(self, params: VideoParams) -> bool:
        return True

    def count_clip_frames(self, params: VideoParams, clip: int) -> int:
        assert params.infer_frames is not None
        dropped = 0 if clip or params.start_from_ref else NUM_DROPPED_FRAMES
        return params.infer_frames - dropped

    def count_extra_tokens(self, params: VideoParams, clip: int) -> int:
        """Counts the tokens of the image and of the previous clip at three scales."""
        _, _, height, width = params.latent_shape
        _, rows, columns = params.grid
        if not clip and not params.start_from_ref:
            return rows * columns
        motion = (height // 4) * (width // 4) + 4 * (height // 8) * (width // 8)
        return 2 * rows * columns + motion

    def count_encoded_latents(self, params: VideoParams) -> int:
        return 1 if params.num_clip == 1 and not params.start_from_ref else MOTION_LATENTS

    def count_decoded_latents(self, params: VideoParams) -> int:
        """A clip is decoded together with the encoded end of the previous clip."""
        return self.count_encoded_latents(params) + params.latent_shape[1]

    def starts_with_known_frame(self, params: VideoParams, clip: int) -> bool:
        return True

    def estimate_host_bytes(self, params: VideoParams) -> dict[str, int]:
        width, height = params.video_size
        return {"frames of the clip before": 3 * MOTION_FRAMES * height * width * 4}

    def make_clips(self, params: VideoParams, inputs: Inputs, encoders: Encoders) -> SpeechClips:
        assert isinstance(inputs, SpeechInputs)
        return SpeechClips(params, inputs, encoders)

    def make_model_kwargs(
        self, params: VideoParams, config: Mapping[str, Any], make: Callable[..., Tensor]
    ) -> dict[str, Any]:
        channels, *size = params.latent_shape
        return {
            "ref_latents": [make(channels, 1, *size[1:])],
            "motion_latents": [make(channels, MOTION_LATENTS, *size[1:])],
            "cond_states": [make(channels, *size)],
            "drop_motion_frames": self.count_encoded_latents(params) == 1,
            "audio_input": make(1, AUDIO_LAYERS, config["audio_dim"], 4 * size[0]),
        }

    def make_encoder_input(
        self, params: VideoParams, video: Tensor, make: Callable[..., Tensor]
    ) -> None:
        return None


TASK = SpeechToVideo()


class SpeechClips:
    """The clips of an S2V video; clip k has the seed `base_seed` + k. Implements `ClipMaker`."""

    state_needs_frames, continues_after_last = True, False

    def __init__(self, params: VideoParams, inputs: SpeechInputs, encoders: Encoders) -> None:
        import torch

        assert inputs.image is not None and inputs.audio is not None
        assert params.infer_frames is not None and params.num_clip is not None
        self._params, self._encoders = params, encoders
        self._contexts = encoders.encode_prompt(
            params, inputs.prompt_embeds, inputs.negative_prompt_embeds
        )
        num_frames = params.num_clip * params.infer_frames
        self._features = encoders.sample_audio_features(inputs.audio, num_frames)
        self._silence = torch.zeros_like(self._features[..., : params.infer_frames])
        with encoders.stage_timer("conditioning"):
            image_31HW = images.convert_image_to_tensor(
                fit_image_to_size(inputs.image, params.video_size)
            ).unsqueeze(1)
            self._reference_latents = encoders.encode_video(image_31HW)
        self._motion_frames = torch.zeros(3, MOTION_FRAMES, *image_31HW.shape[2:])
        if params.start_from_ref:
            self._motion_frames[:, -_NUM_IMAGE_FRAMES:] = image_31HW
        self._motion_latents = self._reference_latents.new_zeros(
            len(self._reference_latents), MOTION_LATENTS, *self._reference_latents.shape[2:]
        )
        self._poses = None if inputs.pose is None else _read_pose_clips(inputs.pose, params)
        for _ in range(inputs.num_clips_done if self._poses else 0):
            next(self._poses)  # type: ignore[arg-type]

    def prepare_clip(self, index: int, state: Tensor | None) -> tuple[VideoParams, DenoiseInputs]:
        params, encoders = self._params, self._encoders
        assert params.infer_frames is not None
        with encoders.stage_timer("conditioning"):
            if state is not None:
                self._motion_frames = state
            if index or params.start_from_ref:  # the first clip does not use them otherwise
                self._motion_latents = encoders.encode_video(self._motion_frames)
                self._motion_frames = self._motion_frames.cpu()  # free accelerator memory
            pose = None if self._poses is None else [self._encode_pose(next(self._poses))]
        shared_kwargs: dict[str, Any] = {
            "ref_latents": [self._reference_latents],
            "motion_latents": [self._motion_latents],
            "cond_states": pose,
            "drop_motion_frames": self._drops_motion_frames(index),
        }
        start = index * params.infer_frames
        features = self._features[..., start : start + params.infer_frames].contiguous()
        model_kwargs = {
            "cond": shared_kwargs | {"audio_input": features},
            "uncond": shared_kwargs | {"audio_input": self._silence},
        }
        clip_params = replace(params, base_seed=params.base_seed + index)
        sample_noise = make_noise_sampler(clip_params, encoders.torch_device)
        return clip_params, DenoiseInputs(
            sample_noise(), *self._contexts, sample_noise=sample_noise, model_kwargs=model_kwargs
        )

    def select_latents(self, index: int, latents_Zfhw: Tensor) -> Tensor:
        """Puts the latents of the previous clip, or of the image, before those of the clip."""
        import torch

        is_first = self._drops_motion_frames(index)
        previous = self._reference_latents if is_first else self._motion_latents
        return torch.cat((previous, latents_Zfhw), dim=1)

    def trim_frames(self, index: int, frames_3FHW: Tensor) -> Tensor:
        return frames_3FHW[:, -self._params.count_clip_frames(index) :]

    def make_state(self, latents_Zfhw: Tensor, frames_3FHW: Tensor | None) -> Tensor:
        """Returns the last `MOTION_FRAMES` frames of the video so far."""

        def get_last_frames() -> Tensor:
            import torch

            assert frames_3FHW is not None, "the main rank has them"
            new = frames_3FHW[:, -MOTION_FRAMES:]
            return torch.cat((self._motion_frames[:, new.shape[1] :].to(new.device), new), dim=1)

        return self._encoders.run_on_rank0(get_last_frames)

    def _drops_motion_frames(self, index: int) -> bool:
        return index == 0 and not self._params.start_from_ref

    def _encode_pose(self, frames_3FHW: Tensor) -> Tensor:
        """Encodes the poses of a clip; the first frame is duplicated and its latent dropped."""
        import torch

        padded = torch.cat((frames_3FHW[:, :1], frames_3FHW), dim=1)
        return self._encoders.encode_video(padded)[:, 1:]


def count_clips(audio: Audio, infer_frames: int) -> int:
    """Counts the clips of `infer_frames` frames that cover the audio, by the official rule."""
    return int(audio.num_features / (infer_frames * FEATURES_PER_FRAME)) + 1


def compute_s2v_size(image: Size, area: int) -> Size:
    """Computes the size of an s2v video: the image scaled down to `area`, in multiples of 64.

    As in the official code, 100 scales are tried, from 1 (or the largest that could fit) down; the
    first whose sides, rounded up, fit into `area` is taken. If none fits, the sides of a frame with
    this area are rounded down.
    """
    width, height = image
    pixels, border, more = width * height, 63 * (width + height), 63 * 63 - area
    first_scale, last_scale = 1.0, 0.1
    if pixels > area:
        first_scale = math.sqrt(area / pixels)
        root = border * border - 2 * pixels * more
        last_scale = (-border + math.sqrt(root)) / (2 * pixels) if root > 0 else first_scale
    for step in range(100):
        scale = first_scale + (last_scale - first_scale) * step / 99
        candidate = tuple(-(-int(side * scale) // 64) * 64 for side in image)
        if candidate[0] * candidate[1] <= area:
            return images.check_nonzero_size(image, (candidate[0], candidate[1]))
    ratio = height / width
    rows, columns = math.sqrt(area * ratio), math.sqrt(area / ratio)
    across, down = (
        int(min(side, image_side) // 64 * 64)
        for side, image_side in ((columns, width), (rows, height))
    )
    return images.check_nonzero_size(image, (across, down))


def fit_image_to_size(image: Image.Image, size: Size) -> Image.Image:
    """Resizes an image so that its shorter side is min(size), and crops it to `size`.

    As in the official code, it is cropped to its center. A side that is too short is padded with
    black first.
    """
    from PIL import Image

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
    import torch

    frames, count = pose.iter_poses(), params.infer_frames
    width, height = params.video_size
    while True:
        pose_frames = [_fit_pose_to_size(frame, (width, height)) for frame in islice(frames, count)]
        black = [torch.full((3, height, width), -1.0)] * ((count or 0) - len(pose_frames))
        yield torch.stack((*pose_frames, *black), dim=1)


def _fit_pose_to_size(frame: np.ndarray, size: Size) -> Tensor:
    """Returns [3,H,W] in [-1, 1], scaled as by `fit_image_to_size`, but padded with gray."""
    import torch
    from torch.nn.functional import interpolate, pad

    pixels_3HW = torch.from_numpy(frame.copy()).permute(2, 0, 1).float() / 255 * 2 - 1
    columns, rows = _scale_short_side((frame.shape[1], frame.shape[0]), min(size))
    if (rows, columns) != frame.shape[:2]:
        pixels_3HW = interpolate(
            pixels_3HW[None], size=(rows, columns), mode="bilinear", antialias=True
        )[0]
    missing = [max(0, side - source) for side, source in zip(size, (columns, rows), strict=True)]
    paddings = [padding for gap in missing for padding in (gap // 2, (gap + 1) // 2)]
    padded_frame = pad(pixels_3HW, paddings)
    y_offset = _get_crop_offset(padded_frame.shape[1], size[1])
    x_offset = _get_crop_offset(padded_frame.shape[2], size[0])
    return padded_frame[:, y_offset : y_offset + size[1], x_offset : x_offset + size[0]]
