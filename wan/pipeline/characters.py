"""Generates an Animate video clip by clip; each clip starts with the last frames of the previous.

Legend: Z latent channels, f h w latent frames/height/width, F H W pixel ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wan.pipeline.clips import Clip
from wan.pipeline.conditioning import make_noise_sampler
from wan.pipeline.denoise import DenoiseInputs, DenoisingLoop
from wan.pipeline.driving import AnimateInputs, letterbox_image, make_ping_pong_indices
from wan.settings.presets import FACE_SIZE
from wan.settings.request import VideoParams
from wan.utils.log import logger

if TYPE_CHECKING:
    from wan.pipeline.pipeline import Inputs, Pipeline


def generate_animate_clips(
    pipeline: Pipeline, params: VideoParams, inputs: Inputs
) -> Iterator[Clip]:
    """Generates the clips of an Animate video in order; all ranks call it.

    The noise of all clips comes from one generator, as in the official code.
    """
    animate, num_clips = inputs.animate, params.num_clip
    assert animate is not None and num_clips is not None and params.refert_num is not None
    contexts = pipeline.encode_prompt(params, inputs.prompt_embeds, inputs.negative_prompt_embeds)
    sample_noise = make_noise_sampler(params, pipeline.device.torch_device)
    with pipeline.stage_timer("conditioning"):
        image_pixels = _normalize_video_frames(
            letterbox_image(np.asarray(animate.reference_image), params.video_size)[None]
        )
        features = pipeline.encode_image([image_pixels[:, 0]]).to(pipeline.device.torch_device)
        reference_latents = pipeline.encode_video(image_pixels)
        reference_condition = torch.cat((torch.ones_like(reference_latents[:4]), reference_latents))
    black_faces = torch.full((1, 3, 1, 1, 1), -1.0, device=reference_latents.device)
    black_faces = black_faces.expand(-1, -1, params.frame_num, FACE_SIZE, FACE_SIZE)
    previous_frames: Tensor | None = None
    for index in range(num_clips):
        if num_clips > 1:
            logger.info("Clip %d of %d", index + 1, num_clips)
        start = index * (params.frame_num - params.refert_num)
        indices = make_ping_pong_indices(start, params.frame_num, animate.num_frames)
        with pipeline.stage_timer("conditioning"):
            pose = pipeline.encode_video(_normalize_video_frames(animate.readers["pose"](indices)))
            known_frames, mask = _make_known_frames(params, animate, indices, previous_frames)
            y = torch.cat((mask.to(pose.device), pipeline.encode_video(known_frames)))
            del known_frames
            pipeline.release(pipeline.vae)
            # After the VAE is released: a clip's faces take hundreds of megabytes.
            faces = _normalize_video_frames(animate.readers["face"](indices))[None].to(pose.device)
        shared_kwargs = {"pose_latents": pose[None]}
        model_kwargs = {
            "cond": shared_kwargs | {"face_pixel_values": faces},
            "uncond": shared_kwargs | {"face_pixel_values": black_faces},
        }
        denoise_inputs = DenoiseInputs(
            *(sample_noise(), *contexts),
            y=torch.cat((reference_condition, y), dim=1),
            clip_fea=features,
            sample_noise=sample_noise,
            model_kwargs=model_kwargs,
        )
        latents = pipeline.denoise(DenoisingLoop(params, denoise_inputs))
        del denoise_inputs, model_kwargs, faces
        pipeline.release(pipeline.experts)
        frames = pipeline.decode(latents[:, 1:])
        if frames is not None:
            frames = frames[:, params.refert_num if index else 0 :]
            frames = frames[:, : params.count_clip_frames(index)]
        yield Clip(latents, frames)
        if index + 1 < num_clips:
            previous_frames = _broadcast_last_frames(pipeline, frames, params.refert_num)
            del frames  # free them before the next clip


def _make_known_frames(
    params: VideoParams, animate: AnimateInputs, indices: list[int], previous_frames: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the known frames of a clip, [3,F,H,W], and their mask, [4,f,h,w]; 1: known."""
    (width, height), num_overlap_frames = params.video_size, 0
    _, _, rows, columns = params.latent_shape
    frames = torch.zeros(3, len(indices), height, width)
    known_mask = torch.zeros(len(indices), rows, columns)
    if params.replace_flag:
        frames = _normalize_video_frames(animate.readers["background"](indices))
        masks = torch.from_numpy(animate.readers["mask"](indices)[..., 0].copy()).float() / 255
        known_mask = 1 - masks[:, :: height // rows, :: width // columns]
    if previous_frames is not None:
        num_overlap_frames = previous_frames.shape[1]
        frames[:, :num_overlap_frames] = previous_frames.to(frames.device)
        known_mask[:num_overlap_frames] = 1
    return frames, fold_mask_to_latent(known_mask)


def fold_mask_to_latent(mask_Fhw: Tensor) -> Tensor:
    """Folds a mask of frames into latent frames, [4,f,h,w]; the first frame fills 4 channels."""
    padded_mask = torch.cat((mask_Fhw[:1].expand(3, -1, -1), mask_Fhw))
    return padded_mask.unflatten(0, (-1, 4)).transpose(0, 1)


def _broadcast_last_frames(pipeline: Pipeline, frames: Tensor | None, count: int) -> Tensor:
    """Broadcasts the last frames of the main rank to all ranks, [3,count,H,W]."""

    def get_last_frames() -> Tensor:
        assert frames is not None, "the main rank has them"
        return frames[:, -count:].float().clamp(-1, 1).contiguous()

    return pipeline.work_sharing.run_on_rank0(get_last_frames).cpu()


def _normalize_video_frames(frames_FHW3: np.ndarray) -> Tensor:
    """Converts uint8 [F,H,W,3] to float32 [3,F,H,W] in [-1, 1]."""
    return torch.from_numpy(frames_FHW3.copy()).permute(3, 0, 1, 2).float() / 127.5 - 1
