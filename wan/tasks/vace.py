"""Videos from a source video, its mask and reference images (VACE, arXiv:2503.07598).

Legend: Z latent channels, f h w latent frames/height/width, F H W pixel ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan.media import images
from wan.media.video_reader import FrameReader, VideoFile, read_frames_at, read_video
from wan.settings.errors import InputError
from wan.settings.presets import Preset
from wan.settings.rules import Values
from wan.settings.video_options import MAX_REFERENCE_IMAGES, Size
from wan.tasks.base import (
    DenoiseInputs,
    Encoders,
    EncodeVideo,
    Inputs,
    Task,
    VideoParams,
)
from wan.tasks.video2video import (
    SourceInputs,
    check_source_fps,
    choose_source_fps,
    compute_source_size,
    limit_frames,
    normalize_bytes,
    read_frames_at_size,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image
    from torch import Tensor

_TRAINED_FPS = 16


@dataclass(frozen=True, kw_only=True)
class VaceInputs(SourceInputs):
    """The inputs of a VACE video.

    Attributes:
        mask_reader: Reads frames of the mask, by luma; white pixels are generated.
    """

    mask_reader: FrameReader | None = None
    reference_images: tuple[Image.Image, ...] = ()

    @property
    def source_size(self) -> Size | None:
        return self.size


class Vace(Task):
    kind = "vace"
    network = "wan.modules.vace:VaceWanModel"
    diffusers_classes = ("WanVACEPipeline", "WanVACETransformer3DModel")

    def read_inputs(self, preset: Preset, values: Values) -> VaceInputs:
        video, mask = values.get("src_video"), values.get("src_mask")
        return read_vace_files(video, mask, values.get("src_ref_images", ()))

    def complete_settings(
        self, preset: Preset, values: Values, inputs: Inputs, defaults: Values
    ) -> dict[str, Any]:
        """Counts reference images, and limits the frames to those of the source video."""
        assert isinstance(inputs, VaceInputs)
        counts = {"num_reference_images": len(inputs.reference_images)}
        if inputs.video_reader is None:
            return counts
        return counts | limit_frames(preset, values, inputs, defaults)

    def choose_fps(self, params: VideoParams, inputs: Inputs, defaults: Values) -> float:
        return choose_source_fps(params, inputs)

    def compute_video_size(self, params: VideoParams) -> Size:
        if params.image_size is None:
            return params.size
        return compute_source_size(params.preset, params.image_size, params.area)

    def count_reference_latents(self, params: VideoParams) -> int:
        return params.num_reference_images

    def count_encoded_latents(self, params: VideoParams) -> int:
        return self.count_decoded_latents(params)

    def make_denoise_inputs(
        self, params: VideoParams, base: DenoiseInputs, inputs: Inputs, encoders: Encoders
    ) -> DenoiseInputs:
        vace_inputs = inputs if isinstance(inputs, VaceInputs) else VaceInputs()
        context = make_vace_context(params, vace_inputs, encoders.encode_video)
        scales = params.conditioning_scale or (1.0,)
        model_kwargs = {
            "vace_context": [context.to(base.initial_latents.device)],
            "vace_context_scale": scales[0] if len(scales) == 1 else scales,
        }
        return replace(base, model_kwargs={"cond": model_kwargs, "uncond": model_kwargs})

    def make_model_kwargs(
        self, params: VideoParams, config: Mapping[str, Any], make: Callable[..., Tensor]
    ) -> dict[str, Any]:
        return {"vace_context": [make(config["vace_in_dim"], *params.latent_shape[1:])]}

    def make_encoder_input(
        self, params: VideoParams, video: Tensor, make: Callable[..., Tensor]
    ) -> Tensor:
        import torch

        return make(5, *video.shape[1:], dtype=torch.uint8)  # RGB and two masks


TASK = Vace()


def read_vace_files(
    video: Path | None, mask: Path | None, reference_images: Sequence[str | Path | Image.Image]
) -> VaceInputs:
    """Reads images and the metadata of the videos; frames are read later.

    Args:
        video: The source video.
        mask: Its mask, of the same size and length; or an image, the mask of all frames.
        reference_images: Images, or their paths.

    Raises:
        InputError: A file is damaged, or the mask differs from the video in size or length.
    """
    if len(reference_images) > MAX_REFERENCE_IMAGES:
        why = (
            f"has {len(reference_images)} pictures, and at most {MAX_REFERENCE_IMAGES} are allowed"
        )
        raise InputError("`src_ref_images`", None, why, "choose some of them")
    if mask is not None and video is None:
        why, remedy = "is a mask without a video", "give the video with `src_video`"
        raise InputError("`src_mask`", mask, why, remedy)
    loaded_images = tuple(
        images.convert_to_image(image, "src_ref_images") for image in reference_images
    )
    files = tuple(Path(image) for image in reference_images if isinstance(image, str | Path))
    if video is None:
        return VaceInputs(reference_images=loaded_images, files=files)
    video_file = read_video(video, "`src_video`")
    check_source_fps(video_file, _TRAINED_FPS)
    mask_reader: FrameReader | None = None
    if mask is not None:
        mask_reader = _read_mask(mask, video_file)
        files = (mask, *files)
    video_reader = partial(read_frames_at, video_file)
    return VaceInputs(
        size=video_file.size,
        num_frames=video_file.num_frames,
        fps=video_file.fps,
        video_reader=video_reader,
        mask_reader=mask_reader,
        reference_images=loaded_images,
        files=(video, *files),
    )


def _read_mask(path: Path, video: VideoFile) -> FrameReader:
    """Reads a still mask of all frames, or the metadata of a mask video.

    It must have the size of its video, and a mask video its length, too.
    """
    remedy = "give a mask of the same size and length as `src_video`, or one image for all frames"
    mask: Image.Image | VideoFile
    if images.is_still_image(path):
        mask = images.read_image(path, "src_mask")
    else:
        mask = read_video(path, "`src_mask`")
    if mask.size != video.size:
        why = "has frames of {}x{} pixels, not {}x{}".format(*mask.size, *video.size)
        raise InputError("`src_mask`", path, why, remedy)
    if not isinstance(mask, VideoFile):
        return partial(_repeat_image, mask)
    mask = mask.synchronize(video)
    if mask.num_frames != video.num_frames:
        why = f"has {mask.num_frames} frames, not {video.num_frames}"
        raise InputError("`src_mask`", path, why, remedy)
    return partial(read_frames_at, mask)


def _repeat_image(image: Image.Image, indices: Sequence[int]) -> np.ndarray:
    """Returns an image as each of some frames; implements `FrameReader`."""
    import numpy as np

    pixels_HW3 = np.asarray(image)
    return np.broadcast_to(pixels_HW3, (len(indices), *pixels_HW3.shape))


def make_vace_context(params: VideoParams, vace_inputs: VaceInputs, encode: EncodeVideo) -> Tensor:
    """Returns the VACE context, float32 [96,f,h,w]: inactive latents, reactive latents, mask.

    The latent frames of the reference images precede those of the video, in the order of the list,
    as in the official code; diffusers reverses them. Without a source video all frames are gray and
    reactive.
    """
    import torch

    size, num_frames = params.video_size, params.frame_num
    mask_FHW = torch.ones(1).expand(num_frames, *size[::-1])
    if vace_inputs.video_reader is None:
        inactive = reactive = encode(torch.zeros(3, num_frames, *size[::-1]))
    else:
        # The video stays uint8; each part is converted to float32 separately to save memory.
        video = read_frames_at_size(vace_inputs.video_reader, num_frames, size).permute(3, 0, 1, 2)
        is_reactive_FHW = mask_FHW.bool()
        if vace_inputs.mask_reader is not None:
            mask_FHW3 = read_frames_at_size(vace_inputs.mask_reader, num_frames, size).numpy()
            mask_FHW = torch.from_numpy(images.convert_to_luma(mask_FHW3))
            del mask_FHW3
            is_reactive_FHW = mask_FHW > 127
        inactive = encode(normalize_bytes(video).mul_(~is_reactive_FHW))
        reactive = encode(normalize_bytes(video).mul_(is_reactive_FHW))
        del video, is_reactive_FHW
    mask_channels = fold_mask_to_vace_channels(mask_FHW, inactive.shape[1:]).to(inactive.device)
    context = torch.cat((inactive, reactive, mask_channels))
    reference_frames = []
    for image in vace_inputs.reference_images:
        latent = encode(paste_image_on_canvas(image, size)).to(inactive.device)
        zeros = torch.zeros(len(context) - len(latent), *latent.shape[1:], device=inactive.device)
        reference_frames.append(torch.cat((latent, zeros)))
    return torch.cat((*reference_frames, context), dim=1)


def fold_mask_to_vace_channels(mask_FHW: Tensor, latents_fhw: torch.Size) -> Tensor:
    """Folds each latent pixel's 8 x 8 mask pixels into channels, [64,f,h,w].

    Frames are resampled to the nearest one. mask_FHW: floats from 0 to 1, or uint8 up to 255.
    """
    import torch

    (frames, height, width), (num_latents, rows, columns) = mask_FHW.shape, latents_fhw
    mask_fHW = mask_FHW[((torch.arange(num_latents) + 0.5) * frames / num_latents).long()]
    if mask_fHW.dtype == torch.uint8:
        mask_fHW = (normalize_bytes(mask_fHW) + 1) / 2
    cells = mask_fHW.reshape(num_latents, rows, height // rows, columns, width // columns)
    return cells.permute(2, 4, 0, 1, 3).flatten(0, 1)


def paste_image_on_canvas(image: Image.Image, size: Size) -> Tensor:
    """Pastes a scaled image on the center of a white canvas of (width, height): [3,1,H,W]."""
    import torch
    from torch.nn.functional import interpolate

    width, height = size
    scale = min(height / image.height, width / image.width)
    scaled = max(1, int(image.height * scale)), max(1, int(image.width * scale))
    canvas = torch.ones(3, height, width)
    y_offset, x_offset = (height - scaled[0]) // 2, (width - scaled[1]) // 2
    canvas[:, y_offset : y_offset + scaled[0], x_offset : x_offset + scaled[1]] = interpolate(
        images.convert_image_to_tensor(image)[None],
        size=scaled,
        mode="bilinear",
        align_corners=False,
    )[0]
    return canvas.unsqueeze(1)
