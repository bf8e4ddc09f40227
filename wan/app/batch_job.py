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

from wan.app import failures
from wan.app.job import VideoJob
from wan.app.run import PromptLine, Run, list_changed_settings
from wan.checkpoint.formats.headers import read_json
from wan.pipeline.batch import Batch, Job
from wan.pipeline.pipeline import Pipeline
from wan.settings.errors import InputError, NotFiniteError
from wan.utils import log
from wan.utils.files import SUMMARY_KIND, write_output
from wan.utils.log import logger

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
    video: VideoJob
    error: str = ""


def make_videos(run: Run, pipeline: Pipeline, groups: ParallelGroups | None) -> bool:
    """Generates the videos of all lines, on all ranks; returns whether a line failed."""
    is_main = groups is None or groups.is_main
    refused_lines = {line.name: line.error for line in run.lines if line.error}
    for name, error in refused_lines.items() if is_main else ():
        logger.error("Line %s is left out: %s", name, error)
    existing = [line.name for line in run.lines if _is_skipped(line, run)] if is_main else []
    pending = {line.name for line in run.lines} - refused_lines.keys() - {*existing}
    if groups is not None:  # only the main rank reads the folder
        pending = groups.broadcast_object_from_rank0(pending)
    jobs = [_make_job(line, pipeline, groups) for line in run.lines if line.name in pending]
    logged_notices = {*run.notices}
    for job in jobs:
        job.video.log_notices(job.name, logged_notices)
    finished_jobs: list[LineJob] = []

    def handle_failure(job: LineJob, error: Exception) -> None:
        if isinstance(error, NotFiniteError):
            job.video.save_denoised_latents(error.latents)
        elif groups is not None and not job.video.is_main_only:
            raise error
        sentence = failures.describe_error(error)
        job.error = sentence or repr(error)
        logger.error("%s failed: %s", job.name, job.error, exc_info=sentence is None)

    def make_video(job: LineJob, get_latents: Callable[[], Tensor]) -> LineJob:
        num_done = jobs.index(job)
        seconds = [earlier_job.seconds for earlier_job in finished_jobs]
        remaining = statistics.median(seconds) * (len(jobs) - num_done) if seconds else None
        estimate = "" if remaining is None else f", about {log.format_duration(remaining)} left"
        path = job.video.run.output.save_file
        logger.info("%s, %d of %d%s: %s", job.name, num_done + 1, len(jobs), estimate, path)
        if not run.group_by_expert:
            pipeline.device.reset_peak_memory()
        job.video.make(get_latents)
        return job

    pipeline.device.reset_peak_memory()
    batch = Batch(
        pipeline,
        jobs,
        group_by_expert=run.group_by_expert,
        on_denoised=lambda job, latents: job.video.save_denoised_latents(latents),
        on_failed=handle_failure,
    )
    try:
        for job in batch.generate_videos(make_video):
            finished_jobs.append(job)
    except BaseException:
        _log_denoised_lines(jobs)
        raise
    finally:
        if is_main:
            _write_summary(run, refused_lines, existing, jobs, finished_jobs)
    return bool(refused_lines) or any(job.failed for job in jobs)


def _make_job(line: PromptLine, pipeline: Pipeline, groups: ParallelGroups | None) -> LineJob:
    assert line.run is not None
    video = VideoJob(line.run, pipeline, groups)
    params, inputs = line.run.params, video.make_inputs()
    return LineJob(f"Line {line.name}", params, inputs, line=line.name, video=video)


def _log_denoised_lines(jobs: Sequence[LineJob]) -> None:
    """Logs how the videos whose latents are in memory and on disk are decoded later."""
    for job in jobs:
        if job.latents is not None and job.video.latents_file is not None:
            quoted_path = shlex.quote(str(job.video.latents_file))
            logger.error("%s is denoised: --decode_latents %s", job.name, quoted_path)


def _is_skipped(line: PromptLine, run: Run) -> bool:
    """Returns whether `skip_existing` is set and a line's video has the line's settings."""
    if line.run is None or line.error or not run.skip_existing:
        return False
    output = line.run.output
    if not output.save_file.exists():
        return False
    try:
        stored_settings = read_json(output.record_path)["settings"]
    except (InputError, KeyError):
        return True  # it has no record to compare with
    current = json.loads(json.dumps(line.run.settings, default=str))
    auto_settings = {name for name, value in current.items() if value == "auto"}  # until the run
    ignored = auto_settings | {"save_file"} | ({"base_seed"} if line.draws_seed else set())
    changed = [n for n in list_changed_settings(current, stored_settings) if n not in ignored]
    if changed:
        names = ", ".join(changed)
        logger.info("%s is made again: it differs in %s.", output.save_file, names)
    return not changed


def _write_summary(
    run: Run,
    refused_lines: Mapping[str, str],
    existing: Sequence[str],
    jobs: Sequence[LineJob],
    finished_jobs: Sequence[LineJob],
) -> None:
    """Logs and writes the outcome of all lines, and the seconds saved by loading once."""
    failed = {job.line: job.error for job in jobs if job.failed}
    reached_lines = {job.line for job in finished_jobs} | failed.keys()
    unreached_lines = [job.line for job in jobs if job.line not in reached_lines]
    parts = [f"{len(finished_jobs)} video{'' if len(finished_jobs) == 1 else 's'} made"]
    outcomes = {"refused": refused_lines, "failed": failed, "not reached": unreached_lines}
    parts += [f"{len(existing)} there already"] if existing else []
    parts += [f"{outcome}: line {', '.join(names)}" for outcome, names in outcomes.items() if names]
    text = "; ".join(parts)
    if finished_jobs:
        text += f". {statistics.median(job.seconds for job in finished_jobs):.1f} s each (median)"
    if len(finished_jobs) > 1:
        first_seconds, *later_seconds = (job.stages.get("loading", 0.0) for job in finished_jobs)
        # The first one loads all networks.
        saved_seconds = max(len(later_seconds) * first_seconds - sum(later_seconds), 0.0)
        text += f"; the first one loaded networks for {first_seconds:.1f} s"
        text += f", and reusing them saved the others {saved_seconds:.1f} s"
    is_incomplete = bool(refused_lines or failed or unreached_lines)
    logger.log(logging.ERROR if is_incomplete else logging.INFO, "%s.", text)
    command = [*sys.argv, *(() if "--skip_existing" in sys.argv else ("--skip_existing",))]
    summary = {
        "made": {job.line: str(job.video.run.output.save_file.absolute()) for job in finished_jobs},
        "there already": existing,
        **outcomes,
        "seconds": {job.line: round(job.seconds, 3) for job in finished_jobs},
        "go on with": shlex.join(command) if failed or unreached_lines else None,
    }
    assert run.summary is not None
    try:
        with write_output(run.summary, SUMMARY_KIND) as temporary:
            temporary.write_text(json.dumps(summary, indent=1, ensure_ascii=False), "utf-8")
    except OSError as error:
        logger.error("%s could not be written (%s).", run.summary, error.strerror or error)
    else:
        logger.info("Summary: %s", run.summary)
