"""Generates the videos of a `--prompt_file`, logs them, and handles failures of single lines.

With one process a line that fails is reported and the next ones are generated. With several ranks
the same is true of failures on the main rank after decoding; an earlier failure ends all ranks, and
the same command with `--skip_existing` resumes the run.
"""

from __future__ import annotations

import json
import logging
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wan import log
from wan.checkpoint.files import read_json
from wan.cli import failures
from wan.cli.videos import Video
from wan.log import logger
from wan.output_files import SUMMARY, write_output
from wan.pipeline.batch import Batch, Job
from wan.pipeline.pipeline import Pipeline
from wan.run import Line, Run
from wan.settings.errors import InputError, NotFiniteError

if TYPE_CHECKING:
    from torch import Tensor

    from wan.distributed.mesh import ParallelGroups


@dataclass(eq=False, kw_only=True)
class LineJob(Job):
    """The video of one line.

    Attributes:
        line: Name of the line.
        error: Reason of a failure; "" without one.
    """

    line: str
    video: Video
    error: str = ""


def make(run: Run, pipeline: Pipeline, team: ParallelGroups | None) -> bool:
    """Generates the videos of all lines, on all ranks; returns whether a line failed."""
    is_main = team is None or team.is_main
    refused = {line.name: line.error for line in run.lines if line.error}
    for name, error in refused.items() if is_main else ():
        logger.error("Line %s is left out: %s", name, error)
    good = [line for line in run.lines if line.name not in refused]
    there = [one.name for one in good if is_main and run.skip_existing and _is_there(one)]
    chosen = {line.name for line in good} - {*there}
    if team is not None:  # only the main rank reads the folder
        chosen = team.broadcast_object_from_rank0(chosen)
    videos = {
        line.name: Video(line.run, pipeline, team)
        for line in run.lines
        if line.run is not None and line.name in chosen
    }
    jobs = [
        LineJob(f"Line {name}", video.run.request, video.inputs(), line=name, video=video)
        for name, video in videos.items()
    ]
    made: list[LineJob] = []

    def denoised(job: LineJob, latents: Tensor) -> None:
        job.video.keep(latents)

    def failed(job: LineJob, error: Exception) -> None:
        if isinstance(error, NotFiniteError):
            job.video.keep(error.latents)
        elif team is not None and not job.video.alone:
            raise error
        sentence = failures.describe(error)
        job.error = sentence or repr(error)
        logger.error("%s failed: %s", job.name, job.error, exc_info=sentence is None)

    def make_video(job: LineJob, latents: Callable[[], Tensor]) -> LineJob:
        done = jobs.index(job)
        left = statistics.median(one.seconds for one in made) * (len(jobs) - done) if made else None
        about = "" if left is None else f", about {log.duration(left)} left"
        path = job.video.run.output.save_file
        logger.info("%s, %d of %d%s: %s", job.name, done + 1, len(jobs), about, path)
        if not run.group_by_expert:
            pipeline.device.reset_peak_memory()
        job.video.make(latents)
        return job

    pipeline.device.reset_peak_memory()
    grouped = run.group_by_expert
    batch = Batch(pipeline, jobs, group_by_expert=grouped, on_denoised=denoised, on_failed=failed)
    try:
        for job in batch.generate_videos(make_video):
            made.append(job)
    except BaseException:
        for job in jobs:
            if job.latents is not None and job.video.latents_file is not None:
                where = shlex.quote(str(job.video.latents_file))
                logger.error("%s is denoised: --decode_latents %s", job.name, where)
        raise
    finally:
        if is_main:
            _sum_up(run, refused, there, jobs, made)
    return bool(refused) or any(job.failed for job in jobs)


def _is_there(line: Line) -> bool:
    """Returns whether a line's video exists and was generated with the line's settings."""
    assert line.run is not None
    output = line.run.output
    if not output.save_file.exists():
        return False
    try:
        made = read_json(output.record_path)["settings"]
    except (InputError, KeyError):
        return True  # it has no record to compare with
    asked = json.loads(json.dumps(line.run.settings, default=str))
    unknown = {name for name, value in asked.items() if value == "auto"}  # until the run
    free = unknown | {"save_file"} | ({"base_seed"} if line.draws else set())
    changed = [n for n in asked if n not in free and asked[n] != made.get(n)]
    changed += [n for n in made if n not in asked and n not in free]
    if changed:
        names = ", ".join(changed)
        logger.info("%s is made again: it differs in %s.", output.save_file, names)
    return not changed


def _sum_up(
    run: Run,
    refused: Mapping[str, str],
    there: Sequence[str],
    jobs: Sequence[LineJob],
    made: Sequence[LineJob],
) -> None:
    """Logs and writes the outcome of all lines, and the seconds saved by loading once."""
    failed = {job.line: job.error for job in jobs if job.failed}
    reached = {job.line for job in made} | failed.keys()
    left = [job.line for job in jobs if job.line not in reached]
    parts = [f"{len(made)} video{'' if len(made) == 1 else 's'} made"]
    lines = {"refused": refused, "failed": failed, "not reached": left}
    parts += [f"{len(there)} there already"] if there else []
    parts += [f"{what}: line {', '.join(names)}" for what, names in lines.items() if names]
    text = "; ".join(parts)
    if made:
        text += f". {statistics.median(job.seconds for job in made):.1f} s each (median)"
    if len(made) > 1:
        first, *others = (job.stages.get("loading", 0.0) for job in made)
        saved = max(len(others) * first - sum(others), 0.0)  # the first one loads all networks
        text += f"; loading took {first:.1f} s of the first and saved the others {saved:.1f} s"
    bad = bool(refused or failed or left)
    logger.log(logging.ERROR if bad else logging.INFO, "%s.", text)
    again = [*sys.argv, *(() if "--skip_existing" in sys.argv else ("--skip_existing",))]
    summary = {
        "made": {job.line: str(job.video.run.output.save_file.absolute()) for job in made},
        "there already": there,
        **lines,
        "seconds": {job.line: round(job.seconds, 3) for job in made},
        "go on with": shlex.join(again) if failed or left else None,
    }
    assert run.summary is not None
    try:
        with write_output(run.summary, SUMMARY) as temporary:
            temporary.write_text(json.dumps(summary, indent=1, ensure_ascii=False), "utf-8")
    except OSError as error:
        logger.error("%s could not be written (%s).", run.summary, error.strerror or error)
    else:
        logger.info("Summary: %s", run.summary)
