"""The loop over the clips of a video; the `ClipMaker` of the task defines a clip."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from wan.device import use_side_stream
from wan.modules.vae.video_vae import FrameCollector
from wan.pipeline.denoise import DenoisingLoop
from wan.pipeline.pipeline import Pipeline
from wan.settings.noise_schedule import make_noise_schedule
from wan.tasks.base import Clip, ClipMaker, Inputs, VideoParams
from wan.utils.log import format_prompt, logger, make_step_bar


def generate_clips(pipeline: Pipeline, params: VideoParams, inputs: Inputs) -> Iterator[Clip]:
    """Generates the missing clips of a video in order; all ranks call it."""
    pipeline.experts.prefetch(make_noise_schedule(params).experts[0])
    cached_embeds = pipeline.cached_prompt_embeds
    try:
        # Encoded together, so that the text encoder is loaded once.
        if params.clip_prompts or params.task.fixed_prompts:
            pipeline.cache_prompt_embeds([*cached_embeds, *params.all_prompts], params)
        yield from _generate_missing_clips(pipeline, params, inputs)
    finally:
        pipeline.cached_prompt_embeds = cached_embeds


def _generate_missing_clips(
    pipeline: Pipeline, params: VideoParams, inputs: Inputs
) -> Iterator[Clip]:
    num_clips, num_steps = params.num_clip or 1, len(make_noise_schedule(params).experts)
    state, pending = inputs.clip_state, None
    maker: ClipMaker | None = None
    preview = pipeline.make_preview(params, inputs)
    for index in range(inputs.num_clips_done, num_clips):
        is_last = index + 1 == num_clips
        if num_clips > 1:
            prompt = format_prompt(params.make_clip_params(index).prompt)
            logger.info("Clip %d of %d: %s", index + 1, num_clips, prompt)
        with make_step_bar(num_steps, "conditioning") as bar:
            if maker is None:
                maker = params.task.make_clips(params, inputs, pipeline)
            clip_params, denoise_inputs = maker.prepare_clip(index, state)
            if preview is not None:
                preview.start_clip(index, maker.select_latents)
            if pending is None:
                pipeline.release(pipeline.vae)
            loop = DenoisingLoop(clip_params, denoise_inputs, preview=preview, loras=inputs.loras)
            try:
                latents = pipeline.denoise(loop, bar=bar)
            except BaseException:
                if pending is not None:  # a retry may need the VAE and its memory
                    pending.wait()
                raise
        del denoise_inputs, loop
        pipeline.release(pipeline.experts)
        if pending is not None:
            yield pending.collect_clip()
        if not is_last:  # while this clip is decoded
            pipeline.experts.prefetch(make_noise_schedule(params).experts[0])
        pending = _ClipDecoding(pipeline, maker, index, latents, is_last)
        state = pending.state
        if pending.in_background:
            continue
        clip = pending.collect_clip()
        pending, state = None, clip.state
        yield clip
        del clip, latents  # free them before the next clip


class _ClipDecoding:
    """Decodes a clip, on the main rank in a thread while all ranks denoise the next clip.

    Attributes:
        in_background: Decoding has started; otherwise `collect_clip` decodes.
        state: `Clip.state`; None while it needs the frames.
    """

    def __init__(
        self, pipeline: Pipeline, maker: ClipMaker, index: int, latents: Tensor, is_last: bool
    ) -> None:
        self._pipeline, self._maker, self._index = pipeline, maker, index
        self._latents, self._is_last = latents, is_last
        # Selected now: the maker changes with the next clip.
        self._selected_latents = maker.select_latents(index, latents)
        self.state = None if maker.state_needs_frames else maker.make_state(latents, None)
        self.in_background = pipeline.overlap_decoding and not is_last and self.state is not None
        self._future: Future[Tensor] | None = None
        if self.in_background and pipeline.is_main:
            executor = ThreadPoolExecutor(1, "decoding")
            self._future = executor.submit(self._decode)
            executor.shutdown(wait=False)

    def _decode(self) -> Tensor:
        pipeline, collected = self._pipeline, FrameCollector(torch.device("cpu"))
        with use_side_stream(pipeline.device.torch_device), pipeline.stage_timer("decoding"):
            pipeline.vae_runner.decode_alone(self._selected_latents, collected)
        return collected.video

    def wait(self) -> None:
        """Waits until decoding has ended or failed."""
        if self._future is not None:
            self._future.exception()

    def collect_clip(self) -> Clip:
        """Returns the clip, and decodes it unless the thread has done so; all ranks call it."""
        pipeline, maker, frames = self._pipeline, self._maker, None
        if self._future is not None:
            try:
                frames = self._future.result()
            except Exception as error:
                logger.warning("A clip is decoded again, without overlap (%s).", error)
        is_missing = torch.tensor([float(frames is None)])
        if self.in_background and not pipeline.run_on_rank0(lambda: is_missing):
            pipeline.release(pipeline.vae)
        else:
            frames = pipeline.decode(self._selected_latents)
        frames = None if frames is None else maker.trim_frames(self._index, frames)
        if maker.state_needs_frames and (maker.continues_after_last or not self._is_last):
            self.state = maker.make_state(self._latents, frames)
        return Clip(self._latents, frames, self.state)
