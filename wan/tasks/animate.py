"""Character animation (Animate): a character follows the poses and faces of a video.

Each clip starts with the last frames of the previous clip.

Legend: Z latent channels, f h w latent frames/height/width, F H W pixel ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from wan.media import images
from wan.media.video_reader import FrameReader, VideoFile, read_frames_at, read_video
from wan.settings.errors import FileChangedError, InputError
from wan.settings.noise_schedule import count_noise_samples
from wan.settings.presets import FACE_SIZE, Preset
from wan.settings.rules import Values
from wan.settings.values import join_with_and
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

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor

_REFERENCE_IMAGE = "src_ref.png"
_MOTION_VIDEOS = {"pose": "src_pose.mp4", "face": "src_face.mp4"}
_SCENE_VIDEOS = {"background": "src_bg.mp4", "mask": "src_mask.mp4"}
ANIMATE_FILES = (_REFERENCE_IMAGE, *_MOTION_VIDEOS.values(), *_SCENE_VIDEOS.values())
"""The files of a preprocessed folder."""
_REMEDY = "run the preprocessing of Wan2.2 Animate again"


@dataclass(frozen=True, kw_only=True)
class AnimateInputs(Inputs):
    """The preprocessed inputs of an Animate video.

    Attributes:
        reference_image: The character.
        pose_size: (width, height) of the pose video and of the generated video.
        num_frames: The number of frames of each video.
        fps: Frames per second of the pose video.
        readers: "pose" and "face"; with `replace_flag` also "background" and "mask".
    """

    reference_image: Image.Image
    pose_size: Size
    num_frames: int
    fps: float
    readers: Mapping[str, FrameReader]


class Animate(Task):
    kind = "animate"
    network = "wan.modules.animate:WanAnimateModel"
    diffusers_classes = ("WanAnimatePipeline", "WanAnimateTransformer3DModel")
    upload_names: ClassVar = {Path(name).stem: name for name in ANIMATE_FILES}
    needed_uploads = tuple(Path(name).stem for name in (_REFERENCE_IMAGE, *_MOTION_VIDEOS.values()))
    scene_uploads = tuple(Path(name).stem for name in _SCENE_VIDEOS.values())
    uploads_without_prompt: ClassVar = frozenset({"src_root_path"})

    def read_inputs(self, preset: Preset, values: Values) -> Inputs:
        folder = values.get("src_root_path")
        if folder is None:
            return Inputs()
        return read_animate_folder(folder, bool(values.get("replace_flag")))

    def complete_settings(
        self, preset: Preset, values: Values, inputs: Inputs, defaults: Values
    ) -> dict[str, Any]:
        """Counts the clips, and refuses settings without effect on them."""
        check_clip_settings(preset, values)
        settings = {"frame_num": preset.frame_num, "refert_num": 1} | {**defaults} | {**values}
        num_overlap_frames, max_clips = settings["refert_num"], values.get("num_clip")
        if not isinstance(inputs, AnimateInputs):
            return {"num_clip": max_clips or 2}  # a plan without a pose video
        size = values.get("size", inputs.pose_size)
        if size != inputs.pose_size:
            why, pose_size = "is not that of src_pose.mp4", "*".join(map(str, inputs.pose_size))
            remedy = f"drop it; the video is {pose_size}"
            raise InputError("`size`", "*".join(map(str, size)), why, remedy)
        if inputs.num_frames <= num_overlap_frames:
            why = f"has {inputs.num_frames} frame(s)"
            why += f", and more than `refert_num` {num_overlap_frames} are needed"
            remedy = "give a longer pose video"
            raise InputError("`src_root_path`", values["src_root_path"], why, remedy)
        if num_overlap_frames >= settings["frame_num"]:
            return {"num_clip": 1}  # refused by VideoParams
        num_clips = count_overlapping_clips(
            inputs.num_frames, settings["frame_num"], num_overlap_frames
        )
        return {
            "num_clip": min(max_clips or num_clips, num_clips),
            "size": inputs.pose_size,
            "num_source_frames": inputs.num_frames,
        }

    def choose_fps(self, params: VideoParams, inputs: Inputs, defaults: Values) -> float:
        from_pose = isinstance(inputs, AnimateInputs) and "fps" not in defaults
        return inputs.fps if from_pose else params.fps  # type: ignore[attr-defined]

    def complete_params(self, preset: Preset, chosen: dict[str, Any], values: Values) -> None:
        chosen["refert_num"] = chosen.get("refert_num") or 1
        chosen["replace_flag"] = bool(chosen.get("replace_flag"))

    def count_reference_latents(self, params: VideoParams) -> int:
        return 1

    def has_clips(self, params: VideoParams) -> bool:
        return True

    def count_clip_frames(self, params: VideoParams, clip: int) -> int:
        return _count_frames_up_to(params, clip + 1) - _count_frames_up_to(params, clip)

    def count_encoded_latents(self, params: VideoParams) -> int:
        return params.latent_shape[1] - 1

    def starts_with_known_frame(self, params: VideoParams, clip: int) -> bool:
        return clip > 0

    def estimate_denoise_bytes(self, params: VideoParams) -> dict[str, int]:
        return {"pictures of the face": 3 * params.frame_num * FACE_SIZE**2 * 4}

    def make_clips(self, params: VideoParams, inputs: Inputs, encoders: Encoders) -> AnimateClips:
        assert isinstance(inputs, AnimateInputs)
        return AnimateClips(params, inputs, encoders)

    def make_model_kwargs(
        self, params: VideoParams, config: Mapping[str, Any], make: Callable[..., Tensor]
    ) -> dict[str, Any]:
        channels, frames, *sides = params.latent_shape
        return {
            "pose_latents": make(1, channels, frames - 1, *sides),
            "face_pixel_values": make(1, 3, 4 * (frames - 2) + 1, FACE_SIZE, FACE_SIZE),
        }

    def make_encoder_input(
        self, params: VideoParams, video: Tensor, make: Callable[..., Tensor]
    ) -> None:
        return None


TASK = Animate()


def _count_frames_up_to(params: VideoParams, clip: int) -> int:
    """Returns the number of video frames in the first `clip` clips."""
    num_overlap_frames = params.refert_num or 0
    count = num_overlap_frames + clip * (params.frame_num - num_overlap_frames) if clip else 0
    return count if params.num_source_frames is None else min(count, params.num_source_frames)


class AnimateClips:
    """The clips of an Animate video. Implements `ClipMaker`.

    The noise of all clips comes from one generator, as in the official code.
    """

    state_needs_frames, continues_after_last = True, False

    def __init__(self, params: VideoParams, inputs: AnimateInputs, encoders: Encoders) -> None:
        import numpy as np
        import torch

        self._params, self._inputs, self._encoders = params, inputs, encoders
        self._contexts = encoders.encode_prompt(
            params, inputs.prompt_embeds, inputs.negative_prompt_embeds
        )
        self._sample_noise = make_noise_sampler(
            params, encoders.torch_device, inputs.num_clips_done * count_noise_samples(params)
        )
        with encoders.stage_timer("conditioning"):
            image = letterbox_image(np.asarray(inputs.reference_image), params.video_size)
            image_31HW = normalize_video_frames(image[None])
            features = encoders.encode_image([image_31HW[:, 0]])
            self._features = features.to(encoders.torch_device)
            latents = encoders.encode_video(image_31HW)
        self._reference = torch.cat((torch.ones_like(latents[:4]), latents))
        black = torch.full((1, 3, 1, 1, 1), -1.0, device=latents.device)
        self._black_faces = black.expand(-1, -1, params.frame_num, FACE_SIZE, FACE_SIZE)
        self._last_frames: Tensor | None = None

    def prepare_clip(self, index: int, state: Tensor | None) -> tuple[VideoParams, DenoiseInputs]:
        import torch

        params, inputs, encoders = self._params, self._inputs, self._encoders
        start = index * (params.frame_num - (params.refert_num or 0))
        indices = make_ping_pong_indices(start, params.frame_num, inputs.num_frames)
        with encoders.stage_timer("conditioning"):
            pose = encoders.encode_video(normalize_video_frames(inputs.readers["pose"](indices)))
            known_frames, mask = make_known_frames(params, indices, state, inputs.readers)
            y = torch.cat((mask.to(pose.device), encoders.encode_video(known_frames)))
            del known_frames
            encoders.release_vae()
            # After the VAE is released: a clip's faces take hundreds of megabytes.
            faces = normalize_video_frames(inputs.readers["face"](indices))[None].to(pose.device)
        shared_kwargs = {"pose_latents": pose[None]}
        model_kwargs = {
            "cond": shared_kwargs | {"face_pixel_values": faces},
            "uncond": shared_kwargs | {"face_pixel_values": self._black_faces},
        }
        return params, DenoiseInputs(
            *(self._sample_noise(), *self._contexts),
            y=torch.cat((self._reference, y), dim=1),
            clip_fea=self._features,
            sample_noise=self._sample_noise,
            model_kwargs=model_kwargs,
        )

    def select_latents(self, index: int, latents_Zfhw: Tensor) -> Tensor:
        return latents_Zfhw[:, 1:]

    def trim_frames(self, index: int, frames_3FHW: Tensor) -> Tensor:
        """Returns the clip's own frames, and keeps the last ones of all for `make_state`.

        A clip may have fewer own frames than it shares with the next one.
        """
        num_overlap_frames = self._params.refert_num or 0
        self._last_frames = frames_3FHW[:, -num_overlap_frames:].float().contiguous()
        new_frames = frames_3FHW[:, num_overlap_frames if index else 0 :]
        return new_frames[:, : self._params.count_clip_frames(index)]

    def make_state(self, latents_Zfhw: Tensor, frames_3FHW: Tensor | None) -> Tensor:
        """Returns the last `refert_num` frames of the untrimmed clip, [3,F,H,W]."""

        def get_last_frames() -> Tensor:
            assert self._last_frames is not None, "the main rank has them"
            return self._last_frames

        return self._encoders.run_on_rank0(get_last_frames).cpu()


def read_animate_folder(folder: Path, replace_character: bool) -> AnimateInputs:
    """Reads and checks the metadata of a preprocessed folder; frames are read later.

    Args:
        folder: Contains src_ref.png, src_pose.mp4 and src_face.mp4.
        replace_character: Also require src_bg.mp4 and src_mask.mp4.

    Raises:
        InputError: A file is missing or damaged, or differs from the others in size or length.
    """
    setting = "`src_root_path`"
    names = _MOTION_VIDEOS | (_SCENE_VIDEOS if replace_character else {})
    if not folder.is_dir():
        why = "is no folder" if folder.exists() else "does not exist"
        raise InputError(setting, folder, why, f"give a folder with {_list_file_names(names)}")
    missing = [name for name in (_REFERENCE_IMAGE, *names.values()) if not (folder / name).exists()]
    if missing:
        why = f"lacks {join_with_and(missing)}"
        condition = " with `replace_flag`" if replace_character else ""
        remedy = f"{_REMEDY};{condition} the folder must contain {_list_file_names(names)}"
        raise InputError(setting, folder, why, remedy)
    paths = {part: folder / name for part, name in names.items()}
    videos = {part: read_video(path, setting) for part, path in paths.items()}
    pose = videos["pose"]
    _check_pose_size(pose)
    for part, video in videos.items():
        size = (FACE_SIZE, FACE_SIZE) if part == "face" else pose.size
        if video.size != size:
            why = "has frames of {}x{} pixels, not {}x{}".format(*video.size, *size)
            raise InputError(setting, video.path, why, _REMEDY)
        videos[part] = video.synchronize(pose)
        num_frames = videos[part].num_frames
        if num_frames != pose.num_frames:
            why = f"has {num_frames} frames, not {pose.num_frames} as {_MOTION_VIDEOS['pose']}"
            raise InputError(setting, video.path, why, _REMEDY)
    return AnimateInputs(
        reference_image=images.read_image(folder / _REFERENCE_IMAGE, "src_root_path"),
        pose_size=pose.size,
        num_frames=pose.num_frames,
        fps=pose.fps,
        readers={part: partial(read_frames_at, video) for part, video in videos.items()},
        files=(folder / _REFERENCE_IMAGE, *paths.values()),
    )


def _list_file_names(names: Mapping[str, str]) -> str:
    return join_with_and([_REFERENCE_IMAGE, *names.values()])


def _check_pose_size(pose: VideoFile) -> None:
    width, height = pose.size
    if width % 16 or height % 16:
        why = f"has frames of {width}x{height} pixels, and needs multiples of 16"
        raise InputError("`src_root_path`", pose.path, why, _REMEDY)


def count_overlapping_clips(num_frames: int, clip_frames: int, num_overlap_frames: int) -> int:
    """Returns the number of clips that cover a video, with overlap frames between them."""
    return -(-(num_frames - num_overlap_frames) // (clip_frames - num_overlap_frames))


def make_ping_pong_indices(start: int, num_indices: int, num_frames: int) -> list[int]:
    """Returns frame indices that run back and forth after the end of the video."""
    period = max(1, 2 * num_frames - 2)  # a single frame is repeated
    phases = (index % period for index in range(start, start + num_indices))
    return [min(index, period - index) for index in phases]


def letterbox_image(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Scales an image [h,w,3] into (width, height) and pads it with black bars.

    Bit-exact with OpenCV's bilinear interpolation of uint8, whose weights have 11 bits.
    """
    import numpy as np

    (height, width, _), (columns, rows) = image.shape, size
    if height / width > rows / columns:
        scaled_size = int(rows / height * width), rows
    else:
        scaled_size = columns, int(columns / width * height)
    canvas = np.zeros((rows, columns, 3), np.uint8)
    x_offset, y_offset = (columns - scaled_size[0]) // 2, (rows - scaled_size[1]) // 2
    canvas[y_offset : y_offset + scaled_size[1], x_offset : x_offset + scaled_size[0]] = (
        _resize_bilinear(image, scaled_size)
    )
    return canvas


def _resize_bilinear(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    import numpy as np

    height, width, _ = image.shape
    if (width, height) == size:
        return image

    def make_taps(source_size: int, target_size: int) -> tuple[np.ndarray, np.ndarray]:
        centers = np.float32((np.arange(target_size) + 0.5) * (source_size / target_size) - 0.5)
        floor_indices = np.floor(centers).astype(np.int64)
        return floor_indices, centers - floor_indices.astype(np.float32)

    (x, across), (y, down) = make_taps(width, size[0]), make_taps(height, size[1])
    across = np.where((x < 0) | (x >= width - 1), np.float32(0), across)
    a0, a1 = (
        np.rint(2048 * fraction).astype(np.int64)[None, :, None]
        for fraction in (1 - across, across)
    )
    x = x.clip(0, width - 1)
    pixels = image.astype(np.int64)
    interpolated_rows = a0 * pixels[:, x] + a1 * pixels[:, (x + 1).clip(0, width - 1)]
    b0, b1 = (
        np.rint(2048 * fraction).astype(np.int64)[:, None, None] for fraction in (1 - down, down)
    )
    upper, lower = (
        interpolated_rows[row_indices.clip(0, height - 1)] >> 4 for row_indices in (y, y + 1)
    )
    return ((((b0 * upper) >> 16) + ((b1 * lower) >> 16) + 2) >> 2).astype(np.uint8)


def make_known_frames(
    params: VideoParams,
    indices: Sequence[int],
    previous_frames: Tensor | None,
    readers: Mapping[str, FrameReader],
) -> tuple[Tensor, Tensor]:
    """Returns the known frames of a clip, [3,F,H,W], and their mask, [4,f,h,w]; 1: known.

    Args:
        indices: The frames of the clip.
        previous_frames: The last frames of the previous clip, [3,F,H,W].
        readers: "background" and "mask", with `replace_flag`.
    """
    import torch

    (width, height), num_overlap_frames = params.frame_size, 0
    _, _, rows, columns = params.latent_shape
    frames = torch.zeros(3, len(indices), height, width)
    known_mask = torch.zeros(len(indices), rows, columns)
    if params.replace_flag:
        frames = normalize_video_frames(readers["background"](indices))
        masks = torch.from_numpy(readers["mask"](indices)[..., 0].copy()).float() / 255
        known_mask = 1 - masks[:, :: height // rows, :: width // columns]
    if previous_frames is not None:
        num_overlap_frames = previous_frames.shape[1]
        if num_overlap_frames != params.refert_num:  # stored by a version that kept fewer
            raise FileChangedError(
                f"The last stored clip holds {num_overlap_frames} frames for the next one instead "
                f"of {params.refert_num}; remove the folder of clips and start again."
            )
        frames[:, :num_overlap_frames] = previous_frames.to(frames.device)
        known_mask[:num_overlap_frames] = 1
    return frames, fold_mask_to_latent(known_mask)


def fold_mask_to_latent(mask_Fhw: Tensor) -> Tensor:
    """Folds a mask of frames into latent frames, [4,f,h,w]; the first frame fills 4 channels."""
    import torch

    padded_mask = torch.cat((mask_Fhw[:1].expand(3, -1, -1), mask_Fhw))
    return padded_mask.unflatten(0, (-1, 4)).transpose(0, 1)


def normalize_video_frames(frames_FHW3: np.ndarray) -> Tensor:
    """Converts uint8 [F,H,W,3] to float32 [3,F,H,W] in [-1, 1]."""
    import torch

    return torch.from_numpy(frames_FHW3.copy()).permute(3, 0, 1, 2).float() / 127.5 - 1
