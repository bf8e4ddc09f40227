"""What is known of a job's video before it is made, and which jobs may be made together."""

from __future__ import annotations

import json
from math import prod

from wan.run import Run
from wan.serve.journal import QueuedVideo
from wan.settings.errors import InputError


def describe_job(job: QueuedVideo, run: Run) -> None:
    """Notes what is known of a job's video before it is made."""
    request = run.request
    branches, clips = (2 if request.guided else 1), request.num_clip or 1
    job.frames = request.frame_num
    if request.clips:
        job.frames = sum(map(request.clip_frames, range(clips)))
    job.fps, (job.width, job.height) = float(run.output.fps), request.video_size
    job.total = request.sample_steps * clips
    low, high = request.sample_guide_scale
    has_two = request.boundary is not None
    job.guidance = {"high_noise": high, "low_noise": low} if has_two else {"dit": low}
    job.shape = json.dumps([request.latent_shape, request.sample_steps, branches, clips])
    job.work = float(prod(request.grid) * request.sample_steps * branches * clips)


def may_share(job: QueuedVideo) -> bool:
    """Returns whether a video may take the steps of each expert together with others.

    Long videos load their experts for each clip; and what was begun when the ranks were lost may
    have been the cause.
    """
    *_, clips = json.loads(job.shape)
    return job.attempt == 0 and clips == 1


def can_group(run: Run) -> bool:
    """Returns whether videos can take the steps of each expert together, and may gain by it."""
    try:
        run.setup.check_grouping()
    except InputError:
        return False
    return True
