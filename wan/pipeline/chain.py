"""Generates a long i2v video clip by clip; each clip continues the previous one.

With SVI 2.0 Pro (arXiv 2510.09212) the clip state is the last latent frame, which is not decoded
and encoded again, and every clip is conditioned on the image as well. Without it the clip state is
the last frame. Both are small and saved, so that a video can be continued after any clip.

Legend: Z latent channels, f h w latent frames/height/width, F H W pixel ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wan.device import use_side_stream
from wan.modules.vae.video_vae import FrameCollector
from wan.pipeline.clips import Clip
from wan.pipeline.conditioning import (
    convert_image_to_tensor,
    make_chained_condition,
    make_image_condition,
    make_noise_sampler,
    resize_image_to_video,
)
from wan.pipeline.denoise import DenoiseInputs, DenoisingLoop
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.request import VideoParams
from wan.utils import log
from wan.utils.log import logger

if TYPE_CHECKING:
    from wan.pipeline.pipeline import Inputs, Pipeline


def generate_chained_clips(
    pipeline: Pipeline, params: VideoParams, inputs: Inputs
) -> Iterator[Clip]:
    """Generates the missing clips of a chained video in order; all ranks call it."""
    cached_embeds = pipeline.cached_prompt_embeds
    try:
        if params.clip_prompts:  # encoded together, so that the text encoder is loaded once
            pipeline.cache_prompt_embeds([*cached_embeds, *params.all_prompts], params)
        yield from _generate_missing_clips(pipeline, params, inputs)
    finally:
        pipeline.cached_prompt_embeds = cached_embeds


def _generate_missing_clips(
    pipeline: Pipeline, params: VideoParams, inputs: Inputs
) -> Iterator[Clip]:
    assert inputs.image is not None and params.num_clip is not None
    image = resize_image_to_video(convert_image_to_tensor(inputs.image), params.video_size)
    num_clips = params.num_clip
    device, state = pipeline.device.torch_device, inputs.clip_state
    anchor: Tensor | None = None
    contexts: tuple[Tensor, Tensor] | None = None
    pending_decode: _BackgroundDecode | None = None
    for index in range(inputs.num_clips_done, num_clips):
        clip_params = params.make_clip_params(index)
        if num_clips > 1:
            logger.info(
                "Clip %d of %d: %s", index + 1, num_clips, log.format_prompt(clip_params.prompt)
            )
        if contexts is None or params.clip_prompts:
            contexts = pipeline.encode_prompt(
                clip_params, inputs.prompt_embeds, inputs.negative_prompt_embeds
            )
        with pipeline.stage_timer("conditioning"):
            if params.chain == "frame":
                y = make_image_condition(
                    clip_params, [image[:, 0] if state is None else state], pipeline.encode_video
                )
            else:
                anchor = pipeline.encode_video(image) if anchor is None else anchor
                y = make_chained_condition(clip_params, anchor, state)
            if pending_decode is None:
                pipeline.release(pipeline.vae)
        noise = make_noise_sampler(clip_params, device)
        denoise_inputs = DenoiseInputs(noise(), *contexts, y=y.to(device), sample_noise=noise)
        try:
            latents = pipeline.denoise(DenoisingLoop(clip_params, denoise_inputs))
        except BaseException:
            if pending_decode is not None:  # a retry may need the VAE and its memory
                pending_decode.wait()
            raise
        del denoise_inputs, y
        pipeline.release(pipeline.experts)
        if pending_decode is not None:
            yield pending_decode.collect_clip()
            pending_decode = None
        if index + 1 < num_clips:
            # While this clip is decoded.
            pipeline.experts.prefetch(make_noise_schedule(params).experts[0])
        num_overlap_frames = params.num_overlap_frames if state is not None else 0
        if params.chain == "latent":
            state = latents[:, -1:].clone()
            if pipeline.overlap_decoding and index + 1 < num_clips:
                pending_decode = _BackgroundDecode(pipeline, latents, num_overlap_frames)
                continue
        frames = pipeline.decode(latents)
        state = _broadcast_last_frame(pipeline, frames) if params.chain == "frame" else state
        yield Clip(latents, None if frames is None else frames[:, num_overlap_frames:], state)
        del frames, latents


class _BackgroundDecode:
    """Decodes a clip in a thread of the main rank while all ranks denoise the next clip."""

    def __init__(self, pipeline: Pipeline, latents: Tensor, num_overlap_frames: int) -> None:
        """Starts decoding. num_overlap_frames: The first frames, shared with the previous clip."""
        self._pipeline, self._latents = pipeline, latents
        self._num_overlap_frames = num_overlap_frames
        self._future: Future[Tensor] | None = None
        if pipeline.is_main:
            executor = ThreadPoolExecutor(1, "decoding")
            self._future = executor.submit(self._decode)
            executor.shutdown(wait=False)

    def _decode(self) -> Tensor:
        pipeline, collected = self._pipeline, FrameCollector(torch.device("cpu"))
        with use_side_stream(pipeline.device.torch_device), pipeline.stage_timer("decoding"):
            pipeline.vae_runner.decode_alone(self._latents, collected)
        return collected.video

    def wait(self) -> None:
        """Waits until decoding has ended or failed."""
        if self._future is not None:
            self._future.exception()

    def collect_clip(self) -> Clip:
        """Returns the clip, and decodes it again if the thread failed; all ranks call it."""
        frames: Tensor | None = None
        failed = False
        if self._future is not None:
            try:
                frames = self._future.result()
            except Exception as error:
                failed = True
                logger.warning("A clip is decoded again, without overlap (%s).", error)
        if bool(self._pipeline.work_sharing.run_on_rank0(lambda: torch.tensor([float(failed)]))):
            frames = self._pipeline.decode(self._latents)
        else:
            self._pipeline.release(self._pipeline.vae)
        new_frames = None if frames is None else frames[:, self._num_overlap_frames :]
        return Clip(self._latents, new_frames, self._latents[:, -1:].clone())


def _broadcast_last_frame(pipeline: Pipeline, frames_3FHW: Tensor | None) -> Tensor:
    """Broadcasts the last frame [3,H,W] of the main rank to all ranks."""

    def get_last_frame() -> Tensor:
        assert frames_3FHW is not None, "the main rank has them"
        return frames_3FHW[:, -1].contiguous()

    return pipeline.work_sharing.run_on_rank0(get_last_frame).cpu()
