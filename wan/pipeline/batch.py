"""Generates many videos with networks loaded once, for `--prompt_file` and `generate_many`.

The prompts of up to `AHEAD` videos are encoded before the first video is denoised, so that the text
encoder is loaded once. The videos are then generated in order, or, with `group_by_expert`, all of
them run the steps of the high-noise expert before the low-noise expert is loaded; meanwhile their
latents are in host memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from wan import log
from wan.log import logger
from wan.settings.errors import EndedError
from wan.settings.execution import AHEAD

if TYPE_CHECKING:
    from torch import Tensor

    from wan.pipeline.denoise import Boundary, Denoising
    from wan.pipeline.pipeline import Inputs, Pipeline
    from wan.settings.request import Request


@dataclass(eq=False)
class Job:
    """One video of a batch.

    Attributes:
        name: The name in log messages, such as "Line 3".
        seconds: Wall-clock time of this video.
        stages: Seconds by stage, as in `wan.log.Stages`.
        denoising: The paused loop of a video between its two experts.
        latents: The denoised latents on the CPU, before they are decoded.
        cancellation_point: Checked between steps; None: that of the pipeline.
    """

    name: str
    request: Request
    inputs: Inputs
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    denoising: Denoising | None = None
    latents: Tensor | None = None
    failed: bool = False
    boundary: Boundary | None = None


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
        denoised: Callable[[J, Tensor], None] | None = None,
        failed: Callable[[J, Exception], None] | None = None,
    ) -> None:
        """Computes nothing yet.

        Args:
            pipeline: Its current `offload_model` is used for all jobs.
            group_by_expert: Run the steps of one expert for all videos before those of the next.
            on_denoised: Called with a job and its final latents.
            on_failed: Called with a job and its error; the batch then continues with the other
                jobs, unless this function raises. None: every error ends the batch.
        """
        self._pipeline, self._jobs, self._grouped = pipeline, jobs, group_by_expert
        self._denoised, self._failed = denoised, failed
        self._offload = pipeline.residency.offload

    def made(self, make: Callable[[J, Callable[[], Tensor]], T]) -> Iterator[T]:
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
            for first in range(0, len(self._jobs), AHEAD):
                jobs = self._jobs[first : first + AHEAD]
                if several:
                    self._embed_texts(jobs)
                if self._grouped:
                    self._denoise_by_expert(jobs)
                for job in jobs:
                    if job.failed:
                        continue
                    made: list[T] = []
                    with self._attempt(job):
                        made.append(make(job, partial(self._latents, job)))
                    if made:
                        yield made.pop()  # no reference to the video remains here
                        self._pipeline.set_offload(self._offload)
        finally:
            if several:
                self._pipeline.kept = {}

    def _embed_texts(self, jobs: Sequence[J]) -> None:
        """Encodes the prompts of all jobs; the time is counted for the first job."""
        first = jobs[0]
        begun, self._pipeline.stages.seconds = time.perf_counter(), first.stages
        texts = []
        for job in jobs:
            embeds = (job.inputs.prompt_embeds, job.inputs.negative_prompt_embeds)
            pairs = zip(job.request.texts, embeds, strict=False)
            texts += [text for text, given in pairs if given is None]
        if texts:
            self._pipeline.keep_texts(texts, first.request)
        first.seconds += time.perf_counter() - begun

    def _latents(self, job: J) -> Tensor:
        if job.latents is not None:
            latents, job.latents = job.latents, None
            return latents.to(self._pipeline.device.torch_device)
        latents = self._pipeline.latents(job.request, job.inputs)
        if self._denoised is not None:
            self._denoised(job, latents)
        return latents

    def _denoise_by_expert(self, jobs: Sequence[J]) -> None:
        """Denoises all jobs, loading each expert once."""
        pipeline = self._pipeline
        for job in (one for one in jobs if not one.request.clips):  # no grouping of clips
            with self._attempt(job):
                job.denoising = pipeline.prepared(job.request, job.inputs)
                job.denoising.rest()
        for expert in jobs[0].request.preset.experts:
            for job in jobs:
                if job.denoising is not None and job.denoising.experts[:1] == [expert]:
                    shown = log.format_prompt(job.request.prompt)
                    logger.info("%s, %s expert: %s", job.name, expert, shown)
                    with self._attempt(job):
                        self._take_steps(job, job.denoising)
        pipeline.done(pipeline.experts)

    def _take_steps(self, job: J, denoising: Denoising) -> None:
        """Runs the steps of the next expert."""
        latents = self._pipeline.advanced(denoising, phases=1)
        if denoising.experts:
            denoising.rest()
            return
        if self._denoised is not None:
            self._denoised(job, latents)
        job.denoising, job.latents = None, latents.cpu()

    @contextmanager
    def _attempt(self, job: J) -> Iterator[None]:
        """Measures the time of a job, and lets the other jobs continue if it fails."""
        begun, self._pipeline.stages.seconds = time.perf_counter(), job.stages
        between = False
        if job.boundary is not None:
            self._pipeline.boundary = job.boundary
        try:
            yield
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(job, error)
            job.failed, job.denoising, job.latents = True, None, None
            between = self._grouped and isinstance(error, EndedError)
        finally:
            job.seconds += time.perf_counter() - begun
        if job.failed and not between:  # otherwise other videos need the loaded expert
            self._pipeline.abandon()
            gc.collect()  # tensors referenced by the traceback
            self._pipeline.device.empty_cache()
