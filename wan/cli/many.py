"""The videos of a `--prompt_file`: what is logged about them, and which failures end the run.

With one process a line that fails is reported and the others go on. With several ranks that holds
from the end of a video's decoding, when the main rank alone works on it; an earlier failure ends
all ranks, and the same command with `--skip_existing` goes on.
"""

from __future__ import annotations

import json
import logging
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wan.checkpoint.files import read_json
from wan.cli import failures
from wan.cli.videos import Video
from wan.log import logger
from wan.pipeline.batch import Batch, Job
from wan.pipeline.pipeline import Inputs, Pipeline
from wan.run import Line, Run
from wan.settings.errors import InputError, NotFiniteError

if TYPE_CHECKING:
    from torch import Tensor

    from wan.distributed.mesh import Team


@dataclass(eq=False, kw_only=True)
class LineJob(Job):
    """The video of one line.

    Attributes:
        number: The number of the line in the file.
        video: The video with its files.
    """

    number: int
    video: Video


def make(run: Run, pipeline: Pipeline, team: Team | None) -> bool:
    """Makes the videos of all lines; every rank calls this. Returns whether a line failed."""
    is_main = team is None or team.is_main
    refused = [line.number for line in run.lines if line.error]
    for line in run.lines if is_main else ():
        if line.error:
            logger.error("Line %d is left out: %s", line.number, line.error)
    asked = {line.number: line.run for line in run.lines if line.run is not None}
    good = asked.keys() - set(refused)
    chosen = set(good)
    if run.skip_existing and is_main:
        chosen -= {line.number for line in run.lines if line.number in good and _is_there(line)}
    there = len(good) - len(chosen)
    if team is not None:  # the main rank alone looks at the folder
        chosen = team.value_from_main(chosen)
    jobs = [_job(number, one, pipeline, team) for number, one in asked.items() if number in chosen]
    made: list[LineJob] = []

    def denoised(job: LineJob, latents: Tensor) -> None:
        job.video.keep(latents)

    def failed(job: LineJob, error: Exception) -> None:
        if isinstance(error, NotFiniteError):
            job.video.keep(error.latents)
        elif team is not None and not job.video.alone:
            raise error
        sentence = failures.describe(error)
        words = sentence or repr(error)
        logger.error("%s failed: %s", job.name, words, exc_info=sentence is None)

    def make_video(job: LineJob, latents: Callable[[], Tensor]) -> LineJob:
        logger.info("%s: %s", job.name, job.video.run.output.save_file)
        if not run.group_by_expert:
            pipeline.device.reset_peak_memory()
        job.video.make(latents)
        return job

    pipeline.device.reset_peak_memory()
    grouped = run.group_by_expert
    batch = Batch(pipeline, jobs, group_by_expert=grouped, denoised=denoised, failed=failed)
    try:
        made.extend(batch.made(make_video))
    except BaseException:
        for job in jobs:
            if job.latents is not None and job.video.latents_file is not None:
                where = shlex.quote(str(job.video.latents_file))
                logger.error("%s is denoised: --decode_latents %s", job.name, where)
        raise
    finally:
        if is_main:
            _sum_up(made, sorted([*refused, *(job.number for job in jobs if job.failed)]), there)
    return bool(refused) or any(job.failed for job in jobs)


def _is_there(line: Line) -> bool:
    """Whether the video of a line is there, made with the same settings as its record says."""
    assert line.run is not None
    output = line.run.output
    if not output.save_file.exists():
        return False
    try:
        made = read_json(output.record)["settings"]
    except (InputError, KeyError):
        return True  # nothing is known of it
    asked = json.loads(json.dumps(line.run.settings, default=str))
    unknown = {name for name, value in asked.items() if value == "auto"}  # until it runs
    free = unknown | {"save_file"} | ({"base_seed"} if line.draws else set())
    changed = [n for n in asked if n not in free and asked[n] != made.get(n)]
    changed += [n for n in made if n not in asked and n not in free]
    if changed:
        names = ", ".join(changed)
        logger.info("%s is made again: it differs in %s.", output.save_file, names)
    return not changed


def _job(number: int, run: Run, pipeline: Pipeline, team: Team | None) -> LineJob:
    video = Video(run, pipeline, team)
    inputs = Inputs(run.image, run.last_image)
    return LineJob(f"Line {number}", run.request, inputs, number=number, video=video)


def _sum_up(made: Sequence[LineJob], failed: Sequence[int], there: int) -> None:
    """Logs how many videos there are, what failed, and the seconds that sharing one load saved."""
    parts = [f"{len(made)} video{'' if len(made) == 1 else 's'} made"]
    parts += [f"{there} there already"] if there else []
    parts += [f"failed: line {', '.join(map(str, failed))}"] if failed else []
    text = "; ".join(parts)
    if made:
        text += f". {statistics.median(job.seconds for job in made):.1f} s each (median)"
    if len(made) > 1:
        first, *others = (job.stages.get("loading", 0.0) for job in made)
        saved = max(len(others) * first - sum(others), 0.0)  # the first one has loaded everything
        text += f"; loading took {first:.1f} s of the first and saved the others {saved:.1f} s"
    logger.log(logging.ERROR if failed else logging.INFO, "%s.", text)
