"""The videos of a --prompt_file, one after the other, with the networks of one load.

With one process a line that fails is reported and the others go on. So do several ranks once a
video is decoded, when the main one is alone with it; before that all of them end, and the same
command with --skip_existing goes on.
"""

from __future__ import annotations

import gc
import logging
import shlex
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wan.cli import failures, videos
from wan.log import logger
from wan.run import Run
from wan.settings.execution import AHEAD

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from wan.distributed.mesh import Team
    from wan.pipeline.denoise import Denoising
    from wan.pipeline.pipeline import Pipeline


@dataclass
class Job:
    """A line that is being made.

    Attributes:
        number: Of the line.
        run: What it asks for.
        seconds: Spent on it.
        stages: Likewise, by stage.
        parted: The main rank goes on alone.
        failed: It has.
        video: Its latents between two steps.
        denoised: They at the end, and the file they are in.
    """

    number: int
    run: Run
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    parted: bool = False
    failed: bool = False
    video: Denoising | None = None
    denoised: tuple[Tensor, Path | None] | None = None

    def part(self) -> None:
        self.parted = True


@dataclass
class Told:
    """What became of the lines, for the summary."""

    failed: list[int] = field(default_factory=list)
    there: int = 0
    made: list[Job] = field(default_factory=list)

    def say(self) -> None:
        count = len(self.made)
        parts = [f"{count} video{'' if count == 1 else 's'} made"]
        parts += [f"{self.there} there already"] if self.there else []
        if self.failed:
            parts.append(f"failed: line {', '.join(map(str, sorted(self.failed)))}")
        text = "; ".join(parts)
        if count:
            text += f". {statistics.median(job.seconds for job in self.made):.1f} s each (median)"
        if count > 1:
            first, *others = (job.stages.get("loading", 0.0) for job in self.made)
            saved = max(len(others) * first - sum(others), 0.0)  # it alone has loaded everything
            text += f"; loading took {first:.1f} s of the first and saved the others {saved:.1f} s"
        logger.log(logging.ERROR if self.failed else logging.INFO, "%s.", text)


def make(run: Run, pipeline: Pipeline, team: Team | None) -> bool:
    """Whether a line failed; every rank calls this."""
    told, is_main = Told(), team is None or team.is_main
    for line in run.lines:
        if line.error and is_main:
            logger.error("Line %d is left out: %s", line.number, line.error)
        told.failed += [line.number] if line.error else []
    jobs = _jobs(run, team, told)
    work = _Work(pipeline, team, told)
    try:
        for first in range(0, len(jobs), AHEAD):
            some = jobs[first : first + AHEAD]
            work.embed(some)
            if run.group_by_expert:
                work.grouped(some)
            else:
                work.in_turn(some)
    finally:
        if is_main:
            told.say()
    return bool(told.failed)


def _jobs(run: Run, team: Team | None, told: Told) -> list[Job]:
    """The lines to make."""
    good = {line.number: line.run for line in run.lines if line.run is not None and not line.error}
    chosen = {
        number
        for number, one in good.items()
        if not (run.skip_existing and one.output.save_file.exists())
    }
    told.there = len(good) - len(chosen)
    # The main rank decides: it alone looks at the folder.
    chosen = chosen if team is None else team.value_from_main(chosen)
    asked = {line.number: line.run for line in run.lines if line.run is not None}
    return [Job(number, one) for number, one in asked.items() if number in chosen]


class _Work:
    """Makes videos of lines."""

    def __init__(self, pipeline: Pipeline, team: Team | None, told: Told) -> None:
        self._pipeline, self._team, self._told = pipeline, team, told

    def embed(self, jobs: Sequence[Job]) -> None:
        """The texts of all; the first one's record has what that took."""
        begun, self._pipeline.stages.seconds = time.perf_counter(), jobs[0].stages
        texts = [text for job in jobs for text in job.run.request.texts]
        self._pipeline.keep_texts(texts, jobs[0].run.request)
        jobs[0].seconds += time.perf_counter() - begun

    def in_turn(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            logger.info("Line %d: %s", job.number, job.run.output.save_file)
            with self._attempt(job):
                videos.make_video(job.run, self._pipeline, self._team, job.part)
            self._finished(job)

    def grouped(self, jobs: Sequence[Job]) -> None:
        """All lines' steps of an expert before any of the next; then decodes them all."""
        self._pipeline.device.reset_peak_memory()
        try:
            self._denoise(jobs)
            for job in jobs:
                if job.denoised is not None:
                    self._write(job, *job.denoised)
        except BaseException:
            for job in jobs:
                if job.denoised is not None and job.denoised[1] is not None:
                    where = shlex.quote(str(job.denoised[1]))
                    logger.error("Line %d is denoised: --decode_latents %s", job.number, where)
            raise

    def _denoise(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            with self._attempt(job):
                self._prepare(job)
        for expert in jobs[0].run.request.preset.experts:
            for job in jobs:
                if job.video is not None and job.video.experts[:1] == [expert]:
                    with self._attempt(job):
                        self._advance(job, job.video)
        self._pipeline.done(self._pipeline.experts)

    def _write(self, job: Job, latents: Tensor, kept: Path | None) -> None:
        job.denoised = None  # if this fails, it says itself where they are
        with self._attempt(job):
            found = (latents, kept)
            videos.write_video(job.run, self._pipeline, self._team, job.part, found)
        self._finished(job)

    def _prepare(self, job: Job) -> None:
        run = job.run
        job.video = self._pipeline.prepared(run.request, run.image, last_image=run.last_image)
        job.video.rest()

    def _advance(self, job: Job, video: Denoising) -> None:
        """The steps of the next expert."""
        logger.info("Line %d: %s", job.number, job.run.request.prompt)
        latents = self._pipeline.advanced(video, phases=1)
        if video.experts:
            video.rest()
            return
        kept = videos.save_latents(job.run, latents, self._team)
        job.video, job.denoised = None, (latents.cpu(), kept)

    @contextmanager
    def _attempt(self, job: Job) -> Iterator[None]:
        """A part of the work for a line: its seconds, and its failure."""
        begun, self._pipeline.stages.seconds = time.perf_counter(), job.stages
        try:
            yield
        except Exception as error:
            if self._team is not None and not job.parted:
                raise
            sentence = failures.describe(error)
            words = sentence or repr(error)
            logger.error("Line %d failed: %s", job.number, words, exc_info=sentence is None)
            job.failed, job.video = True, None
            self._told.failed.append(job.number)
        finally:
            job.seconds += time.perf_counter() - begun
        if job.failed:
            self._pipeline.abandon()
            gc.collect()  # what the error held
            self._pipeline.device.empty_cache()

    def _finished(self, job: Job) -> None:
        self._told.made += [] if job.failed else [job]
