"""The loop over the clips of a video; what a clip is, says the `ClipMaker` of the task."""

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
    state, pending_decode = inputs.clip_state, None
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
            if pending_decode is None:
                pipeline.release(pipeline.vae)
            loop = DenoisingLoop(clip_params, denoise_inputs, preview=preview, loras=inputs.loras)
            try:
                latents = pipeline.denoise(loop, bar=bar)
            except BaseException:
                if pending_decode is not None:  # a retry may need the VAE and its memory
                    pending_decode.wait()
                raise
        del denoise_inputs, loop
        pipeline.release(pipeline.experts)
        if pending_decode is not None:
            yield pending_decode.collect_clip()
            pending_decode = None
        if not is_last:  # while this clip is decoded
            pipeline.experts.prefetch(make_noise_schedule(params).experts[0])
        if pipeline.overlap_decoding and not is_last and not maker.state_needs_frames:
            pending_decode = _BackgroundDecode(pipeline, maker, index, latents)
            state = pending_decode.state
            continue
        clip = _decode_clip(pipeline, maker, index, latents, is_last)
        state = clip.state
        yield clip
        del clip, latents  # free them before the next clip


def _decode_clip(
    pipeline: Pipeline, maker: ClipMaker, index: int, latents: Tensor, is_last: bool
) -> Clip:
    frames = pipeline.decode(maker.select_latents(index, latents))
    frames = None if frames is None else maker.trim_frames(index, frames)
    has_state = not (is_last and maker.state_needs_frames) or maker.continues_after_last
    return Clip(latents, frames, maker.make_state(latents, frames) if has_state else None)


class _BackgroundDecode:
    """Decodes a clip in a thread of the main rank while all ranks denoise the next clip."""

    def __init__(self, pipeline: Pipeline, maker: ClipMaker, index: int, latents: Tensor) -> None:
        """Starts decoding; makes the clip's state, which needs no frames."""
        self._pipeline, self._maker, self._index = pipeline, maker, index
        self._latents, self.state = latents, maker.make_state(latents, None)
        # Selected now: the maker changes with the next clip.
        self._selected_latents = maker.select_latents(index, latents)
        self._future: Future[Tensor] | None = None
        if pipeline.is_main:
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
            frames = self._pipeline.decode(self._selected_latents)
        else:
            self._pipeline.release(self._pipeline.vae)
        new_frames = None if frames is None else self._maker.trim_frames(self._index, frames)
        return Clip(self._latents, new_frames, self.state)
