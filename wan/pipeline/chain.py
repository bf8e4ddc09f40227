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

from wan import log
from wan.device import beside
from wan.log import logger
from wan.pipeline.clips import Clip
from wan.pipeline.conditioning import chained_channels, image_channels, noise, pixels, resized
from wan.pipeline.denoise import Conditions, Denoising
from wan.pipeline.vae import Collected
from wan.settings.request import Request
from wan.settings.timesteps import schedule

if TYPE_CHECKING:
    from wan.pipeline.pipeline import Inputs, Pipeline


def made(pipeline: Pipeline, request: Request, inputs: Inputs) -> Iterator[Clip]:
    """Generates the missing clips of a chained video in order; all ranks call it."""
    kept = pipeline.kept
    try:
        if request.clip_prompts:  # encoded together, so that the text encoder is loaded once
            pipeline.keep_texts([*kept, *request.texts], request)
        yield from _clips(pipeline, request, inputs)
    finally:
        pipeline.kept = kept


def _clips(pipeline: Pipeline, request: Request, inputs: Inputs) -> Iterator[Clip]:
    assert inputs.image is not None and request.num_clip is not None
    picture, count = resized(pixels(inputs.image), request.video_size), request.num_clip
    device, end = pipeline.device.torch_device, inputs.end
    anchor: Tensor | None = None
    contexts: tuple[Tensor, Tensor] | None = None
    before: _Beside | None = None
    for index in range(inputs.done, count):
        one = request.of_clip(index)
        if count > 1:
            logger.info("Clip %d of %d: %s", index + 1, count, log.format_prompt(one.prompt))
        if contexts is None or request.clip_prompts:
            contexts = pipeline.texts(one, inputs.prompt_embeds, inputs.negative_prompt_embeds)
        with pipeline.stages("conditioning"):
            if request.chain == "frame":
                y = image_channels(one, [picture[:, 0] if end is None else end], pipeline.encode)
            else:
                anchor = pipeline.encode(picture) if anchor is None else anchor
                y = chained_channels(one, anchor, end)
            if before is None:
                pipeline.done(pipeline.vae)
        draw = noise(one, device)
        conditions = Conditions(draw(), *contexts, y=y.to(device), draw=draw)
        try:
            latents = pipeline.advanced(Denoising(one, conditions))
        except BaseException:
            if before is not None:  # a retry may need the VAE and its memory
                before.wait()
            raise
        del conditions, y
        pipeline.done(pipeline.experts)
        if before is not None:
            yield before.clip()
            before = None
        if index + 1 < count:
            pipeline.experts.prefetch(schedule(request).experts[0])  # while this clip is decoded
        first = request.again if end is not None else 0
        if request.chain == "latent":
            end = latents[:, -1:].clone()
            if pipeline.overlaps and index + 1 < count:
                before = _Beside(pipeline, latents, first)
                continue
        frames = pipeline.decode(latents)
        end = _last(pipeline, frames) if request.chain == "frame" else end
        yield Clip(latents, None if frames is None else frames[:, first:], end)
        del frames, latents


class _Beside:
    """Decodes a clip in a thread of the main rank while all ranks denoise the next clip."""

    def __init__(self, pipeline: Pipeline, latents: Tensor, first: int) -> None:
        """Starts decoding. num_overlap_frames: The first frames, shared with the previous clip."""
        self._pipeline, self._latents, self._first = pipeline, latents, first
        self._frames: Future[Tensor] | None = None
        if pipeline.is_main:
            thread = ThreadPoolExecutor(1, "decoding")
            self._frames = thread.submit(self._decoded)
            thread.shutdown(wait=False)

    def _decoded(self) -> Tensor:
        pipeline, whole = self._pipeline, Collected(torch.device("cpu"))
        with beside(pipeline.device.torch_device), pipeline.stages("decoding"):
            pipeline.codec.decode_alone(self._latents, whole)
        return whole.video

    def wait(self) -> None:
        """Waits until decoding has ended or failed."""
        if self._frames is not None:
            self._frames.exception()

    def clip(self) -> Clip:
        """Returns the clip, and decodes it again if the thread failed; all ranks call it."""
        frames: Tensor | None = None
        failed = False
        if self._frames is not None:
            try:
                frames = self._frames.result()
            except Exception as error:
                failed = True
                logger.warning("A clip is decoded again, without overlap (%s).", error)
        if bool(self._pipeline.sharing.latents(lambda: torch.tensor([float(failed)]))):
            frames = self._pipeline.decode(self._latents)
        else:
            self._pipeline.done(self._pipeline.vae)
        kept = None if frames is None else frames[:, self._first :]
        return Clip(self._latents, kept, self._latents[:, -1:].clone())


def _last(pipeline: Pipeline, frames_3FHW: Tensor | None) -> Tensor:
    """Broadcasts the last frame [3,H,W] of the main rank to all ranks."""

    def last() -> Tensor:
        assert frames_3FHW is not None, "the main rank has them"
        return frames_3FHW[:, -1].contiguous()

    return pipeline.sharing.latents(last).cpu()
