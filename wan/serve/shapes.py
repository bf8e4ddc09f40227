"""Sizes and shape of a job before it runs, and which jobs can be batched."""

from __future__ import annotations

import json
from math import prod

from wan.app.run import Run
from wan.serve.journal import ServiceJob
from wan.settings.errors import InputError


def set_job_sizes(job: ServiceJob, run: Run) -> None:
    """Sets frames, fps, sizes, steps, guidance, shape and work of a job from its run."""
    params = run.params
    branches, clips = (2 if params.uses_guidance else 1), params.num_clip or 1
    job.frames = params.frame_num
    if params.has_clips:
        job.frames = sum(map(params.count_clip_frames, range(clips)))
    job.fps, (job.width, job.height) = float(run.output.fps), params.video_size
    job.total = params.sample_steps * clips
    low, high = params.sample_guide_scale
    has_two = params.boundary is not None
    job.guidance = {"high_noise": high, "low_noise": low} if has_two else {"dit": low}
    job.shape = json.dumps([params.latent_shape, params.sample_steps, branches, clips])
    job.work = float(prod(params.grid) * params.sample_steps * branches * clips)


def can_share_experts(job: ServiceJob) -> bool:
    """Returns whether a job may run in one batch with others, grouped by expert.

    Videos of several clips may not, since they load their experts for each clip. Neither may a
    second attempt, since the job may have caused the loss of the ranks.
    """
    *_, clips = json.loads(job.shape)
    return job.attempt == 0 and clips == 1


def can_group_by_expert(run: Run) -> bool:
    """Returns whether batches of videos can be grouped by expert in this run."""
    try:
        run.setup.check_grouping()
    except InputError:
        return False
    return True
