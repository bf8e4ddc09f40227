"""Generates an Animate video clip by clip; each clip starts with the last frames of the previous.

Legend: Z latent channels, f h w latent frames/height/width, F H W pixel ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wan.log import logger
from wan.pipeline.clips import Clip
from wan.pipeline.conditioning import noise
from wan.pipeline.denoise import Conditions, Denoising
from wan.pipeline.driving import DrivingVideos, padded, places
from wan.settings.presets import FACE_SIDE
from wan.settings.request import Request

if TYPE_CHECKING:
    from wan.pipeline.pipeline import Inputs, Pipeline


def made(pipeline: Pipeline, request: Request, inputs: Inputs) -> Iterator[Clip]:
    """Generates the clips of an Animate video in order; all ranks call it.

    The noise of all clips comes from one generator, as in the official code.
    """
    driving, count = inputs.driving, request.num_clip
    assert driving is not None and count is not None and request.refert_num is not None
    contexts = pipeline.texts(request, inputs.prompt_embeds, inputs.negative_prompt_embeds)
    draw = noise(request, pipeline.device.torch_device)
    with pipeline.stages("conditioning"):
        picture = _pixels(padded(np.asarray(driving.picture), request.video_size)[None])
        features = pipeline.look([picture[:, 0]]).to(pipeline.device.torch_device)
        reference = pipeline.encode(picture)
        first = torch.cat((torch.ones_like(reference[:4]), reference))
    black = torch.full((1, 3, 1, 1, 1), -1.0, device=reference.device)
    black = black.expand(-1, -1, request.frame_num, FACE_SIDE, FACE_SIDE)
    before: Tensor | None = None
    for index in range(count):
        if count > 1:
            logger.info("Clip %d of %d", index + 1, count)
        start = index * (request.frame_num - request.refert_num)
        taken = places(start, request.frame_num, driving.frames)
        with pipeline.stages("conditioning"):
            pose = pipeline.encode(_pixels(driving.videos["pose"](taken)))
            known, mask = _known(request, driving, taken, before)
            y = torch.cat((mask.to(pose.device), pipeline.encode(known)))
            del known
            pipeline.done(pipeline.vae)
            # After the VAE is released: a clip's faces take hundreds of megabytes.
            faces = _pixels(driving.videos["face"](taken))[None].to(pose.device)
        shared = {"pose_latents": pose[None]}
        given = {
            "cond": shared | {"face_pixel_values": faces},
            "uncond": shared | {"face_pixel_values": black},
        }
        conditions = Conditions(
            *(draw(), *contexts),
            y=torch.cat((first, y), dim=1),
            clip_fea=features,
            draw=draw,
            given=given,
        )
        latents = pipeline.advanced(Denoising(request, conditions))
        del conditions, given, faces
        pipeline.done(pipeline.experts)
        frames = pipeline.decode(latents[:, 1:])
        if frames is not None:
            frames = frames[:, request.refert_num if index else 0 :]
            frames = frames[:, : request.clip_frames(index)]
        yield Clip(latents, frames)
        if index + 1 < count:
            before = _end(pipeline, frames, request.refert_num)
            del frames  # free them before the next clip


def _known(
    request: Request, driving: DrivingVideos, taken: list[int], before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the known frames of a clip, [3,F,H,W], and their mask, [4,f,h,w]; 1: known."""
    (width, height), again = request.video_size, 0
    _, _, rows, columns = request.latent_shape
    known = torch.zeros(3, len(taken), height, width)
    keep = torch.zeros(len(taken), rows, columns)
    if request.replace_flag:
        known = _pixels(driving.videos["background"](taken))
        masks = torch.from_numpy(driving.videos["mask"](taken)[..., 0].copy()).float() / 255
        keep = 1 - masks[:, :: height // rows, :: width // columns]
    if before is not None:
        again = before.shape[1]
        known[:, :again] = before.to(known.device)
        keep[:again] = 1
    return known, folded(keep)


def folded(mask_Fhw: Tensor) -> Tensor:
    """Folds a mask of frames into latent frames, [4,f,h,w]; the first frame fills 4 channels."""
    whole = torch.cat((mask_Fhw[:1].expand(3, -1, -1), mask_Fhw))
    return whole.unflatten(0, (-1, 4)).transpose(0, 1)


def _end(pipeline: Pipeline, frames: Tensor | None, count: int) -> Tensor:
    """Broadcasts the last frames of the main rank to all ranks, [3,count,H,W]."""

    def last() -> Tensor:
        assert frames is not None, "the main rank has them"
        return frames[:, -count:].float().clamp(-1, 1).contiguous()

    return pipeline.sharing.latents(last).cpu()


def _pixels(frames_FHW3: np.ndarray) -> Tensor:
    """Converts uint8 [F,H,W,3] to float32 [3,F,H,W] in [-1, 1]."""
    return torch.from_numpy(frames_FHW3.copy()).permute(3, 0, 1, 2).float() / 127.5 - 1
