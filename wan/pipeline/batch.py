"""Generates many videos with networks loaded once, for `--prompt_file` and `generate_many`.

The prompts of up to `VIDEO_GROUP_SIZE` videos are encoded before the first video is denoised, so
that the text encoder is loaded once. The videos are then generated in order, or, with
`group_by_expert`, all videos run the steps of the high-noise expert before the low-noise expert is
loaded; meanwhile their latents are in host memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Generic, TypeVar

from wan.settings.errors import EndedError
from wan.settings.execution import VIDEO_GROUP_SIZE
from wan.utils import log
from wan.utils.log import logger

if TYPE_CHECKING:
    from torch import Tensor

    from wan.pipeline.denoise import CancellationPoint, DenoisingLoop
    from wan.pipeline.pipeline import Pipeline
    from wan.tasks.base import Inputs, VideoParams


@dataclass(eq=False)
class Job:
    """One video of a batch.

    Attributes:
        name: The name in log messages, such as "Line 3".
        seconds: Wall-clock time of this video.
        stages: Seconds by stage, as in `wan.utils.log.StageTimer`.
        denoising: The paused loop of a video between its two experts.
        latents: The denoised latents on the CPU, before they are decoded.
        cancellation_point: Checked between steps; None: that of the pipeline.
    """

    name: str
    params: VideoParams
    inputs: Inputs
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    denoising: DenoisingLoop | None = None
    latents: Tensor | None = None
    failed: bool = False
    cancellation_point: CancellationPoint | None = None


J = TypeVar("J", bound=Job)
T = TypeVar("T")


class Batch(Generic[J]):
    """Generates the videos of several jobs in an order that saves loading networks."""

    def __init__(
        self,
        pipeline: Pipeline,
        jobs: Sequence[J],
        *,
        group_by_expert: bool = False,
        on_denoised: Callable[[J, Tensor], None] | None = None,
        on_failed: Callable[[J, Exception], None] | None = None,
    ) -> None:
        """Computes nothing yet.

        Args:
            pipeline: Its current `offload_model` is used for all jobs.
            group_by_expert: Run the steps of one expert for all videos before those of the next.
            on_denoised: Called with a job and its final latents.
            on_failed: Called with a job and its error; the batch then continues with the other
                jobs, unless this function raises. None: every error ends the batch.
        """
        self._pipeline, self._jobs, self._group_by_expert = pipeline, jobs, group_by_expert
        self._on_denoised, self._on_failed = on_denoised, on_failed
        self._offload = pipeline.offload_manager.offload

    def generate_videos(self, make: Callable[[J, Callable[[], Tensor]], T]) -> Iterator[T]:
        """Generates the videos; all ranks call it.

        Args:
            make: make(job, latents) generates the video of a job. `latents()` returns the denoised
                latents, float32 [Z,f,h,w] on the device; without `group_by_expert` it computes
                them.

        Yields:
            The result of `make` for each job that did not fail. The caller may use the pipeline for
            other videos between two results.
        """
        several = len(self._jobs) > 1
        try:
            for first in range(0, len(self._jobs), VIDEO_GROUP_SIZE):
                jobs = self._jobs[first : first + VIDEO_GROUP_SIZE]
                if several:
                    self._encode_prompts(jobs)
                if self._group_by_expert:
                    self._denoise_by_expert(jobs)
                for job in jobs:
                    if job.failed:
                        continue
                    results: list[T] = []
                    with self._isolate_failure(job):
                        results.append(make(job, partial(self._get_latents, job)))
                    if results:
                        yield results.pop()  # no reference to the video remains here
                        self._pipeline.set_offload(self._offload)
        finally:
            if several:
                self._pipeline.cached_prompt_embeds = {}

    def _encode_prompts(self, jobs: Sequence[J]) -> None:
        """Encodes the prompts of all jobs; the time is counted for the first job."""
        first = jobs[0]
        start_time, self._pipeline.stage_timer.seconds = time.perf_counter(), first.stages
        prompts = []
        for job in jobs:
            embeds = (job.inputs.prompt_embeds, job.inputs.negative_prompt_embeds)
            pairs = zip(job.params.all_prompts, chain(embeds, repeat(None)), strict=False)
            prompts += [prompt for prompt, embedding in pairs if embedding is None]
        if prompts:
            self._pipeline.cache_prompt_embeds(prompts, first.params)
        first.seconds += time.perf_counter() - start_time

    def _get_latents(self, job: J) -> Tensor:
        if job.latents is not None:
            latents, job.latents = job.latents, None
            return latents.to(self._pipeline.device.torch_device)
        latents = self._pipeline.generate_latents(job.params, job.inputs)
        if self._on_denoised is not None:
            self._on_denoised(job, latents)
        return latents

    def _denoise_by_expert(self, jobs: Sequence[J]) -> None:
        """Denoises all jobs, loading each expert once."""
        pipeline = self._pipeline
        for job in (
            candidate for candidate in jobs if not candidate.params.has_clips
        ):  # clips are not grouped
            with self._isolate_failure(job):
                job.denoising = pipeline.prepare_denoising(job.params, job.inputs)
                job.denoising.offload()
        for expert in jobs[0].params.preset.experts:
            for job in jobs:
                if job.denoising is not None and job.denoising.remaining_experts[:1] == [expert]:
                    prompt = log.format_prompt(job.params.prompt)
                    logger.info("%s, %s expert: %s", job.name, expert, prompt)
                    with self._isolate_failure(job):
                        self._run_expert_steps(job, job.denoising)
        pipeline.release(pipeline.experts)

    def _run_expert_steps(self, job: J, loop: DenoisingLoop) -> None:
        """Runs the steps of the next expert."""
        latents = self._pipeline.denoise(loop, num_experts=1)
        if job.params.preview:
            self._pipeline.release_vae()
        if loop.remaining_experts:
            loop.offload()
            return
        if self._on_denoised is not None:
            self._on_denoised(job, latents)
        job.denoising, job.latents = None, latents.cpu()

    @contextmanager
    def _isolate_failure(self, job: J) -> Iterator[None]:
        """Measures the time of a job, and lets the other jobs continue if it fails."""
        start_time, self._pipeline.stage_timer.seconds = time.perf_counter(), job.stages
        keep_expert = False
        if job.cancellation_point is not None:
            self._pipeline.cancellation_point = job.cancellation_point
        try:
            yield
        except Exception as error:
            if self._on_failed is None:
                raise
            self._on_failed(job, error)
            job.failed, job.denoising, job.latents = True, None, None
            keep_expert = self._group_by_expert and isinstance(error, EndedError)
        finally:
            job.seconds += time.perf_counter() - start_time
        if job.failed and not keep_expert:  # otherwise other videos need the loaded expert
            self._pipeline.release_all()
            gc.collect()  # tensors referenced by the traceback
            self._pipeline.device.empty_cache()
